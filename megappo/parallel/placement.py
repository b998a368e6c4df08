"""Placement as a value: the world ranks on which a role lives; position p of its `ParallelLayout` is the p-th of them. Pure
arithmetic, also for worlds that do not exist here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from megappo.config.rank_ranges import ALL, ranges_text, ranks_of


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
