"""Examples of a supervised run as rows of a cache: what an optimizer step counts. `texts.py` has demonstrations; another data form
is a subclass whose example has several sequences, or other fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy

from megappo.data.packing import PackedBatch
from megappo.data.prompts import record_name
from megappo.data.rows import Rows

Overlong = Literal["filter", "error"]


@dataclass(frozen=True)
class Examples(ABC):
    """Examples with sequences of at most max_tokens tokens, in the order of the records; made on access. An example is a row: its
    tokens are those of its sequences one after the other."""

    rows: Rows
    max_tokens: int

    @property
    @abstractmethod
    def unit(self) -> str:
        """Word for an example."""

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the tokens of every sequence of these examples, without reading them."""
        return [(int(self.rows.lengths[number]),) for number in numbers]

    @abstractmethod
    def packed(self, numbers: Sequence[int]) -> PackedBatch:
        """Pack the sequences of these examples in this order, with the fields that the loss reads."""

    def id(self, number: int) -> str:
        """Return `source#row` of an example's record; rows count from 0."""
        return record_name(*self.rows.place_of(self.rows[number]), None)

    @property
    def source_sha256(self) -> str:
        """SHA-256 of the source's content."""
        return str(self.rows.facts["source_sha256"])

    def identities(self) -> dict[str, str]:
        """Return what a resume compares: the examples kept of how many records (`kept`), and their tokens (`tokens`)."""
        tokens = int(numpy.sum(self.rows.lengths, dtype=numpy.int64))
        return {"kept": f"{len(self)} of {self.rows.facts['num_records']}", "tokens": str(tokens)}

    def summary(self) -> str:
        """Return one line on the examples kept and left out."""
        return summary_of(len(self), self.rows.facts["num_records"], self.max_tokens, self.unit)


def summary_of(kept: int, num_records: int, max_tokens: int, unit: str) -> str:
    overlong = f"; {num_records - kept:,} longer than data.max_tokens={max_tokens}" if kept < num_records else ""
    return f"kept {kept:,} of {num_records:,} {unit}s{overlong}"


def fits(lengths: Sequence[int], max_tokens: int, overlong: Overlong, name: str) -> bool:
    """Return True if no sequence of a record is too long. ValueError, with the record's name, if `overlong` is error."""
    if (longest := max(lengths)) <= max_tokens:
        return True
    if overlong == "error":
        fix = f"has {longest} tokens; raise it, or set data.overlong to filter"
        raise ValueError(f"data.max_tokens={max_tokens}: {name} {fix}")
    return False


def require_some(unit: str, max_tokens: int, spec: str, rows: Rows, num_records: int) -> Mapping[str, Any]:
    """Return no further facts. ValueError if no example is left of the source `spec`."""
    if not len(rows):
        raise ValueError(f"no {unit}s are left of {spec}: {summary_of(0, num_records, max_tokens, unit)}")
    return {}
