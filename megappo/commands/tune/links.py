"""Time of collectives over the links between the ranks of a group.

Links follow from the rank order of `ParallelLayout` (tp fastest, then cp, dp, pp; experts etp, ep, edp) and the ranks per node.
Ring algorithms (Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in MPICH"; the "bus
bandwidth" of NCCL's tests) move (n - 1) / n of the data over n ranks, once for an all-gather or a reduce-scatter and twice for an
all-reduce. Small messages take log2 n steps (ibid.: recursive doubling, Bruck; NCCL's trees)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megappo.parallel.layout import ParallelLayout, Placement
from megappo.telemetry.hardware import Hardware

Axis = Literal["tp", "cp", "gradients", "pp", "etp", "ep", "expert gradients"]


@dataclass(frozen=True)
class Span:
    """Number of ranks of a group, and of those that share a node."""

    size: int
    in_node: int

    @property
    def crosses_nodes(self) -> bool:
        return self.in_node < self.size


def span(layout: ParallelLayout, axis: Axis, ranks_per_node: int) -> Span:
    """Span of rank 0's group. `gradients`: the ranks with the same dense weights (dp x cp); `expert gradients`: edp."""
    stride, size = {
        "tp": (1, layout.tp),
        "cp": (layout.tp, layout.cp),
        "gradients": (layout.tp, layout.cp * layout.dp),
        "pp": (layout.ranks_per_stage, layout.pp),
        "etp": (1, layout.etp),
        "ep": (layout.etp, layout.ep),
        "expert gradients": (layout.etp * layout.ep, layout.edp),
    }[axis]
    return Span(size, min(size, max(1, -(-ranks_per_node // stride))))


def ranks_together(placement: Placement, ranks_per_node: int) -> int:
    """Largest block size that keeps each block of a role's ranks, counted from its first, on one node."""
    if placement.is_whole:
        return ranks_per_node
    nodes = [rank // ranks_per_node for rank in placement.ranks]
    sizes = range(min(ranks_per_node, len(nodes)), 1, -1)
    return next((size for size in sizes if all(nodes[at] == nodes[at - at % size] for at in range(len(nodes)))), 1)


@dataclass(frozen=True)
class Links:
    """Rates and latencies of a rank's links; rates are bytes per second of one rank in one direction."""

    node_bytes_per_s: float
    network_bytes_per_s: float
    node_latency_s: float
    network_latency_s: float

    @classmethod
    def of(cls, hardware: Hardware) -> Links:
        share = hardware.link_share * 1e9
        return cls(
            hardware.node_link_gb_s * share,
            hardware.network_gb_s * share,
            hardware.node_latency_us * 1e-6,
            hardware.network_latency_us * 1e-6,
        )

    def _ring_bytes_per_s(self, group: Span) -> float:
        if not group.crosses_nodes:
            return self.node_bytes_per_s
        # One ring for each of the group's ranks on a node, so that together they use all their network adapters.
        through = group.in_node * self.network_bytes_per_s
        return min(self.node_bytes_per_s, through) if group.in_node > 1 else through

    def _latency_s(self, group: Span) -> float:
        step = self.network_latency_s if group.crosses_nodes else self.node_latency_s
        return step * math.ceil(math.log2(group.size))

    def gather_s(self, group: Span, size: float) -> float:
        """Seconds of an all-gather to `size` bytes, or of a reduce-scatter of as many."""
        if group.size == 1:
            return 0.0
        moved = size * (group.size - 1) / group.size
        return moved / self._ring_bytes_per_s(group) + self._latency_s(group)

    def all_reduce_s(self, group: Span, size: float) -> float:
        return 2 * self.gather_s(group, size)  # a reduce-scatter and an all-gather

    def all_to_all_s(self, group: Span, size: float) -> float:
        """Seconds until every rank has sent `size` bytes, an equal part to each rank."""
        if group.size == 1:
            return 0.0
        part = size / group.size
        inside = (group.in_node - 1) * part / self.node_bytes_per_s
        # To other nodes each rank sends through its own adapter.
        outside = (group.size - group.in_node) * part / self.network_bytes_per_s
        return max(inside, outside) + self._latency_s(group)

    def send_s(self, group: Span, size: float) -> float:
        """Seconds of a message to a neighbour in the group. The slowest pair decides."""
        if group.size == 1:
            return 0.0
        rate = self.network_bytes_per_s if group.crosses_nodes else self.node_bytes_per_s
        return size / rate + (self.network_latency_s if group.crosses_nodes else self.node_latency_s)
