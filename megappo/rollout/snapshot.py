"""State of a replica at a push of an asynchronous run, as a file of a checkpoint: what its requests have drawn, and where its log
is. Requests that have not begun are not in it: the training half knows their prompts."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy

from megappo.rollout.types import Context, KeptIds, Played, Response, Routes, Segment
from megappo.rollout.vllm_outputs import Drawn, Episode


@dataclass(frozen=True)
class Snapshot:
    """running: what has been drawn for requests in work, by number in the engine, in their order there; empty for those that wait
    in it. finished: responses that the training half does not have yet. is_dealt_anew: some requests are not with the replica that
    they were dealt to at first, which was lost."""

    replica: int
    num_evaluations: int
    engine_step: int
    num_events: int
    running: Mapping[int, Drawn]
    finished: Sequence[Response]
    is_dealt_anew: bool = False

    def encoded(self) -> bytes:
        return packed(replace(self, running=tuple(self.running.items())))

    @classmethod
    def decoded(cls, data: bytes) -> Snapshot:
        found = unpacked(data)
        return replace(found, running=dict(found.running))


def packed(value: Any) -> bytes:
    """Return JSON and a column of all arrays of each dtype, nothing pickled. value: JSON values, arrays, and the classes of _KINDS;
    a list comes back as a tuple."""
    to = _Writer()
    facts = json.dumps(to.json(value), separators=(",", ":"))
    arrays = {name: numpy.concatenate(parts) for name, parts in to.columns.items()}
    file = io.BytesIO()
    numpy.savez(file, allow_pickle=False, **arrays, facts=numpy.frombuffer(facts.encode(), numpy.uint8))
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the argument of `packed`. ValueError if the bytes are something else."""
    with numpy.load(io.BytesIO(data), allow_pickle=False) as file:
        columns = {name: file[name] for name in file.files}
    facts = json.loads(columns.pop("facts").tobytes())
    if not isinstance(facts, list):
        raise ValueError("what was in flight is of another version of megappo; resume with that version, or start a new run")
    return _Reader(columns).value(facts)


_KINDS = {kind.__name__: kind for kind in (Context, Drawn, Episode, KeptIds, Played, Response, Routes, Segment, Snapshot)}


class _Writer:
    """Puts arrays at the ends of the columns; returns JSON of all else, which `_Reader` takes in the same order. A list begins with
    the dtype of an array, before its shape, with a name of _KINDS, before the fields, or with "", before the items of a tuple."""

    def __init__(self) -> None:
        self.columns: dict[str, list[numpy.ndarray]] = {}

    def json(self, value: Any) -> Any:
        if isinstance(value, numpy.ndarray):
            self.columns.setdefault(value.dtype.name, []).append(value.reshape(-1))
            return [value.dtype.name, *value.shape]
        if is_dataclass(value) or isinstance(value, Drawn):
            fields = value if isinstance(value, Drawn) else vars(value).values()
            return [type(value).__name__, *map(self.json, fields)]
        return ["", *map(self.json, value)] if isinstance(value, list | tuple) else value


class _Reader:
    def __init__(self, columns: Mapping[str, numpy.ndarray]) -> None:
        self._columns, self._taken = columns, dict.fromkeys(columns, 0)

    def value(self, facts: Any) -> Any:
        if not isinstance(facts, list):
            return facts
        kind, *of = facts
        if kind in self._columns:
            start = self._taken[kind]
            self._taken[kind] += math.prod(of)
            return self._columns[kind][start : self._taken[kind]].reshape(of)
        fields = tuple(map(self.value, of))
        return _KINDS[kind](*fields) if kind else fields
