"""Checks of code rewards before a model is built: their tests in the data, and the isolation that they need."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from megappo.config.errors import ConfigError, problem
from megappo.config.reward_sections import RewardConfig, RewardPart
from megappo.data.prompts import PromptSet
from megappo.rewards import code, sandbox
from megappo.rewards.base import PreparedPart, UnusableAnswer
from megappo.rewards.code.part import CodePart, CodeReward, read_problem
from megappo.rewards.sandbox.box import Limits, reason_against
from megappo.trainer.prepare.reward_routes import places, scored_by


def load_code(part: RewardPart) -> PreparedPart:
    settings = settings_of(part)
    fields = (settings.tests_key, settings.entry_point_key, settings.setup_key)
    return PreparedPart(partial(CodePart, settings), tuple(field for field in fields if field is not None), _hash_of_judges())


def settings_of(part: RewardPart) -> CodeReward:
    assert part.code is not None
    keys = part.code.model_dump()
    isolated = not keys.pop("i_accept_no_isolation")
    limits = Limits(**{name: keys.pop(name) for name in ("memory_mib", "max_processes", "packages")}, isolated=isolated)
    return CodeReward(**keys, limits=limits)


def require_isolation(reward: RewardConfig) -> None:
    """ConfigError, one line, if this machine cannot isolate the programs of a code reward as configured. Runs a program (0.1 s)."""
    for key, part in reward.all_parts.values():
        if part.code is None:
            continue
        limits = settings_of(part).limits
        if (reason := reason_against(limits)) is None:
            continue
        if not limits.isolated:
            raise ConfigError(problem(f"{key}.code", part.label, f"no program can be run: {reason}"))
        fix = f"{reason}; docs/code_rewards.md has what a machine needs; or set this to true"
        raise ConfigError(problem(f"{key}.code.i_accept_no_isolation", False, f"no program can be isolated here: {fix}"))


def code_notes(reward: RewardConfig, sets: Mapping[str, PromptSet]) -> Iterator[str]:
    """Read the tests of every record of `sets` (key of the configuration -> prompts) that a code reward scores. Yields a note per
    part and set with unreadable tests, and per part without isolation. ConfigError if a part can read none of a set."""
    for label, (key, part) in reward.all_parts.items():
        if part.code is None:
            continue
        settings = settings_of(part)
        if not settings.limits.isolated:
            yield f"{label}: programs of the policy run without isolation, with your rights ({key}.code.i_accept_no_isolation)"
        for name, prompts in sets.items():
            scored, found, reason = scored_by(reward, label, prompts), [], ""
            for prompt in scored:
                try:
                    read_problem(settings, prompt.record)
                except UnusableAnswer as error:
                    reason = reason or str(error)
                    found.append(prompt)
            if found and len(found) == len(scored):
                fix = f"{reason} ({found[0].place}), and so for all {len(found):,} records of {name}"
                raise ConfigError(problem(f"{key}.code.tests_key", settings.tests_key, fix))
            if found:
                count = f"the tests of {len(found):,} of {len(scored):,} records"
                yield f"{name}: {label} cannot read {count} and gives them no score: {places(found)}; {reason}"


def _hash_of_judges() -> str:
    folders = [Path(package.__file__ or "").parent for package in (code, sandbox)]
    files = sorted(file for folder in folders for file in folder.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
