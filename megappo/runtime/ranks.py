"""Ranks in words, for messages that name some of many. Imports no torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def name_ranks(ranks: Iterable[int]) -> str:
    """[1] -> `rank 1`; [0, 2, 3, 4] -> `ranks 0, 2-4`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank {names[0]}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {', '.join(names)}"


def ranks_by_value(values: Mapping[int, Key]) -> dict[Key, list[int]]:
    """Rank -> value, turned into value -> its ranks; the value of the fewest ranks, the likely culprits, comes first."""
    found: dict[Key, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return dict(sorted(found.items(), key=lambda item: (len(item[1]), item[1])))
