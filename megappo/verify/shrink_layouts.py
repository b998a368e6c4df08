"""Layouts that fit a small world and still shard a model along every axis of the user's, and the number of layers they need.

Pure arithmetic on the `parallel` sections of the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from typing import NamedTuple

from megappo.config.role_sections import ParallelConfig

_AXES = ("tp", "cp", "pp", "ep", "etp")
# Fewest layers with room for two kinds (sliding and full attention, dense and with experts).
_FEWEST_LAYERS = 2


class FittedLayouts(NamedTuple):
    """Layouts on `world_size` ranks. parallel: role -> sizes. notes: one line for every role whose sizes were reduced."""

    parallel: dict[str, ParallelConfig]
    world_size: int
    notes: tuple[str, ...]


def ranks_needed(parallel: ParallelConfig) -> int:
    """Smallest world of this layout: the model's ranks, and the experts' in every stage."""
    return lcm(parallel.tp * parallel.cp * parallel.pp, parallel.pp * parallel.etp * parallel.ep)


def fit_layouts(wanted: Mapping[str, ParallelConfig], max_ranks: int) -> FittedLayouts:
    """Halve the largest axis of the largest role until one world holds all roles; with dp 2 if that still fits."""
    parallel = dict(wanted)
    while (world_size := lcm(*map(ranks_needed, parallel.values()))) > max_ranks:
        largest = max(parallel, key=lambda role: ranks_needed(parallel[role]))
        parallel[largest] = _halved(parallel[largest])
    limit = f"{max_ranks} ranks (--max-ranks, GPUs)"
    notes = tuple(
        f"{role}: {_sizes(wanted[role])} needs more than {limit}, verified as {_sizes(parallel[role])}"
        for role in wanted
        if parallel[role] != wanted[role]
    )
    return FittedLayouts(parallel, world_size * 2 if world_size * 2 <= max_ranks else world_size, notes)


def _sizes(parallel: ParallelConfig) -> str:
    axes = [f"{axis}{getattr(parallel, axis)}" for axis in (*_AXES, "vpp") if getattr(parallel, axis) > 1]
    return " ".join([*axes, *(["sp"] if parallel.sequence_parallel else [])]) or "tp1"


def _halved(parallel: ParallelConfig) -> ParallelConfig:
    """Half of the largest axis, without vpp, split or sequence parallel if their axis is now 1."""
    axis = max(_AXES, key=lambda name: getattr(parallel, name))
    sizes = parallel.model_dump() | {axis: getattr(parallel, axis) // 2}
    if axis == "pp":
        sizes["layers_per_stage"] = _merged(parallel.layers_per_stage) if parallel.pp % 2 == 0 else ()
    if sizes["pp"] == 1:
        sizes |= {"vpp": 1, "layers_per_stage": ()}
    if sizes["tp"] == 1:
        sizes["sequence_parallel"] = False
    return ParallelConfig.model_validate(sizes)


def _merged(split: tuple[int, ...]) -> tuple[int, ...]:
    """Merge neighbouring stages. A split that would come out even stays uneven."""
    pairs = [first + second for first, second in zip(split[::2], split[1::2])]
    if len(set(split)) > 1 and len(pairs) > 1 and len(set(pairs)) == 1:
        pairs[0] += 1
    return tuple(pairs)


def split_layers(parallels: Sequence[ParallelConfig]) -> tuple[int, list[ParallelConfig]]:
    """(number of layers of the smallest model that fits all these layouts, the layouts with their split of it).

    An uneven split keeps the order of its stages by size: (10, 9, 9, 8) becomes (3, 2, 2, 1); layers that other layouts need beyond
    its sum go to its largest stage.
    """
    compact = [_compact(p.layers_per_stage) for p in parallels]
    even = lcm(*(p.pp * p.vpp for p, split in zip(parallels, compact) if not split))
    fewest = max([_FEWEST_LAYERS, *(sum(split) for split in compact)])
    layers = -(-fewest // even) * even
    splits = [_stretched(split, layers) for split in compact]
    return layers, [p.model_copy(update={"layers_per_stage": split}) for p, split in zip(parallels, splits)]


def _compact(split: tuple[int, ...]) -> tuple[int, ...]:
    """Replace each size by its rank among the sizes; () for an even split."""
    order = sorted(set(split))
    return tuple(order.index(size) + 1 for size in split) if len(order) > 1 else ()


def _stretched(split: tuple[int, ...], layers: int) -> tuple[int, ...]:
    if not split:
        return ()
    largest = split.index(max(split))
    return tuple(size + (layers - sum(split) if stage == largest else 0) for stage, size in enumerate(split))
