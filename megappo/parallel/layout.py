"""A parallel layout as a value: sizes of the axes, and which rank stands where.

Pure arithmetic, no torch.distributed: `megappo plan` and the bridge ask it about ranks of worlds that do not exist here. The order of
the axes is Megatron's default, tp fastest, then dp, then pp, so a tp group lies on neighbouring ranks. Groups are built from it in
`groups.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    """Position of one rank in a layout's grid."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ParallelLayout:
    """tp x dp x pp ranks, from rank 0 of the world on. Raises ValueError where the sizes do not fit the world."""

    world_size: int
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        model = self.tp * self.pp
        if self.world_size % model:
            raise ValueError(f"tp {self.tp} x pp {self.pp} = {model} does not divide the {self.world_size} ranks")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1")

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp)

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.world_size
        return Coordinates(rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp))

    def rank_of(self, tp: int, dp: int, pp: int) -> int:
        return tp + self.tp * (dp + self.dp * pp)

    def axis_groups(self, *axes: str) -> list[list[int]]:
        """Ranks that differ only along these axes ("tp", "dp", "pp"), one list per group, in rank order."""
        groups: dict[tuple, list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            key = tuple(getattr(at, axis) for axis in ("tp", "dp", "pp") if axis not in axes)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp}" + (" sp" if self.sequence_parallel else "")


def stage_layers(num_layers: int, pp: int, stage: int) -> range:
    """Global numbers of the layers on this pipeline stage."""
    if num_layers % pp:
        raise ValueError(f"{num_layers} layers are not divisible by pp {pp}")
    per_stage = num_layers // pp
    return range(stage * per_stage, (stage + 1) * per_stage)
