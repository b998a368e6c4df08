"""Rows of token ids in Arrow files that any number of processes map: made once of the records of a source, then read by number.
A folder holds `records-N.arrow` (the records of part N of the source, in blocks), `tokens*.arrow` (the rows) and `facts.json`.
`prompt_rows.py` and `texts.py` define the rows; `Dataset.map` of `datasets` tokenises many records on several cores."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import psutil

import megappo.data
from megappo.data.cache import Cache, Key, content_of, digest, hash_of_modules, signature
from megappo.data.prompts import Record, record_name
from megappo.data.sources import Joined, Source, parts_of
from megappo.data.tokenizers import Tokenizer
from megappo.runtime.helper_process import FAILED, HelperDied, HelperProcess, end_with

RECORDS, FACTS = "records-{}.arrow", "facts.json"
SPANS = "spans"
"""Kind of a row's value: a list of int32, such as borders in its tokens."""
ALONE = 200_000  # records that are tokenised in this process: a few times as long as others take to load a tokenizer
BATCH = 4096  # rows of an Arrow batch
REAPED_S = 5.0  # a pool that works reaps its processes within a tenth of a second
MOST_PROCESSES = 32  # more gain little: the hash of all rows is made by one

Encode = Callable[[Record, str], Iterable[tuple[Sequence[int], Any]]]
"""(record, its name in messages) -> its rows: token ids and one further value. ValueError, one line, for a bad record."""


class Row(NamedTuple):
    """Tokens of a row, its further value, and its record: number in the source from 0, block, position in the block. Records and
    blocks are counted through all parts of the source."""

    tokens: Sequence[int]
    value: Any
    record: int
    block: int
    position: int


class _Part(NamedTuple):
    """One file or dataset of a source; it is pickled. record, block: numbers of its first ones in the source."""

    spec: str
    read: Callable[[str, Any], Iterable[tuple[Record, int | None]]]
    record: int
    block: int


class _Records:
    """Records of a folder, mapped. A part has its own file, since a file of Arrow has one schema."""

    def __init__(self, folder: Path, parts: Sequence[_Part]) -> None:
        self._folder, self._parts = folder, parts
        self._reader = lru_cache(None)(self._open)
        self._batch = lru_cache(1)(lambda block: self._reader(index := self._index(block)).get_batch(block - parts[index].block))

    def part(self, block: int) -> _Part:
        """Part that has this block."""
        return self._parts[self._index(block)]

    def read(self, block: int, position: int = 0, count: int | None = None) -> Iterable[tuple[Record, int | None]]:
        """Records of a block, each with its line in the file if it has one; of `count` from `position` on."""
        part = self.part(block)
        return part.read(part.spec, self._batch(block).slice(position, count))

    def _index(self, block: int) -> int:
        # The last one that starts there: those before it are empty.
        return bisect_right(self._parts, block, key=lambda part: part.block) - 1

    def _open(self, index: int) -> Any:
        import pyarrow

        return pyarrow.ipc.open_file(pyarrow.memory_map(str(self._folder / RECORDS.format(index))))


class Rows:
    """Rows of a folder, mapped: they take no memory of the process. `facts` are those written with them."""

    def __init__(self, folder: Path, source: Source | Joined) -> None:
        import pyarrow

        self.facts: Mapping[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        self._records = _Records(folder, _parts(source, self.facts["parts"]))
        streams = (pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))) for file in sorted(folder.glob("tokens*.arrow")))
        self._batches = [batch for stream in streams for batch in stream if batch.num_rows]
        self._ends = numpy.cumsum([batch.num_rows for batch in self._batches])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._batches else 0

    def __getitem__(self, index: int) -> Row:
        at = int(numpy.searchsorted(self._ends, index, side="right"))
        batch = self._batches[at]
        tokens, *others = (column[index - int(self._ends[at])] for column in batch.columns)  # counted from the batch's end
        return Row(tuple(tokens.values.to_numpy().tolist()), *(value.as_py() for value in others))

    def __iter__(self) -> Iterator[Row]:
        for batch in self._batches:
            yield from map(Row, *(column.to_pylist() for column in batch.columns))

    @cached_property
    def lengths(self) -> numpy.ndarray:
        """Tokens of each row, [N] int32."""
        found = [batch.column(0).value_lengths().to_numpy() for batch in self._batches]
        return numpy.concatenate([numpy.zeros(0, numpy.int32), *found])

    @property
    def without_value(self) -> array:
        """Indices of the rows whose `value` is null, [M] of 64 bits."""
        found = [batch.column(1).is_null().to_numpy(zero_copy_only=False) for batch in self._batches]
        return array("q", numpy.flatnonzero(numpy.concatenate([numpy.zeros(0, bool), *found])).tobytes())

    def record_of(self, row: Row) -> tuple[Record, int | None]:
        """Record of a row, and its line in the file if it has one."""
        [found] = self._records.read(row.block, row.position, 1)
        return found

    def place_of(self, row: Row) -> tuple[str, int]:
        """File or dataset of a row's record, and the record's number there from 0."""
        part = self._records.part(row.block)
        return part.spec, row.record - part.record


