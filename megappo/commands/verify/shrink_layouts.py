"""Layouts that fit a small world and still shard a model along every axis of the user's, on ranks of their own where the user's
are, and the number of layers they need. Pure arithmetic on the `parallel` sections of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd, lcm
from typing import NamedTuple

from megappo.config.rank_ranges import ranges_text
from megappo.config.role_sections import ParallelConfig

_AXES = ("tp", "cp", "pp", "ep", "etp")
# Fewest layers with room for two kinds (sliding and full attention, dense and with experts).
_FEWEST_LAYERS = 2


class FittedLayouts(NamedTuple):
    """Layouts on `world_size` ranks."""

    parallel: dict[str, ParallelConfig]
    world_size: int
    notes: tuple[str, ...]
    """One line for every role whose sizes were reduced."""
    ranks: Mapping[str, str] = {}
    """Role -> its ranks, if it does not live on all."""


def ranks_needed(parallel: ParallelConfig) -> int:
    """Smallest world of this layout: holds the model's ranks, and the experts' in every stage."""
    return lcm(parallel.tp * parallel.cp * parallel.pp, parallel.pp * parallel.etp * parallel.ep)


def fit_layouts(wanted: Mapping[str, ParallelConfig], max_ranks: int) -> FittedLayouts:
    """Halve the largest axis of the largest role until one world holds all roles; with dp 2 if that still fits."""

    def smallest_world(parallel: Mapping[str, ParallelConfig]) -> int:
        return lcm(*map(ranks_needed, parallel.values()))

    parallel = _halved_to(wanted, lambda parallel: smallest_world(parallel) <= max_ranks)
    assert parallel is not None, "a world of one rank holds any role without an axis"
    world_size = smallest_world(parallel)
    world_size *= 2 if world_size * 2 <= max_ranks else 1
    return FittedLayouts(parallel, world_size, _notes(wanted, parallel, f"{max_ranks} ranks"))


def fit_placed(
    wanted: Mapping[str, ParallelConfig],
    ranks: Mapping[str, Sequence[range]],
    replicas: Mapping[str, int],
    world_size: int,
    max_ranks: int,
) -> FittedLayouts | None:
    """Fit layouts as `fit_layouts` does, with each role on its own ranks. All numbers of ranks are divided by the same number, so
    that roles meet as in the world of `world_size`. replicas: fewest of each role. None if no such world has at most `max_ranks`,
    or if it loses an axis for which a world that all roles share has room."""
    common = gcd(world_size, *(edge for held in ranks.values() for one in held for edge in (one.start, one.stop)))
    factor = next((size for size in range(1, common + 1) if common % size == 0 and world_size <= size * max_ranks), None)
    if factor is None:
        return None
    world_size //= factor
    held = {role: [rank for one in ranks[role] for rank in range(one.start // factor, one.stop // factor)] for role in wanted}

    def fits(parallel: Mapping[str, ParallelConfig]) -> bool:
        of_replica = {role: replicas[role] * ranks_needed(sizes) for role, sizes in parallel.items()}
        return all(len(held[role]) % size == 0 for role, size in of_replica.items())

    alone = {role: _halved_to({role: sizes}, fits) for role, sizes in wanted.items()}
    whole = fit_layouts(wanted, max_ranks).parallel
    parallel = {role: found[role] for role, found in alone.items() if found is not None}
    if any(role not in parallel or _axes(parallel[role]) != _axes(whole[role]) for role in wanted):
        return None
    own = {role: ranges_text(numbers) for role, numbers in held.items() if len(numbers) < world_size}
    return FittedLayouts(parallel, world_size, _notes(wanted, parallel, f"{max_ranks} ranks for all roles together"), own)


def _halved_to(
    wanted: Mapping[str, ParallelConfig], fits: Callable[[Mapping[str, ParallelConfig]], bool]
) -> dict[str, ParallelConfig] | None:
    """Layouts halved until they fit; None if not even roles without an axis do."""
    parallel = dict(wanted)
    while not fits(parallel):
        largest = max(parallel, key=lambda role: ranks_needed(parallel[role]))
        if ranks_needed(parallel[largest]) == 1:
            return None
        parallel[largest] = _halved(parallel[largest])
    return parallel


def _notes(wanted: Mapping[str, ParallelConfig], parallel: Mapping[str, ParallelConfig], limit: str) -> tuple[str, ...]:
    return tuple(
        f"{role}: {_sizes(wanted[role])} needs more than {limit} (--max-ranks, GPUs), verified as {_sizes(parallel[role])}"
        for role in wanted
        if parallel[role] != wanted[role]
    )


def _axes(parallel: ParallelConfig) -> list[str]:
    return [axis for axis in (*_AXES, "vpp") if getattr(parallel, axis) > 1]


def _sizes(parallel: ParallelConfig) -> str:
    axes = [f"{axis}{getattr(parallel, axis)}" for axis in _axes(parallel)]
    return " ".join([*axes, *(["sp"] if parallel.sequence_parallel else [])]) or "tp1"


def _halved(parallel: ParallelConfig) -> ParallelConfig:
    """Halve the largest axis, and drop vpp, split or sequence parallel if their axis is now 1."""
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
    """(number of layers of the smallest model that fits all these layouts, the layouts with their split of it). An uneven split
    keeps the order of its stages by size, (10, 9, 9, 8) becomes (3, 2, 2, 1), and its largest stage takes layers that other layouts
    need."""
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
