"""Layouts and placements as values, pure arithmetic, which `megappo plan` and the bridge also use for worlds that do not exist
here. A layout has the sizes of the axes, the coordinates of every rank of a role, the layers of every stage; its axes are in
Megatron's default order: tp fastest, then cp, dp and pp; for experts etp, ep and the remaining edp share the ranks of a stage. A
placement has the world ranks on which a role lives: position p of its layout is the p-th of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from megappo.config.rank_ranges import ALL, ranges_text, ranks_of
from megappo.config.role_sections import ParallelConfig


@dataclass(frozen=True)
class Placement:
    """Ranks of a role, increasing, in a world of `world_size` ranks. ValueError if there are none, or if they are not increasing or
    outside the world."""

    ranks: tuple[int, ...]
    world_size: int

    def __post_init__(self) -> None:
        if not self.ranks or any(a >= b for a, b in zip(self.ranks, self.ranks[1:])):
            raise ValueError(f"ranks {list(self.ranks)[:8]} of a role must be increasing, and at least one")
        if self.ranks[0] < 0 or self.ranks[-1] >= self.world_size:
            raise ValueError(f"ranks {ranges_text(self.ranks)} are outside a world of {self.world_size}")

    @classmethod
    def whole(cls, world_size: int) -> Placement:
        return cls(tuple(range(world_size)), world_size)

    @property
    def is_whole(self) -> bool:
        return len(self.ranks) == self.world_size

    def __len__(self) -> int:
        return len(self.ranks)

    def __contains__(self, rank: int) -> bool:
        return rank in self._positions

    def rank_of(self, position: int) -> int:
        """Return the world rank of a position of the layout."""
        return self.ranks[position]

    def position_of(self, rank: int) -> int:
        """Return the position of a world rank that the role lives on; KeyError for another rank."""
        return self._positions[rank]

    def ranks_of(self, positions: Iterable[int]) -> list[int]:
        return [self.ranks[position] for position in positions]

    def overlaps(self, other: Placement) -> bool:
        return not self._positions.keys().isdisjoint(other._positions)

    def __str__(self) -> str:
        return ALL if self.is_whole else ranges_text(self.ranks)

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}


def placement_of(ranks: str, world_size: int) -> Placement:
    """Return the placement of a key `ranks`. ValueError, without the key, as `config.rank_ranges.ranks_of`."""
    return Placement(ranks_of(ranks, world_size), world_size)


def ranks_by_roles(placements: Mapping[str, Placement]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Group ranks by the roles (and `rollout`) that live on them: names -> ranks, increasing; groups by their first rank."""
    if all(one.is_whole for one in placements.values()):
        return {tuple(placements): next(iter(placements.values())).ranks}
    hosts: dict[int, list[str]] = {}
    for name, placement in placements.items():
        for rank in placement.ranks:
            hosts.setdefault(rank, []).append(name)
    found: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(hosts):
        found.setdefault(tuple(hosts[rank]), []).append(rank)
    return {names: tuple(ranks) for names, ranks in found.items()}


AXES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")


