"""Rules about the keys of `reward`: recipes, parts, and the keys of each kind of part (see `checks.py`). Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from megappo.config.errors import problem
from megappo.config.evaluations import config_of_set, evaluation_sets
from megappo.config.paths import odd_character
from megappo.config.reward_sections import PART_KINDS, RewardConfig, RewardPart
from megappo.config.schema import TrainConfig
from megappo.config.section import Section
from megappo.config.urls import host_of, is_loopback

LONGEST_LABEL = 64  # it is part of a metric's name
OWN_CODE = ("path", "entry_point")
BUILT_IN_KEYS = {"math_verify": ("workers",)}  # built-in rule -> keys of other kinds that it has too


def reward_problem(reward: RewardConfig, *, may_be_none: bool = False) -> str | None:
    """First problem of the keys of a reward, one line; None without one. may_be_none: every score may be 0."""
    for label in reward.route.map if reward.route is not None else ():
        if not label.strip() or len(label) > LONGEST_LABEL or odd_character(label) is not None:
            return problem("reward.route.map", label, f"a label is a printable line of 1 to {LONGEST_LABEL} characters")
    for recipe, parts in reward.recipes.items():
        if (message := _recipe_problem(reward.key_of(recipe), parts, may_be_none)) is not None:
            return message
    return _same_settings(reward) or _host_problem(reward)


def _same_settings(reward: RewardConfig) -> str | None:
    for recipe, parts in reward.recipes.items():
        for index, part in enumerate(parts):
            key, first = reward.all_parts[part.label]
            if part.model_copy(update={"weight": first.weight}) != first:
                here = f"{reward.key_of(recipe)}.{index}"
                fix = f"has other settings than {key}, and both are logged under this name; give one another name"
                return problem(here, part.label, fix)
    return None


def _host_problem(reward: RewardConfig) -> str | None:
    for key, part in reward.all_parts.values():
        # Addresses of this machine are always allowed.
        if part.url is None or reward.allow_hosts is None or is_loopback(host := host_of(part.url)):
            continue
        if host not in (allowed.lower() for allowed in reward.allow_hosts):
            fix = f"{host} is not in reward.allow_hosts ({', '.join(reward.allow_hosts) or 'empty'}); add it, or ask another server"
            return problem(f"{key}.url", part.url, fix)
    return None


def _recipe_problem(key: str, parts: Sequence[RewardPart], may_be_none: bool) -> str | None:
    if not parts and not may_be_none:
        return problem(key, [], "a run needs a reward; name at least one, for example [{name: exact_match}]")
    for index, part in enumerate(parts):
        if (message := _part_problem(f"{key}.{index}", part)) is not None:
            return message
    names = [part.label for part in parts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return problem(key, names, f"{twice[0]} is there twice; keep one and set its weight, or give one another name")
    if all(part.weight == 0 for part in parts) and not may_be_none:
        return problem(key, names, "every weight is 0, so every score is 0; give one a weight")
    return None


def _part_problem(key: str, part: RewardPart) -> str | None:
    """Refuse a part that is of no kind or of two, or that has keys of another kind."""
    kinds = [kind for kind in PART_KINDS if getattr(part, kind) is not None]
    if not kinds and part.name is None:
        others = f"{', '.join(list(PART_KINDS)[:-1])} or {list(PART_KINDS)[-1]}"
        return f"{key}.name is missing: name a rule, or a reward of your own by {others}"
    if len(kinds) > 1:
        return problem(f"{key}.{kinds[1]}", getattr(part, kinds[1]), f"{kinds[0]} is set too; keep one of the two")
    allowed = PART_KINDS[kinds[0]] if kinds else BUILT_IN_KEYS.get(str(part.name), ())
    for name in dict.fromkeys(name for keys in PART_KINDS.values() for name in keys):
        value = getattr(part, name)
        if name not in allowed and value != type(part).model_fields[name].default:
            value = value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
            owners = " or ".join(kind for kind, keys in PART_KINDS.items() if name in keys)
            what = f"a part with {kinds[0]}" if kinds else f"{part.name} is a built-in rule, which"
            return problem(f"{key}.{name}", value, f"{what} has none; remove it, or set {owners}")
    if part.path is not None and part.function is None:
        return problem(f"{key}.path", part.path, "name its function in the key function")
    if part.kind in OWN_CODE and part.batch and part.workers:
        return problem(f"{key}.workers", part.workers, "batch is true, and a batch is one call; keep one of the two")
    if part.kind in OWN_CODE and part.timeout_s is not None and not part.workers:
        return problem(f"{key}.timeout_s", part.timeout_s, "only a process can be ended; set workers, for example 4")
    return None


def training_reward_problem(config: TrainConfig) -> str | None:
    """Refuse a reward that is 0, unless the policy learns from a teacher: then its parts, if any, only measure."""
    return reward_problem(config.reward, may_be_none=config.algorithm.distillation is not None)


def reward_model_problem(config: TrainConfig) -> str | None:
    """Refuse a part whose reward model is not set. A reward model without a part is a dead key (`dead_keys.py`)."""
    for key, part in config.reward.all_parts.values():
        if part.model is not None and config.reward_model.model is None:
            return problem(f"{key}.model", part.model, f"{part.model}.model is not set; name its directory there")
    return None


def length_penalty_problem(config: TrainConfig) -> str | None:
    """Refuse a length penalty that starts beyond the longest response."""
    penalty, longest = config.reward.length_penalty, config.rollout.max_response_tokens
    if penalty is not None and penalty.start >= longest:
        fix = f"no response is longer than rollout.max_response_tokens {longest}; lower it"
        return problem("reward.length_penalty.start", penalty.start, fix)
    return None


def evaluation_reward_problem(config: TrainConfig) -> str | None:
    """Check the rewards of `evaluations` by the rules of the training's."""
    for name, one in config.evaluations.items():
        if one.reward is not None:
            view = config_of_set(config, evaluation_sets(config)[name])
            if (message := reward_problem(view.reward) or length_penalty_problem(view)) is not None:
                return f"evaluations.{name}.{message}"
    return None
