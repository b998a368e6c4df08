"""Final answers of responses as votes: the classes of equal answers that maj@N of an evaluation counts.
A vote is for what a rule takes for the final answer, and answers are equal if that rule would hold them equal. Rules without an
entry here judge a response without naming an answer, so nothing can be counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence

from megappo.rewards.gsm8k import last_number, marked_number
from megappo.rewards.rules import normalised
from megappo.rewards.symbolic import MathVerify

logger = logging.getLogger(__name__)

Answers = Sequence[Hashable | None]
"""One entry per response, equal for equal answers; None for a response without an answer."""

EXTRACTORS: Mapping[str, Callable[[str], Hashable | None]] = {
    "exact_match": normalised,
    "gsm8k_strict": marked_number,
    "gsm8k_flexible": last_number,
}
"""Rule -> final answer of a response."""
VOTING = (*EXTRACTORS, "math_verify")
"""Rules that name the final answer of a response."""


def voting_rule(labels: Sequence[str]) -> str | None:
    """First of these parts of a reward that can count votes; None if none can."""
    return next((label for label in labels if label in VOTING), None)


def answers_of(rule: str, groups: Sequence[Sequence[str]]) -> list[Answers | None]:
    """Answers of the responses to each prompt, by a rule of VOTING. groups: texts per prompt.
    None for a prompt on which math_verify does not decide in time or its worker dies: it has no majority, and that is logged."""
    if rule != "math_verify":
        extract = EXTRACTORS[rule]
        return [[extract(text) for text in texts] for texts in groups]
    judge = MathVerify()
    try:
        return [_classes(judge, texts) for texts in groups]
    finally:
        judge.close()


def _classes(judge: MathVerify, texts: Sequence[str]) -> Answers | None:
    try:
        classes = judge.classes(texts)
    except RuntimeError as died:
        logger.warning("%s; a prompt has no majority", died)
        return None
    if classes is None:
        logger.warning("math_verify: no decision on the answers of a prompt within %g s; it has no majority", judge.cpu_limit_s)
    return classes
