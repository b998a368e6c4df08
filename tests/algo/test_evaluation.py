"""pass@k, majority votes and standard errors against enumeration and hand counts."""

from __future__ import annotations

import statistics
from itertools import combinations, product

import pytest

from megappo.algo.summaries import majority, pass_at_k, standard_error


def enumerated(right: tuple[bool, ...], k: int) -> float:
    """Share of the subsets of k responses that hold a correct one."""
    subsets = list(combinations(right, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


def test_pass_at_k_is_the_share_of_all_subsets():
    cases = [(n, c, k) for n in range(1, 9) for c in range(n + 1) for k in range(1, n + 1)]
    for n, c, k in cases:
        assert pass_at_k(n, c, k) == pytest.approx(enumerated((True,) * c + (False,) * (n - c), k), abs=1e-15), (n, c, k)
    # Negative control: the biased estimate 1 - (1 - c/n)^k is far off.
    biased = [abs(1 - (1 - c / n) ** k - enumerated((True,) * c + (False,) * (n - c), k)) for n, c, k in cases]
    assert max(biased) > 0.2


def test_pass_at_k_by_the_closed_form_at_sizes_that_floats_cannot_multiply():
    # Chen et al. 2021, figure 3: 1 - prod_{i = n-c+1..n} (1 - k/i).
    for n, c, k in [(200, 3, 100), (1000, 1, 10), (2000, 20, 64), (10_000, 9_999, 1)]:
        stable = 1.0
        for i in range(n - c + 1, n + 1):
            stable *= 1 - k / i
        assert pass_at_k(n, c, k) == pytest.approx(1 - stable, rel=1e-10)
    assert (pass_at_k(8, 0, 8), pass_at_k(8, 1, 8), pass_at_k(8, 5, 4), pass_at_k(1, 1, 1)) == (0.0, 1.0, 1.0, 1.0)


# (answers, the correct one) -> by hand
VOTES = [
    (["4", "4", "5"], "4", 1.0),
    (["5", "4", "5"], "4", 0.0),
    (["4", "5"], "4", 0.5),  # a tie is worth the mean over the tied answers
    (["5", "4"], "4", 0.5),
    (["4", "5", "6"], "4", pytest.approx(1 / 3)),
    (["4", "4", "5", "5", "6"], "5", 0.5),
    (["4", "5", "5", "6", "6"], "4", 0.0),
    ([None, None, "4"], "4", 1.0),  # who has no answer does not vote
    ([None, "5", None, "4"], "4", 0.5),
    ([None, None, None], "4", 0.0),
    (["4"], "4", 1.0),
]


@pytest.mark.parametrize("answers, right, value", VOTES)
def test_the_majority_and_its_ties_by_hand(answers, right, value):
    assert majority([answer == right for answer in answers], answers) == value


def test_a_tie_does_not_depend_on_the_order_and_is_that_of_fair_draws():
    for answers in product("abc", repeat=4):
        votes = {one: answers.count(one) for one in set(answers)}
        tied = [one for one, count in votes.items() if count == max(votes.values())]
        expected = sum(one == "a" for one in tied) / len(tied)
        assert majority([one == "a" for one in answers], answers) == pytest.approx(expected)
    # Negative control: the first of the tied answers would be worth something else in one order of two.
    assert majority([True, False], ["a", "b"]) == majority([False, True], ["b", "a"]) == 0.5


def test_the_standard_error_of_a_mean():
    values = [0.0, 1.0, 1.0, 0.25, 0.5]
    assert standard_error(values) == pytest.approx(statistics.stdev(values) / len(values) ** 0.5)
    assert standard_error([0.7]) == 0.0 and standard_error([0.5, 0.5]) == 0.0
