"""Checks the reward of a configuration against the prompts that it scores; the result is cached with the prepared data. A sample
whose reference answer a rule cannot read has no score; if a rule can read none of a set, the rule or `data.answer_key` is wrong and
the run is refused."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import megappo.rewards
import megappo.trainer.prepare
from megappo.config.errors import ConfigError, problem
from megappo.config.reward_sections import RewardConfig
from megappo.data.cache import Cache, hash_of_modules
from megappo.data.prompts import Prompt, PromptSet
from megappo.rewards.base import PreparedPart, UnusableAnswer
from megappo.rewards.gsm8k import gold_number
from megappo.rewards.rules import READS_NUMBER
from megappo.rewards.symbolic import MathVerify
from megappo.trainer.prepare.code_rewards import code_notes
from megappo.trainer.prepare.reward_parts import check_requirements
from megappo.trainer.prepare.reward_routes import check_labels, places, scored_by


def answer_notes(reward: RewardConfig, sets: Mapping[str, PromptSet]) -> Iterator[str]:
    """Check every answer of `sets` (key of the configuration -> prompts) with every rule of `reward` that restricts answers.
    Yields a note per rule and set with unusable answers: count, first records, reason. ConfigError if a rule reads none of a set.
    """
    for name in reward.all_parts:
        scored = {key: found for key, prompts in sets.items() if (found := scored_by(reward, name, prompts))}
        if name in READS_NUMBER:
            yield from _notes_of_rule(name, gold_number, scored)
        elif name == "math_verify":
            rule = MathVerify()
            try:
                yield from _notes_of_rule(name, rule.check_answer, scored)
            finally:
                rule.close()


def _notes_of_rule(name: str, check: Callable[[str], object], sets: Mapping[str, Sequence[Prompt]]) -> Iterator[str]:
    reasons: dict[str, str | None] = {}  # by answer: many records share theirs

    def reason(answer: str) -> str | None:
        if answer not in reasons:
            try:
                check(answer)
                reasons[answer] = None
            except UnusableAnswer as error:
                reasons[answer] = str(error)
        return reasons[answer]

    for key, prompts in sets.items():
        found = [(prompt, text) for prompt in prompts if (text := reason(prompt.answer)) is not None]
        if not found:
            continue
        if len(found) == len(prompts):
            fix = f"{found[0][1]} ({found[0][0].place}), and so for all {len(found):,} records of {key}; "
            option = f"{key.removesuffix('.data')}.answer_key" if key.startswith("evaluations.") else "data.answer_key"
            raise ConfigError(problem("reward.parts", name, f"{fix}check {option}, or name another rule"))
        first = places([prompt for prompt, _ in found])
        of = f"{len(found):,} of {len(prompts):,} answers"
        yield f"{key}: {name} cannot read {of} and gives them no score: {first}; {found[0][1]}"


def reward_notes(reward: RewardConfig, parts: Mapping[str, PreparedPart], sets: Mapping[str, PromptSet], cache: Cache) -> list[str]:
    """Check labels, required fields, answers and tests of all records of `sets` (key of the configuration -> prompts); return the
    notes. ConfigError, one line, for a record that the reward cannot score."""
    if not sets:
        return []
    have_source = all(one.fingerprint for one in sets.values())  # else they have no name in the cache
    # The first process checks everything, the others and the next start read its notes. Without a cache only rank 0, whose notes
    # are printed, checks answers and tests: math_verify takes 4 ms for an answer that is no number.
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
