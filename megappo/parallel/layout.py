"""Parallel layout as a value: sizes of the axes, coordinates of every rank of a role, layers of every stage. Pure arithmetic, which
`megappo plan` and the bridge also use for worlds that do not exist here. The axes are in Megatron's default order: tp fastest, then
cp, dp and pp; for experts etp, ep and the remaining edp share the ranks of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megappo.config.role_sections import ParallelConfig

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
        split = self._split(num_layers)
        position = chunk * self.pp + stage  # chunk 0 of every stage comes first
        start = sum(split[:position])
        return range(start, start + split[position])

    def stage_layers(self, num_layers: int, stage: int) -> Iterator[int]:
        for chunk in range(self.vpp):
            yield from self.chunk_layers(num_layers, stage, chunk)

    def _split(self, num_layers: int) -> tuple[int, ...]:
        parts = self.pp * self.vpp
        if not self.layers_per_stage:
            if num_layers % parts:
                vpp = f" x vpp {self.vpp} = {parts}" if self.vpp > 1 else ""
                fix = "set layers_per_stage, or change pp or vpp"
                raise ValueError(f"{num_layers} layers are not divisible by pp {self.pp}{vpp}; {fix}")
            return (num_layers // parts,) * parts
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
