"""Repetition of tokens, counted by hand."""

from __future__ import annotations

import pytest

from megappo.commands.trajectories.analyse import repeated_share


@pytest.mark.parametrize(
    "tokens, share",
    [([], 0), ([1, 2, 3], 0), ([1, 2, 3, 4], 0), ([1] * 8, 4 / 5), ([1, 2, 3, 4, 9, 1, 2, 3, 4], 1 / 6), (list(range(50)), 0)],
)
def test_repeated_share_counts_n_grams_that_came_before(tokens, share):
    assert repeated_share(tokens) == pytest.approx(share)
