"""Reference answers that a rule cannot read: named with their lines before the run, refused if a rule can read none."""

from __future__ import annotations

import pytest

from megappo.config.errors import ConfigError
from megappo.config.reward_sections import RewardConfig, RewardPart
from megappo.data.prompts import Prompt, PromptSet
from megappo.trainer.prepare.reward_notes import answer_notes


def prompts(*answers: str, name: str = "math.jsonl") -> PromptSet:
    """One prompt per answer, on the even lines of a file."""
    made = tuple(Prompt(f"{name}#{row}", (1,), "?", answer, {}, 2 * row + 2) for row, answer in enumerate(answers))
    return PromptSet(made, len(made), 0, 8)


def notes(*answers: str, rule: str = "math_verify", evaluated: tuple[str, ...] = ()) -> list[str]:
    sets = {"data.train": prompts(*answers)}
    if evaluated:
        sets["data.eval"] = prompts(*evaluated, name="eval.jsonl")
    return list(answer_notes(RewardConfig(parts=(RewardPart(name="has_eos"), RewardPart(name=rule))), sets))


def test_answers_without_mathematics_are_counted_with_their_lines() -> None:
    answers = (r"\$18.90", r"\$32,\!348", "", "7", "", "$$", r"\text{ }")
    assert notes(*answers, evaluated=("5", r"\frac{1}{2}", "")) == [
        "data.train: math_verify cannot read 4 of 7 answers and gives them no score: math.jsonl#2 (line 6), "
        "math.jsonl#4 (line 10), "
        "math.jsonl#5 (line 12), ...; the reference answer '' is no mathematical expression",
        "data.eval: math_verify cannot read 1 of 3 answers and gives them no score: eval.jsonl#2 (line 6); "
        "the reference answer '' is no "
        "mathematical expression",
    ]


def test_answers_without_a_number_are_counted_for_the_rules_that_need_one() -> None:
    for rule in ("gsm8k_strict", "gsm8k_flexible"):
        [note] = notes("#### 7", "#### seven", rule=rule)
        assert note.startswith(f"data.train: {rule} cannot read 1 of 2 answers") and "math.jsonl#1 (line 4)" in note
    assert notes("7", "seven", rule="exact_match") == notes("7", "seven", rule="gsm8k_format") == []


def test_a_rule_that_can_read_no_answer_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        notes("seven", "eight", rule="gsm8k_strict", evaluated=("7",))
    assert str(caught.value) == (
        "reward.parts = \"gsm8k_strict\": the reference answer 'seven' is not a number and does not end with `#### number` "
        "(math.jsonl#0 (line 2)), and so for all 2 records of data.train; check data.answer_key, or name another rule"
    )
    with pytest.raises(ConfigError, match="for all 1 records of data.eval"):
        notes("7", evaluated=("",))
