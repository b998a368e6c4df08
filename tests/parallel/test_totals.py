"""Sums and maxima over ranks: by one exchange or along a ring, the result is that of the ranks' numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megappo.parallel import totals


@given(st.lists(st.lists(st.integers(-(10**6), 10**6), min_size=3, max_size=3), min_size=1, max_size=19))
def test_rows_are_combined_by_halves(rows: list[list[int]]) -> None:
    """Odd numbers of rows too; integers in fp64 add without rounding."""
    of_ranks = torch.tensor(rows, dtype=torch.float64)
    summed = totals._pairwise(of_ranks, dist.ReduceOp.SUM)
    assert summed.tolist() == [math.fsum(column) for column in zip(*rows)]
    assert totals._pairwise(of_ranks, dist.ReduceOp.MAX).tolist() == [max(column) for column in zip(*rows)]


def test_a_nan_of_one_rank_is_in_the_sum_and_the_maximum() -> None:
    rows = torch.tensor([[1.0], [math.nan], [2.0]])
    assert all(totals._pairwise(rows, how).isnan().all() for how in (dist.ReduceOp.SUM, dist.ReduceOp.MAX))


def reduced(rank: int) -> list[Any]:
    """Results of one rank of several, for `tests.trainer.experience.test_experience`, whose world this shares."""
    mine = torch.tensor([1.5, -2.0, 10.0 * rank]) - rank
    named = {"a": mine.double(), "b": mine[:1].double()}
    rows = torch.full((2 * rank + 1, 2), rank, dtype=torch.int32)  # more than expected, as many, fewer
    found: list[Any] = []
    for most in (totals.MOST_BYTES_TO_ALL, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(totals, "MOST_BYTES_TO_ALL", most)
            summed, most_of = totals.totals_and_maxima(named, {"c": -mine.double()})
            found.append(
                [
                    totals.total(torch.tensor([[rank + 1, 7]])).tolist(),
                    totals.largest(torch.tensor(float(-rank))).item(),
                    totals.total(torch.empty(0)).tolist(),
                    {name: x.tolist() for name, x in {**summed, **most_of}.items()},
                    [totals.rows_of_ranks(rows, expected).tolist() for expected in (0, 1, 3, 9)],
                ]
            )
    return found
