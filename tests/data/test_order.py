"""Visits in proportion to weights, and prompts passed over by their pass rate: counted against what is asked for."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.data.loader import PassRates, PromptLoader, shuffled, weighted

WEIGHTS = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 1e-300, 1e300]), min_size=1, max_size=40).filter(any)


def within_one_of_its_share(visits: list[int], weights: list[float]) -> bool:
    """Every prompt is visited floor or ceil of N w / sum(w) times; as fractions, without rounding."""
    from fractions import Fraction

    total, counts = sum(map(Fraction, weights)), Counter(visits)
    shares = [len(weights) * Fraction(w) / total for w in weights]
    slack = Fraction(1, 10**9)  # of fp64 in the cumulative sums
    return all(
        math.floor(s - slack) <= counts[i] <= math.ceil(s + slack) and (w or not counts[i])
        for i, (s, w) in enumerate(zip(shares, weights))
    )


@settings(max_examples=200, deadline=None)
@given(WEIGHTS, st.integers(0, 3), st.integers(0, 3))
def test_visits_of_an_epoch_are_in_proportion_to_the_weights(weights: list[float], seed: int, epoch: int) -> None:
    visits = weighted(numpy.array(weights), seed, epoch).tolist()
    assert len(visits) == len(weights) and within_one_of_its_share(visits, weights)
    assert visits == weighted(numpy.array(weights), seed, epoch).tolist()


def test_equal_weights_visit_every_prompt_once() -> None:
    for weight in (1.0, 0.1, 1e-310, 1e308):
        visits = weighted(numpy.full(1000, weight), 0, 0).tolist()
        assert sorted(visits) == list(range(1000)) and visits != list(range(1000))


def test_the_mean_over_epochs_is_the_share() -> None:
    """Also of a prompt whose share is below one visit: which of them are visited changes from epoch to epoch."""
    weights = numpy.array([0.25, 0.25, 0.25, 0.25, 3.0, 2.0])
    counts = Counter(row for epoch in range(3000) for row in weighted(weights, 7, epoch))
    for row, weight in enumerate(weights):
        assert counts[row] / 3000 == pytest.approx(weight, abs=0.04)
    assert len({tuple(sorted(weighted(weights, 7, epoch))) for epoch in range(50)}) == 4, "one of the four light ones"


def test_other_draws_would_be_noticed() -> None:
    """Negative control: draws with replacement, and a permutation that ignores the weights."""
    weights = [0.0, *[1.0] * 29, 10.0]
    independent = numpy.random.default_rng(0).choice(31, 31, p=numpy.array(weights) / sum(weights)).tolist()
    assert not within_one_of_its_share(independent, weights)
    assert not within_one_of_its_share(shuffled(31, 0, 0).tolist(), weights)


# -------------------------------------------------------------------------------------------------------------- pass rates


def loader_of(kind: str, seed: int = 3) -> PromptLoader:
    weights = numpy.arange(20.0) if "weights" in kind else None
    return PromptLoader(20, 4, True, seed, weights=weights, pass_rates=PassRates(20, 0.5, 0.1, seed) if "rates" in kind else None)


def walk(loader: PromptLoader, steps: int) -> list[list[int]]:
    """Steps in which prompts 0-4 always pass, 5-9 never, and the others every second time."""
    taken = []
    for _ in range(steps):
        taken.append(loader.next_step())
        if loader.pass_rates is not None:
            loader.pass_rates.observe(taken[-1], [[float(row < 5), float(row < 5 or row > 9)] for row in taken[-1]])
    return taken


def test_what_always_or_never_passes_comes_back_seldom() -> None:
    loader = loader_of("rates")
    visits = Counter(row for step in walk(loader, 400) for row in step)
    epochs = loader.epoch + loader.index / 20
    assert all(visits[row] == pytest.approx(epochs, abs=1) for row in range(10, 20)), "p = 1/2: visited at every turn"
    seldom = sum(visits[row] for row in range(10)) / 10 / epochs
    assert seldom == pytest.approx(0.1, abs=0.03)
    assert loader.pass_rates is not None and loader.pass_rates.skipped == 20 * loader.epoch + loader.index - 1600
    assert [round(loader.pass_rates.chance(row), 9) for row in (0, 5, 10)] == [0.1, 0.1, 1.0]


def test_chances_of_rates_between() -> None:
    rates = PassRates(3, 1.0, 0.05, 0)
    rates.observe([0, 1, 0], [[1.0, 0.0], [0.9, 0.99], [0.0, 0.0]])
    assert rates.chance(0) == pytest.approx(4 * 0.25 * 0.75) and rates.chance(1) == 0.05, "0.99 is below the score of a pass"
    assert rates.chance(2) == 1.0 and rates.num_seen == 2, "not seen yet"


@pytest.mark.parametrize("kind", ["weights", "rates", "weights and rates"])
def test_a_resumed_loader_goes_on_as_if_never_stopped(kind: str) -> None:
    for before in (1, 7, 30):
        whole, first, second = loader_of(kind), loader_of(kind), loader_of(kind)
        expected = walk(whole, before + 40)
        walk(first, before)
        state = json.loads(json.dumps(first.state_dict()))
        second.load_state_dict(state)
        assert walk(second, 40) == expected[before:]
        assert second.state_dict() == whole.state_dict()


def test_a_resume_without_the_pass_rates_is_noticed() -> None:
    """Negative control."""
    whole, second = loader_of("rates"), loader_of("rates")
    expected = walk(whole, 47)
    first = loader_of("rates")
    walk(first, 7)
    second.load_state_dict({key: value for key, value in first.state_dict().items() if key != "pass_rates"})
    assert walk(second, 40) != expected[7:]


def test_a_resume_with_other_weights_is_refused_in_one_line() -> None:
    state = loader_of("weights").state_dict()
    for other in (loader_of(""), PromptLoader(20, 4, True, 3, weights=numpy.ones(20))):
        with pytest.raises(ValueError, match="^cannot resume: data.weight_key changed, or the weights in its field; restore it or"):
            other.load_state_dict(state)
    loader_of("weights and rates").load_state_dict(state)  # the curriculum may begin later
