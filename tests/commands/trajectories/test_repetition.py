"""Repetition of tokens, against definitions written out by counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.commands.trajectories.analyse import (
    LEAST_REPEATS,
    SHORTEST_LOOP,
    Loop,
    repeated_share,
    tail_loop,
)

few_ids = st.lists(st.integers(0, 2), max_size=40)


@pytest.mark.parametrize(
    "tokens, share",
    [([], 0), ([1, 2, 3], 0), ([1, 2, 3, 4], 0), ([1] * 8, 4 / 5), ([1, 2, 3, 4, 9, 1, 2, 3, 4], 1 / 6), (list(range(50)), 0)],
)
def test_repeated_share_counts_n_grams_that_came_before(tokens, share):
    assert repeated_share(tokens) == pytest.approx(share)


@pytest.mark.parametrize(
    "tokens, loop",
    [
        ([7, 8, 9] + [1, 2, 3] * 5, Loop(15, 3)),
        ([5] * 30, Loop(30, 1)),
        ([1, 2] * 4, Loop(8, 2)),
        ([9, 1, 2, 1, 2, 1, 2], None),  # six tokens
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6], None),  # twice
        ([1, 2, 3] * 4 + [4], None),  # it went on
        ([9] + [1, 2, 3, 4] * 3 + [1], Loop(13, 4)),  # the last repeat is cut
        ([0, 0, 0], None),
        ([], None),
    ],
)
def test_a_loop_is_a_block_that_ends_the_response_three_times(tokens, loop):
    assert tail_loop(tokens) == loop


def by_definition(tokens: list[int]) -> Loop | None:
    found = []
    for period in range(1, len(tokens)):
        covered = period
        while covered < len(tokens) and tokens[-covered - 1] == tokens[-covered - 1 + period]:
            covered += 1
        if covered >= LEAST_REPEATS * period and covered >= SHORTEST_LOOP:
            found.append(Loop(covered, period))
    return max(found, key=lambda loop: (loop.tokens, -loop.period), default=None)


@given(few_ids)
def test_the_loop_in_linear_time_is_that_of_the_definition(tokens):
    assert tail_loop(tokens) == by_definition(tokens)


@given(few_ids)
def test_a_loop_repeats_4_grams(tokens):
    """`analyse.py` looks for loops only where 4-grams repeat."""
    assert tail_loop(tokens) is None or repeated_share(tokens) > 0
