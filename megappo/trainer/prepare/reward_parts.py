"""Loads the parts of the reward and checks them against the data, before a model is built. A kind of part is a key of
`config.reward_sections.PART_KINDS` with a loader in LOADERS."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from megappo.config.errors import ConfigError, problem
from megappo.config.evaluations import STDERR, TURNS, UNDECIDED, UNUSABLE
from megappo.config.reward_sections import RewardConfig, RewardPart
from megappo.data.prompts import Prompt, PromptSet, record_field
from megappo.rewards.base import PreparedPart
from megappo.rewards.compose import LENGTH, MISSING_EOS
from megappo.rewards.rules import RULES, hash_of_code, make_part
from megappo.telemetry.metrics import Metric
from megappo.trainer.prepare.code_rewards import load_code
from megappo.trainer.prepare.remote_rewards import load_remote
from megappo.trainer.prepare.reward_routes import places, scored_by
from megappo.trainer.prepare.user_rewards import load_own

_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# A part is logged as reward/LABEL and eval/LABEL.
_TAKEN = {metric.value.split("/")[1] for metric in Metric if metric.value.startswith(("reward/", "eval/"))} | {MISSING_EOS, LENGTH}
_TAKEN |= {STDERR, UNDECIDED, UNUSABLE, *TURNS}  # of evaluations


def load_parts(reward: RewardConfig) -> dict[str, PreparedPart]:
    """Return label -> part, of all recipes, once each. ConfigError, one line, for a part that cannot be used."""
    return {label: _load(key, part) for label, (key, part) in reward.all_parts.items()}


def _load(key: str, part: RewardPart) -> PreparedPart:
    if part.kind != "name" and (not _LABEL.fullmatch(part.label) or part.label in RULES or part.label in _TAKEN):
        fix = "is no name for a metric of its own (letters, digits and . _ -, no built-in rule or metric); set name to another"
        raise ConfigError(problem(f"{key}.name", part.label, fix))
    try:
        return LOADERS[part.kind](part)
    except ValueError as error:
        raise ConfigError(problem(f"{key}.{part.kind}", getattr(part, part.kind), str(error))) from error


def _load_rule(part: RewardPart) -> PreparedPart:
    return PreparedPart(partial(make_part, part.label, part.workers), sha256=hash_of_code(part.label))


def _load_model(part: RewardPart) -> PreparedPart:
    return PreparedPart(make=None)  # a role: its section names the checkpoint (`trainer/prepare/reward_model.py`)


LOADERS: Mapping[str, Callable[[RewardPart], PreparedPart]] = {
    "name": _load_rule,
    "path": load_own,
    "entry_point": load_own,
    "code": load_code,
    "url": load_remote,
    "model": _load_model,
}
"""Kind of part -> loader, which raises ValueError, one line without the key, for a part that cannot be used."""


def check_requirements(reward: RewardConfig, parts: Mapping[str, PreparedPart], sets: Mapping[str, PromptSet]) -> None:
    """ConfigError if a record of `sets` (key of the configuration -> prompts) lacks a field that a part of its recipe requires."""
    for name, part in parts.items():
        for field in part.requires:
            for key, prompts in sets.items():
                scored = scored_by(reward, name, prompts)
                lacking = [prompt for prompt in scored if not _has(prompt, field)]
                if lacking:
                    count = f"{len(lacking):,} of {len(scored):,} records of {key}"
                    raise ConfigError(problem("reward.parts", name, f"requires {field}, which {count} lack: {places(lacking)}"))


def _has(prompt: Prompt, field: str) -> bool:
    """Return True if the record has this field (`a.b` is nested) and it is not null; the field `answer` must hold text."""
    if field == "answer":
        return bool(prompt.answer.strip())
    try:
        return record_field(prompt.record, field, "requires", prompt.id) is not None
    except ValueError:
        return False
