"""Order in which the replicas of an engine take the requests of a batch: what each starts with, and what waits for whoever is free.

A pure function of numbers that all ranks have, so that they need not agree. What it decides changes who draws a response and when,
never its tokens: seeds belong to samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy


class Deal(NamedTuple):
    """Numbers of requests. own: of this replica, which it starts with. shared: of all, in the order in which they are taken."""

    own: Sequence[int]
    shared: Sequence[int]


def deal(count: int, replicas: int, index: int, size: int | None, predicted: Sequence[float] | None = None) -> Deal:
    """Deal requests 0..count-1 to replicas that each run `size` at once (None: any number); this one is number `index`.

    predicted: length of the response to every request, in any unit. It is used if requests have to wait: the longest begin first,
    as Graham's rule has it (SIAM J. Appl. Math. 17, 1969), because a long one that begins last is what all others wait for. Without
    it the batch's order stays, so that samples of one prompt are taken together and share their cached prefix.
    """
    if replicas == 1 or size is None or count <= replicas * size:
        # All begin at once, or in the only engine's own order: what the numbers of a run depend on does not depend on a history.
        return Deal(range(index * count // replicas, (index + 1) * count // replicas), range(0))
    first = replicas * size
    if predicted is None:
        return Deal(range(index * size, (index + 1) * size), range(first, count))
    order = numpy.argsort(-numpy.asarray(predicted, numpy.float64), kind="stable")
    # Back and forth: each row of requests is dealt in the other direction than the one before, so that sums are about equal.
    rows = order[:first].reshape(size, replicas)
    rows[1::2] = rows[1::2, ::-1]
    return Deal(rows[:, index].tolist(), order[first:].tolist())
