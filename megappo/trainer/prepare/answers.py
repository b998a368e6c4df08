"""Finds reference answers that a reward rule cannot read. A sample with such an answer scores 0; if a rule can read none of a set,
the rule or `data.answer_key` is wrong and the run is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from megappo.config.errors import ConfigError, problem
from megappo.config.reward_sections import RewardConfig
from megappo.data.prompts import Prompt, PromptSet
from megappo.rewards.base import UnusableAnswer
from megappo.rewards.gsm8k import gold_number
from megappo.rewards.rules import READS_NUMBER
from megappo.rewards.symbolic import MathVerify
from megappo.trainer.prepare.reward_routes import places, scored_by


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
            raise ConfigError(problem("reward.parts", name, f"{fix}check data.answer_key, or name another rule"))
        first = places([prompt for prompt, _ in found])
        yield f"{key}: {name} cannot read {len(found):,} of {len(prompts):,} answers and scores them 0: {first}; {found[0][1]}"
