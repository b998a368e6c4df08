"""Rewards of the user's own code: loaded and held against the data before a model is built."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megappo.config.errors import ConfigError, problem
from megappo.config.schema import RewardConfig, RewardPart
from megappo.data.prompts import Prompt, PromptSet, record_field
from megappo.rewards.compose import LENGTH, MISSING_EOS
from megappo.rewards.own import OwnRule, load_from_entry_point, load_from_file
from megappo.rewards.rules import RULES
from megappo.telemetry.metrics import Metric

_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# A rule is logged as reward/LABEL and eval/LABEL.
_TAKEN = {metric.value.split("/")[1] for metric in Metric if metric.value.startswith(("reward/", "eval/"))} | {MISSING_EOS, LENGTH}
_SHOWN = 3  # records that a message names


def load_own_rules(reward: RewardConfig) -> dict[str, OwnRule]:
    """Name -> loaded code, of all parts with a path or an entry point. ConfigError, one line, for code that cannot be used."""
    return {part.label: _load(f"reward.parts.{index}", part) for index, part in enumerate(reward.parts) if part.own}


def _load(key: str, part: RewardPart) -> OwnRule:
    if not _LABEL.fullmatch(part.label) or part.label in RULES or part.label in _TAKEN:
        fix = "is no name for a metric of its own (letters, digits and . _ -, no built-in rule or metric); set name to another"
        raise ConfigError(problem(f"{key}.name", part.label, fix))
    how = {"batch": part.batch, "args": part.args}
    try:
        if part.path is not None:
            return load_from_file(part.label, part.path, str(part.function), **how)
        return load_from_entry_point(part.label, str(part.entry_point), **how)
    except ValueError as error:
        name = "path" if part.path is not None else "entry_point"
        raise ConfigError(problem(f"{key}.{name}", getattr(part, name), str(error))) from error


def check_requirements(rules: Mapping[str, OwnRule], sets: Mapping[str, PromptSet]) -> None:
    """ConfigError if a record of `sets` (key of the configuration -> prompts) lacks a field that a rule requires."""
    for name, rule in rules.items():
        for field in rule.requires:
            for key, prompts in sets.items():
                lacking = [prompt for prompt in prompts.prompts if not _has(prompt, field)]
                if lacking:
                    first = ", ".join(prompt.place for prompt in lacking[:_SHOWN]) + (", ..." if len(lacking) > _SHOWN else "")
                    missing = f"requires {field}, which {len(lacking):,} of {len(prompts):,} records of {key} lack: {first}"
                    raise ConfigError(problem("reward.parts", name, missing))


def _has(prompt: Prompt, field: str) -> bool:
    """If the record has this field (`a.b` reaches inside), not null; `answer` is the reference answer, which must hold text."""
    if field == "answer":
        return bool(prompt.answer.strip())
    try:
        return record_field(prompt.record, field, "requires", prompt.id) is not None
    except ValueError:
        return False
