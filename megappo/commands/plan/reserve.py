"""Device memory outside torch's allocator: the CUDA context and the buffers of NCCL's communicators, from published figures.

NCCL on 8 x H100 in one node (github.com/NVIDIA/nccl/issues/1685): 32 channels with 10 MiB for each connection of a ring (4 MiB of
NCCL_BUFFSIZE, and the protocols LL and LL128). The first all-to-all took 3.28 GB more: 14 MiB for each of 7 peers and 32 channels.
Fewer channels (NCCL_MAX_NCHANNELS) need less. A communicator takes memory from its first use on."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import prod

from megappo.parallel.layout import ParallelLayout
from megappo.telemetry.tables import MIB

CONTEXT = 512 * MIB  # of a process on an H100 or A100, with the kernels of torch and of its libraries
CHANNELS = 32
RING = CHANNELS * 10 * MIB  # of a communicator for all-reduce, all-gather, reduce-scatter: a ring receives from one peer
PEER = CHANNELS * 14 * MIB  # of every peer that messages are exchanged with
MOST_PEERS = 7  # in a node of 8; to other nodes the buffers of messages are shared (nccl/issues/1450)

# Groups of `parallel/groups.py` that collectives run over, of dense and of expert layers
_DENSE = (("tp",), ("cp",), ("pp",), ("cp", "dp"), ("tp", "cp", "dp", "pp"))
_GRID, _EXPERT_GRID = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")  # the fastest axis of a rank first
_EXPERTS = (("etp",), ("ep",), ("edp",), ("tp", "cp"))


def reserve_bytes(layouts: Iterable[tuple[ParallelLayout, bool]], world_size: int, rollout_tp: int) -> int:
    """Reserve of one rank. layouts: (layout, True if it has experts) of every role. rollout_tp: ranks of a vLLM replica, or 1."""
    total = CONTEXT
    # Roles with the same layout share their groups.
    by_layout: dict[ParallelLayout, bool] = {}
    for layout, has_experts in layouts:
        by_layout[layout] = has_experts or by_layout.get(layout, False)
    total += sum(layout_bytes(layout, has_experts) for layout, has_experts in by_layout.items())
    total += RING if world_size > 1 else 0  # all ranks: barriers, and the weights on their way to vLLM
    return total + (2 * RING if rollout_tp > 1 else 0)  # vLLM's group of all ranks of a replica, and its tp group


@cache
def layout_bytes(layout: ParallelLayout, has_experts: bool) -> int:
    """Bytes of the communicators that one layout brings along. Cached: the tuner asks about the same layouts again and again."""
    return sum(_communicator(axes, size) for axes, size in _groups(layout, has_experts))


def _groups(layout: ParallelLayout, has_experts: bool) -> list[tuple[set[tuple[str, ...]], int]]:
    """(axes, ranks) of the groups of more than one rank. Axes with the same ranks share one group."""
    found: dict[tuple[tuple[int, int], ...], set[tuple[str, ...]]] = {}
    for axes in _DENSE + (_EXPERTS if has_experts else ()):
        if strides := _strides(layout, axes):
            found.setdefault(strides, set()).add(axes)
    return [(every, prod(size for _, size in strides)) for strides, every in found.items()]


def _strides(layout: ParallelLayout, axes: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """(stride, size) of the axes in the rank, neighbouring axes merged: equal for axes that span the same ranks."""
    # Listing the groups (`ParallelLayout.axis_groups`) takes too long for the worlds of thousands of ranks that the tuner tries.
    grid = _EXPERT_GRID if set(axes) & {"etp", "ep", "edp"} else _GRID
    found: list[tuple[int, int]] = []
    stride = 1
    for axis in grid:
        size = getattr(layout, axis)
        if axis in axes and size > 1:
            first, ranks = found.pop() if found and found[-1][0] * found[-1][1] == stride else (stride, 1)
            found.append((first, ranks * size))
        stride *= size
    return tuple(found)


def _communicator(axes: set[tuple[str, ...]], size: int) -> int:
    # Pipeline stages only send messages to two neighbours; cp and ep run all-to-all.
    total = RING if axes != {("pp",)} else 0
    if {("cp",), ("ep",)} & axes:
        return total + PEER * min(size - 1, MOST_PEERS)
    return total + (PEER * min(size - 1, 2) if ("pp",) in axes else 0)