@dataclass(frozen=True)
class Recipe:
    """Instructions to make rows."""

    encode: Encode
    kind: str
    """Arrow type, by name, of a row's `value`; SPANS for a list of numbers."""
    finish: Callable[[Rows, int], Mapping[str, Any]]
    """(rows, number of records) -> facts of the rows. Raises ValueError for rows that no run should have."""
    limit: int | None = None
    """Most rows; records beyond are not read."""


def rows_of(source: Source | Joined, tokenizer: Tokenizer, rules: Key, cache: Cache, recipe: Recipe) -> tuple[Rows, str]:
    """Return (rows of a source by these rules, fingerprint of all that decides them and their names), made if the cache has none.
    Raises ValueError as `recipe` does, or if the files change meanwhile; RuntimeError, one line, if a process is killed."""
    before = signature(source.files)
    key = {
        "parts": [[type(part).__name__, part.choice, _content_of(part)] for part in parts_of(source)],
        "tokenizer": tokenizer.identity(),
        "code": hash_of_modules(megappo.data),
        **rules,
    }

    def build(folder: Path) -> None:
        _make(folder, source, recipe)
        if signature(source.files) != before:
            raise ValueError(f"{source.spec} was changed while it was read; start again when nobody writes to it")

    return Rows(cache.folder(key, build), source), digest({"rows": key, "spec": source.spec})


def _content_of(part: Source) -> str:
    if part.files:
        return content_of(part.files)
    for _ in part.batches():  # its records are its only identity
        pass
    return part.sha256


def _parts(source: Source | Joined, firsts: Sequence[Sequence[int]]) -> list[_Part]:
    return [_Part(part.spec, part.records, *first) for part, first in zip(parts_of(source), firsts, strict=True)]


def _make(folder: Path, source: Source | Joined, recipe: Recipe) -> None:
    starts, firsts = [0], []
    for number, part in enumerate(parts_of(source)):
        firsts.append((starts[-1], len(starts) - 1))
        _write_records(folder / RECORDS.format(number), part, starts)
    num_records = starts.pop()
    job = _Job(folder, _parts(source, firsts), recipe.encode, recipe.kind)
    if recipe.limit is None and num_records > ALONE:
        _encode_elsewhere(job, starts)
    else:
        _encode_here(job, starts, recipe.limit)
    facts = {"num_records": num_records, "source_sha256": source.sha256, "parts": firsts}
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    facts |= recipe.finish(Rows(folder, source), num_records)
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _write_records(file: Path, part: Source, starts: list[int]) -> None:
    """Write the blocks of a part. Appends the number of the record after each block, where the next one starts."""
    import pyarrow

    writer = None
    with file.open("wb") as sink:
        for batch in part.batches():
            writer = writer or pyarrow.ipc.new_file(sink, batch.schema)
            writer.write_batch(batch)
            starts.append(starts[-1] + batch.num_rows)
        if writer is not None:
            writer.close()
    if writer is None:
        file.unlink()


