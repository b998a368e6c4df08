"""Recipe of each record: a label in the data selects one of the configured recipes and can name nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from megappo.config.errors import ConfigError, problem
from megappo.config.reward_sections import DEFAULT_RECIPE, RewardConfig
from megappo.data.prompts import Prompt, PromptSet, Record, record_field

_SHOWN = 3  # records that a message names
_LABELS = 8  # labels that a message names


def recipe_of(reward: RewardConfig, record: Record) -> str:
    """Return the label of the record's recipe, a key of `reward.recipes`, which `check_labels` has verified."""
    if reward.route is None:
        return ""
    label = _label(record, reward.route.key)
    return label if label in reward.route.map else DEFAULT_RECIPE


def scored_by(reward: RewardConfig, part: str, prompts: PromptSet) -> list[Prompt]:
    """Return the prompts whose recipe has the part with this label."""
    having = {recipe for recipe, parts in reward.recipes.items() if any(one.label == part for one in parts)}
    return [prompt for prompt in prompts.prompts if recipe_of(reward, prompt.record) in having]


def check_labels(reward: RewardConfig, sets: Mapping[str, PromptSet]) -> Iterator[str]:
    """Check the labels of all records of `sets` (key of the configuration -> prompts) against the recipes.
    Yields a note per set with labels that fall back to the recipe `default`, and one for recipes without a training record.
    ConfigError for labels without a recipe, with their counts and first records."""
    route = reward.route
    if route is None:
        return
    for key, prompts in sets.items():
        found: dict[str | None, list[Prompt]] = defaultdict(list)
        for prompt in prompts.prompts:
            found[_label(prompt.record, route.key)].append(prompt)
        other = {label: with_it for label, with_it in found.items() if label not in route.map}
        most = sorted(other.items(), key=lambda pair: -len(pair[1]))[:_LABELS]
        told = "; ".join(f"{label or 'no label'}: {len(some):,} ({places(some)})" for label, some in most)
        count = f"{sum(map(len, other.values())):,} of {len(prompts):,} records of {key}"
        if other and DEFAULT_RECIPE not in route.map:
            fix = f"recipes: {', '.join(route.map)}; add them, or {DEFAULT_RECIPE}, to reward.route.map"
            raise ConfigError(problem("reward.route.key", route.key, f"{count} have no recipe: {told}; {fix}"))
        if other:
            yield f"{count} take reward.route.map.{DEFAULT_RECIPE}: {told}"
        idle = [label for label in route.map if label not in found and label != DEFAULT_RECIPE]
        if idle and key == "data.train":
            yield f"{key}: no record has the label {' or '.join(idle)} (reward.route.map)"


def places(prompts: Sequence[Prompt]) -> str:
    """Name the first prompts for a message: `train.jsonl#2 (line 3), ...`."""
    return ", ".join(prompt.place for prompt in prompts[:_SHOWN]) + (", ..." if len(prompts) > _SHOWN else "")


def _label(record: Record, key: str) -> str | None:
    """Return a record's label as text; None if it is missing, null, or neither text nor an integer."""
    try:
        value = record_field(record, key, "reward.route.key", "")
    except ValueError:
        return None
    return str(value) if isinstance(value, (str, int)) else None
