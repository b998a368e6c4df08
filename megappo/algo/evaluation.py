"""Estimators over the n responses to each prompt of an evaluation: pass@k, maj@n, and the standard error of a mean."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k responses is correct: 1 - C(n - correct, k) / C(n, k).
    This is the share of the subsets of k responses that hold a correct one (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    assert 1 <= k <= n and 0 <= correct <= n, f"pass@{k} of {correct} correct in {n}"
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(correct: Sequence[bool], answers: Sequence[Hashable | None]) -> float:
    """Correctness of the answer that most of the n responses give; 0 if no response has an answer.
    answers: one per response, equal for equal answers; None does not vote. A tie counts as the mean over the tied answers, which
    is what a fair draw among them is worth."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    # Responses with one answer are equally correct, unless the score counts more than the answer.
    winners = [right for right, answer in zip(correct, answers, strict=True) if answer is not None and votes[answer] == most]
    return sum(winners) / len(winners)


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of independent values; 0 for one value."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
