"""Records from files and Hugging Face datasets, in batches of Arrow. `rows.py` keeps them, and others interpret them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megappo.runtime.messages import NestedTooDeeply, first_line, parse_object

Record = dict[str, Any]

MAX_DEPTH = 100  # of a record's objects and lists; the reader of JSON ends at Python's recursion limit, some 900 levels
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLOCK = 256  # records of a batch


class Written(float):
    """A number with the text that it has in its file, which is the answer's: `0.00001`, not Python's 1e-05."""

    __slots__ = ("text",)

    def __new__(cls, text: str) -> Written:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)  # other processes get plain numbers


class Source(Protocol):
    """Records of one source."""

    spec: str
    """Name as the user wrote it."""
    files: Sequence[Path]
    """Files that hold the records; empty if there are none."""
    choice: str
    """Names the chosen records among those of the files; "" for all."""
    sha256: str
    """Empty until `batches` has been read to its end. Then of a .parquet file's bytes, a dataset's records, or a .jsonl file's
    lines, each ended by a newline: the file's own unless it has Windows line ends, a byte order mark or blank lines."""

    def batches(self) -> Iterator[Any]:
        """All records in order, as `pyarrow.RecordBatch` of one schema. Raises ValueError, one line, if they cannot be read."""
        ...

    @staticmethod
    def records(spec: str, batch: Any) -> Iterator[tuple[Record, int | None]]:
        """Pairs (record, its line in the file from 1, or None) of a batch. Raises ValueError with the number of a bad line."""
        ...


