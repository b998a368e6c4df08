"""Text for messages: the first line of an error, ranks by number, JSON that others wrote. Imports nothing of megappo."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

Key = TypeVar("Key", bound=Hashable)


def name_ranks(ranks: Iterable[int]) -> str:
    """Format ranks: [1] -> `rank 1`; [0, 2, 3, 4] -> `ranks 0, 2-4`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank {names[0]}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {', '.join(names)}"


def ranks_by_value(values: Mapping[int, Key]) -> dict[Key, list[int]]:
    """Turn rank -> value into value -> its ranks; the value of the fewest ranks, the likely culprits, comes first."""
    found: dict[Key, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return dict(sorted(found.items(), key=lambda item: (len(item[1]), item[1])))


def first_line(error: BaseException, *, kind: bool = False) -> str:
    """Return the first line of the error's message, or its kind if it has none. kind: put the kind in front: `OSError: disk
    full`."""
    name = type(error).__name__
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if not text:
        return name
    return f"{name}: {text}" if kind else text


class NestedTooDeeply(ValueError):
    """Text nested deeper than Python's own limit."""


def parse_object(
    content: bytes, what: str, *, finite: bool = False, parse_float: Callable[[str], float] | None = None
) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. finite: refuse NaN and Infinity, which JSON lacks and transformers writes. parse_float: makes
    the numbers that are no integers, of their text. ValueError, one line that begins with `what`: not UTF-8, not JSON, or not an
    object; NestedTooDeeply."""
    try:
        value = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant if finite else None, parse_float=parse_float)
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not valid JSON: byte {error.start} is not UTF-8; save it as UTF-8") from error
    except RecursionError:
        raise NestedTooDeeply(f"{what} is not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} is not valid JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a JSON {type(value).__name__}, not an object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")