@dataclass(frozen=True)
class Coordinates:
    """Position of one rank: (tp, cp, dp, pp) in the grid of the dense layers, (etp, ep, edp, pp) in the grid of the experts."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class ParallelLayout:
    """tp x cp x dp x pp positions, counted from 0. ValueError if the sizes do not fit the world or each other."""

    world_size: int
    """Ranks of the role. A rank here is a position among them; `placement.py` maps it to the world."""
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    vpp: int = 1
    """Model chunks of every pipeline stage (interleaved schedule)."""
    cp: int = 1
    ep: int = 1
    """Ranks over which the experts of a layer are distributed."""
    etp: int = 1
    """Ranks over which each expert is cut."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of the pp * vpp virtual stages in model order: chunk 0 of every stage, then chunk 1; empty: an even split."""

    def __post_init__(self) -> None:
        model = self.tp * self.cp * self.pp
        if self.world_size % model:
            cp = f" x cp {self.cp}" if self.cp > 1 else ""
            raise ValueError(f"tp {self.tp}{cp} x pp {self.pp} = {model} does not divide the {self.world_size} ranks")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1")
        if self.ranks_per_stage % (self.etp * self.ep):
            experts = f"etp {self.etp} x ep {self.ep} = {self.etp * self.ep}"
            raise ValueError(f"{experts} does not divide the {self.ranks_per_stage} ranks of a pipeline stage (tp x cp x dp)")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp {self.vpp} interleaves pipeline stages and needs pp > 1")
        if self.layers_per_stage and len(self.layers_per_stage) != self.pp * self.vpp:
            given = f"layers_per_stage has {len(self.layers_per_stage)} entries"
            raise ValueError(f"{given}; pp {self.pp} x vpp {self.vpp} needs {self.pp * self.vpp}")

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Number of ranks with the same part of the experts."""
        return self.ranks_per_stage // (self.etp * self.ep)

    @property
    def ranks_per_stage(self) -> int:
        return self.world_size // self.pp

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.world_size
        stage, inside = divmod(rank, self.ranks_per_stage)  # pp is the slowest axis of both grids
        return Coordinates(
            tp=inside % self.tp,
            cp=inside // self.tp % self.cp,
            dp=inside // (self.tp * self.cp),
            pp=stage,
            etp=inside % self.etp,
            ep=inside // self.etp % self.ep,
            edp=inside // (self.etp * self.ep),
        )

    # Inverse of `coordinates` in the grid of the dense layers.
    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def axis_groups(self, *axes: str) -> list[list[int]]:
        """Return groups of ranks that differ only along these axes, in rank order. The axes must be of one grid, see
        `Coordinates`."""
        grid = ("etp", "ep", "edp", "pp") if set(axes) & {"etp", "ep", "edp"} else ("tp", "cp", "dp", "pp")
        assert set(axes) <= set(grid), f"{axes} mix the two grids"
        groups: dict[tuple, list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            groups.setdefault(tuple(getattr(at, axis) for axis in grid if axis not in axes), []).append(rank)
        return list(groups.values())

    def chunk_layers(self, num_layers: int, stage: int, chunk: int = 0) -> range:
        """Return the global layer indices of one model chunk of a stage. ValueError if the layers do not split this way."""
        position, parts = chunk * self.pp + stage, self.pp * self.vpp  # chunk 0 of every stage comes first
        if not self.layers_per_stage and num_layers % parts == 0:
            each = num_layers // parts
            return range(position * each, (position + 1) * each)
        split = self._split(num_layers)
        start = sum(split[:position])
        return range(start, start + split[position])

    def stage_layers(self, num_layers: int, stage: int) -> Iterator[int]:
        for chunk in range(self.vpp):
            yield from self.chunk_layers(num_layers, stage, chunk)

    def _split(self, num_layers: int) -> tuple[int, ...]:
        if not self.layers_per_stage:
            vpp = f" x vpp {self.vpp} = {self.pp * self.vpp}" if self.vpp > 1 else ""
            fix = "set layers_per_stage, or change pp or vpp"
            raise ValueError(f"{num_layers} layers are not divisible by pp {self.pp}{vpp}; {fix}")
        if sum(self.layers_per_stage) != num_layers:
            given = f"layers_per_stage {list(self.layers_per_stage)} adds up to {sum(self.layers_per_stage)}"
            raise ValueError(f"{given}, the model has {num_layers} layers")
        return self.layers_per_stage

    def __str__(self) -> str:
        """Name the sizes: tp, pp and dp always, the others if they are not 1."""
        optional = [f"{axis}{getattr(self, axis)}" for axis in ("vpp", "cp", "ep", "etp") if getattr(self, axis) > 1]
        split = ["split" + "-".join(map(str, self.layers_per_stage))] if self.layers_per_stage else []
        sequence = ["sp"] if self.sequence_parallel else []
        return " ".join([f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}", *optional, *split, *sequence])


def layout_of(parallel: ParallelConfig, world_size: int) -> ParallelLayout:
    """Return the layout of a section `<role>.parallel` on the role's `world_size` ranks. ValueError if the sizes do not fit."""
    return ParallelLayout(
        world_size,
        tp=parallel.tp,
        pp=parallel.pp,
        sequence_parallel=parallel.sequence_parallel,
        vpp=parallel.vpp,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        layers_per_stage=parallel.layers_per_stage,
    )