class _Job(NamedTuple):
    """Arguments of a process that makes rows of blocks; it is pickled."""

    folder: Path
    parts: Sequence[_Part]
    encode: Encode
    kind: str

    def rows(self, blocks: Iterable[tuple[int, int]]) -> Iterator[Row]:
        """Rows of blocks (number, first record). Raises ValueError for the first bad record."""
        records = _Records(self.folder, self.parts)
        for block, start in blocks:
            part = records.part(block)
            for position, (record, line) in enumerate(records.read(block)):
                name = record_name(part.spec, start + position - part.record, line)
                for tokens, value in self.encode(record, name):
                    yield Row(tokens, value, start + position, block, position)

    def table(self, rows: Iterable[Row]) -> Any:
        import pyarrow

        flat, ends, columns = array("i"), array("i", [0]), ([], [], [], [])
        for row in rows:
            flat.extend(row.tokens)
            ends.append(len(flat))
            for column, value in zip(columns, row[1:]):
                column.append(value)
        tokens = pyarrow.ListArray.from_arrays(pyarrow.array(ends, pyarrow.int32()), pyarrow.array(flat, pyarrow.int32()))
        numbers = pyarrow.list_(pyarrow.int32())
        kinds = (self.kind, "int64", "int32", "int32")
        types = [numbers if kind == SPANS else pyarrow.type_for_alias(kind) for kind in kinds]
        arrays = [pyarrow.array(column, kind) for column, kind in zip(columns, types)]
        return pyarrow.table([tokens, *arrays], names=list(Row._fields))


def _encode_here(job: _Job, starts: Sequence[int], limit: int | None) -> None:
    import pyarrow

    rows = islice(job.rows(enumerate(starts)), limit)
    with (job.folder / "tokens.arrow").open("wb") as sink, pyarrow.ipc.new_stream(sink, job.table(()).schema) as writer:
        while chunk := list(islice(rows, BATCH)):
            writer.write_table(job.table(chunk))


def usable_processes() -> int:
    """This rank's share of the cores that it may run on, at most MOST_PROCESSES."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // ranks))


def _encode_elsewhere(job: _Job, starts: Sequence[int]) -> None:
    # In a process of its own, which divides the work: a rank with threads and devices must not be forked.
    mapper = HelperProcess("data", partial(_mapper, job), None)
    try:
        word, said = mapper((list(starts), usable_processes()))
    except HelperDied as died:
        raise RuntimeError(f"data: the process that encoded records {died}; start again") from None
    finally:
        mapper.close()
    if word == FAILED:
        raise RuntimeError(f"data: {said}; start again")
    if refused := sorted(job.folder.glob(f"{_REFUSED}*")):
        raise ValueError(refused[0].read_text(encoding="utf-8"))


_REFUSED = "refused-"


def _mapper(job: _Job) -> Callable[[Any], tuple[str, Any]]:
    import datasets

    datasets.disable_progress_bars()
    worker = os.getpid()

    def in_child() -> None:
        end_with(worker)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # by which the pool ends its processes

    os.register_at_fork(after_in_child=in_child)
    threading.Thread(target=_end_with_a_dead_pool, daemon=True).start()

    def answer(question: Any) -> tuple[str, Any]:
        starts, processes = question
        blocks = datasets.Dataset.from_dict({"block": range(len(starts)), "start": starts})
        size = max(1, BATCH // (starts[1] if len(starts) > 1 else BATCH))
        file = str(job.folder / "tokens.arrow")
        many = {"num_proc": min(processes, len(starts))} if processes > 1 else {}
        try:
            blocks.map(
                partial(_map_blocks, job),
                batched=True,
                batch_size=size,
                cache_file_name=file,
                new_fingerprint="tokens",
                remove_columns=["block", "start"],
                **many,
            )
        except (RuntimeError, OSError) as error:  # RuntimeError: one of its processes was killed
            return FAILED, str(error).partition(".")[0]
        return "done", None

    return answer


def _end_with_a_dead_pool() -> None:
    """Kill this process once a process of its pool has been dead, and not been reaped, for REAPED_S.

    A process that was killed may have held a lock of the pool, whose end then waits for it without end.
    """
    before: set[int] = set()
    while True:
        time.sleep(REAPED_S)
        dead = {child.pid for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE}
        if dead & before:
            os.kill(os.getpid(), signal.SIGKILL)
        before = dead


def _map_blocks(job: _Job, blocks: Mapping[str, Sequence[int]]) -> Any:
    # A bad record is written to a file and the blocks after it are left out, so that the first one is reported.
    places = list(zip(blocks["block"], blocks["start"]))
    refused = min((int(file.name.removeprefix(_REFUSED)) for file in job.folder.glob(f"{_REFUSED}*")), default=None)
    if refused is not None and refused < places[0][0]:
        return job.table(())
    rows: list[Row] = []
    for block, start in places:
        try:
            rows += job.rows([(block, start)])
        except ValueError as error:
            (job.folder / f"{_REFUSED}{block:012d}").write_text(str(error), encoding="utf-8")
            break
    return job.table(rows)
