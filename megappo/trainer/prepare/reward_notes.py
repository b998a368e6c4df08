"""Checks the reward of a configuration against the prompts that it scores; the result is cached with the prepared data."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Mapping

import megappo.rewards
import megappo.trainer.prepare
from megappo.config.reward_sections import RewardConfig
from megappo.data.cache import Cache, hash_of_modules
from megappo.data.prompts import PromptSet
from megappo.rewards.base import PreparedPart
from megappo.trainer.prepare.answers import answer_notes
from megappo.trainer.prepare.code_rewards import code_notes
from megappo.trainer.prepare.reward_parts import check_requirements
from megappo.trainer.prepare.reward_routes import check_labels


def reward_notes(reward: RewardConfig, parts: Mapping[str, PreparedPart], sets: Mapping[str, PromptSet], cache: Cache) -> list[str]:
    """Check labels, required fields, answers and tests of all records of `sets` (key of the configuration -> prompts); return the
    notes. ConfigError, one line, for a record that the reward cannot score."""
    if not sets:
        return []
    have_source = all(one.fingerprint for one in sets.values())  # else they have no name in the cache
    # The first process checks everything, the others and the next start read its notes. Without a cache only rank 0, whose notes
    # are
    # printed, checks answers and tests: math_verify takes 4 ms for an answer that is no number.
    is_thorough = (have_source and cache.is_writable) or os.environ.get("RANK", "0") == "0"
    if not have_source:
        return list(_notes(reward, parts, sets, is_thorough=is_thorough))
    key = {
        "notes": {name: one.fingerprint for name, one in sets.items()},
        "reward": reward.model_dump(mode="json"),
        "parts": {label: [part.sha256, list(part.requires)] for label, part in parts.items()},
        "code": hash_of_modules(megappo.trainer.prepare, megappo.rewards),
        "math_verify": _version("math-verify"),
    }
    return cache.value(key, lambda: list(_notes(reward, parts, sets, is_thorough=is_thorough)))


def _notes(
    reward: RewardConfig, parts: Mapping[str, PreparedPart], sets: Mapping[str, PromptSet], *, is_thorough: bool
) -> Iterator[str]:
    yield from check_labels(reward, sets)
    check_requirements(reward, parts, sets)
    if is_thorough:
        yield from answer_notes(reward, sets)
        yield from code_notes(reward, sets)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