class Joined:
    """Several sources, one after the other. Their records are read part by part, since each has a schema of its own."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts = parts
        self.spec = joined_spec([part.spec for part in parts])
        self.files: Sequence[Path] = [file for part in parts for file in part.files]

    @property
    def sha256(self) -> str:
        """Hash of the digests of the parts; known, like `Source.sha256`, once all have been read."""
        return hashlib.sha256("".join(part.sha256 for part in self.parts).encode()).hexdigest()


def parts_of(source: Source | Joined) -> Sequence[Source]:
    return source.parts if isinstance(source, Joined) else (source,)


def joined_spec(spec: str | Sequence[str]) -> str:
    """Value of `data.train` and its like in messages and records of a run."""
    return spec if isinstance(spec, str) else ", ".join(spec)


def open_sources(spec: str | Sequence[str]) -> Source | Joined:
    """Open one source, or several whose records follow each other. ValueError as `open_source`."""
    parts = [open_source(one) for one in ((spec,) if isinstance(spec, str) else spec)]
    return parts[0] if len(parts) == 1 else Joined(parts)


def open_source(spec: str) -> Source:
    """Open a `.jsonl` file, a `.parquet` file or a Hugging Face dataset. Nothing is read of files.
    A dataset is `name` (its "train" split) or `name:subset:split` (an empty subset means the default one). Raises ValueError,
    one line, for a missing or unreadable source."""
    path = find_file(spec)
    if path is None:
        return HubDataset(spec)
    return JsonLines(spec) if path.suffix == ".jsonl" else Parquet(spec)


def find_file(spec: str) -> Path | None:
    """File that a source names; None for a Hugging Face dataset, whose name alone is checked. Raises ValueError as
    `open_source`."""
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


class JsonLines:
    """Lines of a .jsonl file, one record each, without blank lines. Kept as text, since a column of Arrow has one type."""

    choice = sha256 = ""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.files: Sequence[Path] = (Path(spec),)

    def batches(self) -> Iterator[Any]:
        digest, lines, numbers = hashlib.sha256(), [], []
        with self.files[0].open("rb") as file:
            # Lines of bytes end at \n only: str.splitlines would also split at U+2028, which JSON strings may hold.
            for number, line in enumerate(file, start=1):
                line = (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).strip()
                if line:
                    digest.update(line + b"\n")
                    lines.append(line)
                    numbers.append(number)
                if len(lines) == BLOCK:
                    yield line_batch(lines, numbers)
                    lines, numbers = [], []
        if lines:
            yield line_batch(lines, numbers)
        self.sha256 = digest.hexdigest()

    @staticmethod
    def records(spec: str, batch: Any) -> Iterator[tuple[Record, int | None]]:
        for line, number in zip(batch.column("line").to_pylist(), batch.column("number").to_pylist()):
            record = _parse_line(spec, number, line)
            yield (_absent(record, deep=False) if b"null" in line else record), number


def line_batch(lines: Sequence[bytes], numbers: Sequence[int | None]) -> Any:
    """Batch of JSON texts with the numbers of their lines, from 1."""
    import pyarrow

    columns = {"line": pyarrow.array(lines, pyarrow.large_binary()), "number": pyarrow.array(numbers, pyarrow.int64())}
    return pyarrow.RecordBatch.from_pydict(columns)


def _parse_line(spec: str, number: int, line: bytes) -> Record:
    where = f"{spec} line {number}"
    try:
        record = parse_object(line, where, finite=True, parse_float=Written)
        _require_flat(record, line)
    except NestedTooDeeply:
        raise ValueError(f"{where} is nested more than {MAX_DEPTH} levels deep") from None
    return record


def _require_flat(record: Any, line: bytes) -> None:
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


def _absent(value: Any, deep: bool) -> Any:
    """The value without null keys of chat messages: templates ask `'name' in message`, and a column of structs pads each message
    with the keys of all others. deep: without those of objects in messages too, which are padding in a column, but not in JSON."""
    if isinstance(value, dict):
        return {key: _absent(one, deep) for key, one in value.items()}
    if not isinstance(value, list) or not value or not isinstance(value[0], (dict, list)):
        return value
    if all(isinstance(one, dict) and "role" in one and "content" in one for one in value):
        return [_filled(one) if deep else {key: part for key, part in one.items() if part is not None} for one in value]
    return [_absent(one, deep) for one in value]


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _filled(one) for key, one in value.items() if one is not None}
    return [_filled(one) for one in value] if isinstance(value, list) else value


class _Arrow:
    """Records of Arrow tables, which keep every type that JSON lacks."""

    sha256 = ""

    @staticmethod
    def records(spec: str, batch: Any) -> Iterator[tuple[Record, int | None]]:
        narrow = [field for field in batch.schema if _NARROW.search(str(field.type))]
        padded = [field.name for field in batch.schema if "role: " in str(field.type)]  # columns that may hold messages
        for record in batch.to_pylist():
            for field in narrow:
                record[field.name] = _decimal(record[field.name], field.type)
            for name in padded:
                record[name] = _absent(record[name], deep=True)
            yield record, None


_NARROW = re.compile(r"\b(?:half)?float\b")


def _decimal(value: Any, kind: Any) -> Any:
    """The double that a float of 32 or 16 bits was written as: 0.1, not 0.10000000149011612. Lists, which may be long, stay."""
    import pyarrow

    if pyarrow.types.is_struct(kind) and value is not None:
        return {field.name: _decimal(value[field.name], field.type) for field in kind}
    if value is None or not (pyarrow.types.is_float32(kind) or pyarrow.types.is_float16(kind)):
        return value
    return float(str(kind.to_pandas_dtype()(value)))


class Parquet(_Arrow):
    """Rows of a .parquet file."""

    choice = ""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.files: Sequence[Path] = (Path(spec),)

    def batches(self) -> Iterator[Any]:
        import pyarrow  # slow to import
        from pyarrow import parquet

        try:
            with self.files[0].open("rb") as stream:
                self.sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
                for batch in parquet.ParquetFile(stream).iter_batches(BLOCK):
                    yield _plain(batch)
        except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise ValueError(f"{self.spec} cannot be read as parquet: {first_line(error)}") from error


class HubDataset(_Arrow):
    """Rows of a Hugging Face dataset, loaded (and downloaded if need be) by the constructor."""

    def __init__(self, spec: str) -> None:
        self.spec = self.choice = spec  # the files of a split are those of its slices too
        self._dataset = _load_dataset(spec)
        self.files: Sequence[Path] = tuple(Path(file["filename"]) for file in self._dataset.cache_files)

    def batches(self) -> Iterator[Any]:
        digest = hashlib.sha256()
        for table in self._dataset.with_format("arrow").iter(BLOCK):
            [batch] = table.combine_chunks().to_batches()
            for record in batch.to_pylist():
                digest.update(json.dumps(record, sort_keys=True, default=repr).encode() + b"\n")
            yield _plain(batch)
        self.sha256 = digest.hexdigest()


def _plain(batch: Any) -> Any:
    import pyarrow

    # A file has one dictionary, and batches differ in theirs: values instead. The notes of pandas are dropped.
    is_dictionary = pyarrow.types.is_dictionary
    fields = [field.with_type(field.type.value_type) if is_dictionary(field.type) else field for field in batch.schema]
    return batch.cast(pyarrow.schema(fields))


def _load_dataset(spec: str) -> Any:
    name, subset, split = _dataset_parts(spec)
    import datasets  # slow to import
    from datasets.exceptions import DatasetsError

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
