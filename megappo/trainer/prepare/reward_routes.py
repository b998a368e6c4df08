"""Recipe of each record: a label in the data chooses among the recipes of the configuration, and names nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from megappo.config.errors import ConfigError, problem
from megappo.config.reward_sections import DEFAULT_RECIPE, RewardConfig
from megappo.data.prompts import Prompt, PromptSet, Record, record_field

_SHOWN = 3  # records that a message names
_LABELS = 8  # labels that a message names


def recipe_of(reward: RewardConfig, record: Record) -> str:
    """Label of the recipe for this record: a key of `reward.recipes`. `check_labels` has seen that there is one."""
    if reward.route.key is None:
        return ""
    label = _label(record, reward.route.key)
    return label if label in reward.route.map else DEFAULT_RECIPE


def scored_by(reward: RewardConfig, part: str, prompts: PromptSet) -> list[Prompt]:
    """The prompts whose recipe has the part of this label."""
    having = {recipe for recipe, parts in reward.recipes.items() if any(one.label == part for one in parts)}
    return [prompt for prompt in prompts.prompts if recipe_of(reward, prompt.record) in having]


def check_labels(reward: RewardConfig, sets: Mapping[str, PromptSet]) -> Iterator[str]:
    """Hold the labels of all records of `sets` (key of the configuration -> prompts) against the recipes.

    ConfigError for labels without a recipe, with their counts and first records. One note per set with labels that take
    `reward.route.default`, and one for recipes that no training record has.
    """
    route = reward.route
    if route.key is None:
        return
    for key, prompts in sets.items():
        found: dict[str | None, list[Prompt]] = defaultdict(list)
        for prompt in prompts.prompts:
            found[_label(prompt.record, route.key)].append(prompt)
        other = {label: with_it for label, with_it in found.items() if label not in route.map}
        told = "; ".join(f"{label or 'no label'}: {len(some):,} ({places(some)})" for label, some in _most(other))
        count = f"{sum(map(len, other.values())):,} of {len(prompts):,} records of {key}"
        if other and not route.default:
            fix = f"recipes: {', '.join(route.map)}; add to reward.route.map, or set reward.route.default"
            raise ConfigError(problem("reward.route.key", route.key, f"{count} have no recipe: {told}; {fix}"))
        if other:
            yield f"{count} take reward.route.default: {told}"
        idle = [label for label in route.map if label not in found]
        if idle and key == "data.train":
            yield f"{key}: no record has the label {' or '.join(idle)} (reward.route.map)"


def places(prompts: Sequence[Prompt]) -> str:
    """The first prompts, for a message: `train.jsonl#2 (line 3), ...`."""
    return ", ".join(prompt.place for prompt in prompts[:_SHOWN]) + (", ..." if len(prompts) > _SHOWN else "")


def _label(record: Record, key: str) -> str | None:
    """Label of a record as text; None if it has none (null, and anything but text or an integer, is none)."""
    try:
        value = record_field(record, key, "reward.route.key", "")
    except ValueError:
        return None
    return str(value) if isinstance(value, (str, int)) else None


def _most(found: Mapping[str | None, list[Prompt]]) -> Iterator[tuple[str | None, list[Prompt]]]:
    """The labels with most records, the most frequent first."""
    yield from sorted(found.items(), key=lambda pair: -len(pair[1]))[:_LABELS]
