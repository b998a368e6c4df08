"""Ranks of a role as a user writes them: `all`, or increasing ranges of world ranks such as `0-47`, `0-15,32-47` or `3`.
`parallel/layout.py` makes the value from which groups are built. Imports nothing of megappo."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

ALL = "all"
MOST_RANKS = 1 << 20  # ten times the largest clusters
_FORMS = "write all, a range (0-47), several (0-15,32-47) or one rank (3)"
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)  # 9 digits: more ranks than any world has


def ranges_of(text: str) -> list[range]:
    """Parse a text other than `all` into increasing ranges. Raises ValueError if they are malformed, out of order or overlap."""
    found: list[range] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"'{part.strip()[:40]}' is no range of ranks; {_FORMS}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part.strip()} runs backwards; write {last}-{first}")
        if found and first < found[-1].stop:
            before = _range_text(found[-1])
            if last >= found[-1].start:
                raise ValueError(f"the ranges {before} and {part.strip()} overlap; name every rank once")
            raise ValueError(f"the range {part.strip()} comes after {before}; write the ranges in increasing order")
        found.append(range(first, last + 1))
    return found


def ranks_of(text: str, world_size: int) -> tuple[int, ...]:
    """List the ranks of a text, increasing. Raises ValueError if a range leaves the world, and as `ranges_of`."""
    if world_size > MOST_RANKS:  # a tuple of so many ranks could fill the memory
        raise ValueError(f"a world of {world_size} ranks has more than {MOST_RANKS}; lower run.num_ranks (or --world-size)")
    if text == ALL:
        return tuple(range(world_size))
    ranges = ranges_of(text)
    # Checked before listing: a range may name a billion ranks.
    for one in ranges:
        if one.stop > world_size:
            what = "has rank 0 only" if world_size == 1 else f"has ranks 0-{world_size - 1}"
            raise ValueError(f"{_range_text(one)} is outside the world, which {what}; name ranks below {world_size}, or start more")
    return tuple(rank for one in ranges for rank in one)


def ranges_text(ranks: Iterable[int]) -> str:
    """Write increasing ranks as a user would: `0-15,32`. The inverse of `ranges_of`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(_range_text(range(first, last + 1)) for first, last in runs)


def _range_text(one: range) -> str:
    # No walk through the range: a mistake may name a billion ranks.
    return str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}"


def _as_text(value: Any) -> Any:
    # YAML reads one rank as a number.
    return str(value) if type(value) is int else value


def _check(text: str) -> str:
    if text != ALL:
        try:
            ranges_of(text)
        except ValueError as error:
            raise PydanticCustomError("ranks", "{fault}", {"fault": str(error)}) from None
    return text


RankRanges = Annotated[
    str,
    BeforeValidator(_as_text),
    AfterValidator(_check),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}),
]
