"""Timeline of a pipeline: forward and backward passes of every micro-batch on every stage, and the bubble.

The orders are Megatron-core's: 1F1B (Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters",
section 2.2), interleaved for vpp > 1. The unit of time is a forward pass of a whole stage; communication takes none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megappo.parallel.layout import ParallelLayout

Kind = Literal["forward", "backward"]
# A backward computes the gradients of inputs and of weights: twice the products of a forward. Recomputation adds a forward.
BACKWARD = 2.0


@dataclass(frozen=True)
class Pass:
    """One chunk of one stage over one micro-batch, from `start` to `end`."""

    kind: Kind
    stage: int
    chunk: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All passes of a schedule."""

    passes: tuple[Pass, ...]
    total: float
    """End of the last pass."""
    num_stages: int

    @property
    def bubble(self) -> float:
        """Share of the stages' time spent waiting."""
        busy = sum(one.end - one.start for one in self.passes)
        return 1.0 - busy / (self.total * self.num_stages)


def chunk_work(layout: ParallelLayout, num_layers: int) -> list[list[float]]:
    """[stage][chunk] time of a forward: layers of the chunk over the mean layers of a stage."""
    mean = num_layers / layout.pp
    return [
        [len(layout.chunk_layers(num_layers, stage, chunk)) / mean for chunk in range(layout.vpp)] for stage in range(layout.pp)
    ]


def timeline(
    layout: ParallelLayout,
    num_micro_batches: int,
    *,
    backward: float = BACKWARD,
    work: Sequence[Sequence[float]] | None = None,
) -> Timeline:
    """Compute the timeline of a training pass. With vpp > 1 the number of micro-batches is raised to a multiple of pp. backward:
    its time in forwards. work: [stage][chunk] time of a forward (see `chunk_work`); None for equal times."""
    pp, vpp = layout.pp, layout.vpp
    count = padded_micro_batches(layout, num_micro_batches)
    orders = [order_of_passes(pp, vpp, stage, count) for stage in range(pp)]
    times = work if work is not None else [[1.0 / vpp] * vpp] * pp
    factor = {"forward": 1.0, "backward": backward}
    ends: dict[tuple[Kind, int, int, int], float] = {}
    free, places, passes = [0.0] * pp, [0] * pp, []
    # Run each stage until it needs a result that another stage has not made yet, round after round.
    while any(place < len(order) for place, order in zip(places, orders)):
        before = len(passes)
        for stage in range(pp):
            while places[stage] < len(orders[stage]):
                kind, chunk, micro = orders[stage][places[stage]]
                needed = _needs(kind, stage, chunk, micro, pp, vpp)
                if needed is not None and needed not in ends:
                    break
                start = max(free[stage], ends[needed] if needed is not None else 0.0)
                free[stage] = ends[kind, stage, chunk, micro] = start + factor[kind] * times[stage][chunk]
                passes.append(Pass(kind, stage, chunk, micro, start, free[stage]))
                places[stage] += 1
        assert len(passes) > before, "the orders of the stages wait for each other"
    return Timeline(tuple(passes), max(free), pp)


def padded_micro_batches(layout: ParallelLayout, num_micro_batches: int) -> int:
    # The interleaved schedule passes them through the stages in groups of pp.
    return -(-num_micro_batches // layout.pp) * layout.pp if layout.vpp > 1 else num_micro_batches


def order_of_passes(pp: int, vpp: int, stage: int, count: int) -> list[tuple[Kind, int, int]]:
    """(kind, chunk, micro-batch) in the order of execution on a stage. count: micro-batches; with vpp > 1 a multiple of pp."""
    # Megatron-core's `get_pp_rank_microbatches`.
    if vpp == 1:
        warm_up = min(pp - stage - 1, count)
        forwards = backwards = [(0, micro) for micro in range(count)]
    else:
        warm_up = min(2 * (pp - stage - 1) + (vpp - 1) * pp, count * vpp)
        rounds = [(first, chunk) for first in range(0, count, pp) for chunk in range(vpp)]
        forwards = [(chunk, first + place) for first, chunk in rounds for place in range(pp)]
        backwards = [(vpp - 1 - chunk, micro) for chunk, micro in forwards]
    order: list[tuple[Kind, int, int]] = [("forward", *one) for one in forwards[:warm_up]]
    for ahead, behind in zip(forwards[warm_up:], backwards):
        order.append(("forward", *ahead))
        order.append(("backward", *behind))
    return order + [("backward", *one) for one in backwards[len(forwards) - warm_up :]]


def _needs(kind: Kind, stage: int, chunk: int, micro: int, pp: int, vpp: int) -> tuple[Kind, int, int, int] | None:
    """Pass whose result this one needs; None if it starts from the data."""
    if kind == "forward":
        if stage > 0:
            return "forward", stage - 1, chunk, micro
        return ("forward", pp - 1, chunk - 1, micro) if chunk > 0 else None
    if stage < pp - 1:
        return "backward", stage + 1, chunk, micro
    return ("backward", 0, chunk + 1, micro) if chunk < vpp - 1 else ("forward", stage, chunk, micro)
