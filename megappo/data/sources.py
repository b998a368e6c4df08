"""Records from files and Hugging Face datasets, a few at a time. `prompt_rows.py` and `demonstrations.py` interpret them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megappo.runtime.error_text import first_line
from megappo.runtime.json_object import NestedTooDeeply, parse_object

Record = dict[str, Any]

MAX_DEPTH = 100  # of a record's objects and lists; the reader of JSON ends at Python's recursion limit, some 900 levels
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ARROW_ROWS = 64  # records of a block: the bytes that are read for one of them, against a schema for each


class RecordBlock(NamedTuple):
    """Consecutive records, kept together. content: read by `decode`. line: of the one record of a .jsonl file, from 1."""

    content: bytes
    records: Sequence[Record]
    line: int | None = None


class Source(Protocol):
    """Records of one source. spec: as the user wrote it. files: that hold the records; empty if none does. choice: of the records
    among those of the files, "" for all.

    sha256: once `blocks` has been read to its end; of a .parquet file's bytes, of a dataset's records, or of a .jsonl file's lines,
    each ended by a newline: that of the file itself, unless it has ends of lines as on Windows, a byte order mark or blank lines,
    which change no record.
    """

    spec: str
    files: Sequence[Path]
    choice: str

    @property
    def sha256(self) -> str: ...

    def blocks(self) -> Iterator[RecordBlock]:
        """All records in order. ValueError, one line, for a malformed source; it names a bad line of a file by its number."""
        ...

    def decode(self, content: bytes, position: int) -> Record:
        """Record of a block by its position there."""
        ...


def open_source(spec: str) -> Source:
    """Open a `.jsonl` file, a `.parquet` file or a Hugging Face dataset; of files nothing is read.

    A dataset is `name` (its "train" split) or `name:subset:split` (an empty subset means the default one). ValueError, one line,
    for a missing or unreadable source.
    """
    path = find_file(spec)
    if path is None:
        return HubDataset(spec)
    return JsonLines(spec) if path.suffix == ".jsonl" else Parquet(spec)


def find_file(spec: str) -> Path | None:
    """The file that a source names, None for a Hugging Face dataset, of which nothing but the name is looked at. ValueError as
    `open_source`.
    """
    path = Path(spec)
    if path.suffix in (".jsonl", ".parquet"):
        if not path.is_file():
            raise ValueError(f"data file {spec} {'is a directory' if path.is_dir() else 'does not exist'}")
        try:
            path.open("rb").close()
        except OSError as error:
            raise ValueError(f"data file {spec} cannot be read: {error.strerror}") from error
        return path
    if path.exists():
        raise ValueError(f"data source {spec} is neither a .jsonl nor a .parquet file")
    _dataset_parts(spec)
    return None


class _Digested:
    """A source whose `blocks` begins a digest of its content and completes it."""

    _digest: Any = None

    @property
    def sha256(self) -> str:
        assert self._digest is not None, "the hash is known once the records were read"
        return self._digest.hexdigest()


class JsonLines(_Digested):
    """Lines of a .jsonl file, one record each; blank lines are none."""

    choice = ""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.files: Sequence[Path] = (Path(spec),)

    def blocks(self) -> Iterator[RecordBlock]:
        self._digest = hashlib.sha256()
        with self.files[0].open("rb") as file:
            # Lines of bytes end at \n only: str.splitlines would also split at U+2028, which JSON strings may hold.
            for number, line in enumerate(file, start=1):
                line = (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).strip()
                if line:
                    self._digest.update(line + b"\n")
                    yield RecordBlock(line, [_parse_line(self.spec, number, line)], number)

    def decode(self, content: bytes, position: int) -> Record:
        return json.loads(content)


def _parse_line(spec: str, number: int, line: bytes) -> Record:
    where = f"{spec} line {number}"
    try:
        record = parse_object(line, where, finite=True)
        _require_flat(record, line)
    except NestedTooDeeply:
        raise ValueError(f"{where} is nested more than {MAX_DEPTH} levels deep") from None
    return record


def _require_flat(record: Any, line: bytes) -> None:
    """NestedTooDeeply for a record nested deeper than MAX_DEPTH."""
    if line.count(b"[") + line.count(b"{") <= MAX_DEPTH:  # nearly every line
        return
    level = [record]
    for _ in range(MAX_DEPTH):
        level = [item for value in level if isinstance(value, (dict, list)) for item in _items(value)]
        if not level:
            return
    raise NestedTooDeeply


def _items(value: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else list(value)


class _Arrow(_Digested):
    """Records of Arrow tables: a block is an IPC stream, which keeps every type that JSON lacks."""

    def decode(self, content: bytes, position: int) -> Record:
        import pyarrow

        return pyarrow.ipc.open_stream(content).read_all().slice(position, 1).to_pylist()[0]


def _arrow_block(table: Any) -> RecordBlock:
    import pyarrow

    table = table.replace_schema_metadata(None)  # kilobytes, of pandas and others, in every block
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return RecordBlock(sink.getvalue().to_pybytes(), table.to_pylist())


class Parquet(_Arrow):
    """Rows of a .parquet file."""

    choice = ""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.files: Sequence[Path] = (Path(spec),)

    def blocks(self) -> Iterator[RecordBlock]:
        # An optional package, and slow to import.
        import pyarrow
        from pyarrow import parquet

        try:
            with self.files[0].open("rb") as stream:
                self._digest = hashlib.file_digest(stream, "sha256")
                for batch in parquet.ParquetFile(stream).iter_batches(_ARROW_ROWS):
                    yield _arrow_block(pyarrow.Table.from_batches([batch]))
        except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise ValueError(f"{self.spec} cannot be read as parquet: {first_line(error)}") from error


class HubDataset(_Arrow):
    """Rows of a Hugging Face dataset, loaded (and downloaded, if need be) when this is made."""

    def __init__(self, spec: str) -> None:
        self.spec = self.choice = spec  # the files of a split are those of its slices too
        self._dataset = _load_dataset(spec)
        self.files: Sequence[Path] = tuple(Path(file["filename"]) for file in self._dataset.cache_files)

    def blocks(self) -> Iterator[RecordBlock]:
        self._digest = hashlib.sha256()
        for table in self._dataset.with_format("arrow").iter(_ARROW_ROWS):
            block = _arrow_block(table)
            for record in block.records:
                self._digest.update(json.dumps(record, sort_keys=True, default=repr).encode() + b"\n")
            yield block


def _load_dataset(spec: str) -> Any:
    name, subset, split = _dataset_parts(spec)
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ValueError(
            f"data source {spec} is a Hugging Face dataset, which needs the datasets package: pip install datasets"
        ) from error

    try:
        return datasets.load_dataset(name, subset, split=split)
    # OSError covers a failed connection, offline mode and a missing dataset; ValueError an unknown subset or split.
    except (OSError, ValueError, DatasetsError) as error:
        raise ValueError(
            f"cannot load the Hugging Face dataset {spec}: {first_line(error)}; for a local file give a .jsonl or .parquet path"
        ) from error


def _dataset_parts(spec: str) -> tuple[str, str | None, str]:
    name, *rest = spec.split(":")
    if not _DATASET.fullmatch(name):
        raise ValueError(f"data source {spec} does not exist and is not the name of a Hugging Face dataset")
    if not rest:
        return name, None, "train"
    if len(rest) != 2 or not rest[1]:
        raise ValueError(f"data source {spec} must be a .jsonl or .parquet file, a dataset `name`, or `name:subset:split`")
    return name, rest[0] or None, rest[1]
