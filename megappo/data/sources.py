"""Records from files and Hugging Face datasets. `prompts.py` and `demonstrations.py` interpret them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megappo.error_text import first_line

Record = dict[str, Any]

MAX_DEPTH = 100  # of a record's objects and lists; the reader of JSON ends at Python's recursion limit, some 900 levels
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """Records of a source, in order. lines: of a .jsonl file, from 1.

    sha256: of a .parquet file's bytes, of a dataset's records, or of a .jsonl file's lines, each ended by a newline: that of the
    file itself, unless it has ends of lines as on Windows, a byte order mark or blank lines, which change no record.
    """

    records: list[Record]
    sha256: str
    lines: list[int] | None = None


def read_source(spec: str) -> Source:
    """Read all records of a `.jsonl` file, a `.parquet` file or a Hugging Face dataset, in order.

    A dataset is `name` (its "train" split) or `name:subset:split` (an empty subset means the default one). ValueError, one line,
    for a missing or malformed source; a bad line of a .jsonl file is named by its number.
    """
    path = Path(spec)
    if path.suffix in (".jsonl", ".parquet"):
        if not path.is_file():
            raise ValueError(f"data file {spec} {'is a directory' if path.is_dir() else 'does not exist'}")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(f"data file {spec} cannot be read: {error.strerror}") from error
        # Hashing takes 1 s per GB, of the 10 s and more that reading the records takes.
        if path.suffix == ".parquet":
            return Source(_parse_parquet(path, content), hashlib.sha256(content).hexdigest())
        lines, sha256 = _parse_jsonl(path, content)
        return Source(list(lines.values()), sha256, list(lines))
    if path.exists():
        raise ValueError(f"data source {spec} is neither a .jsonl nor a .parquet file")
    records = _read_dataset(spec)
    return Source(records, _hash_records(records))


def _parse_jsonl(path: Path, content: bytes) -> tuple[dict[int, Record], str]:
    """Line number -> record, without blank lines, and the SHA-256 of these lines."""
    records: dict[int, Record] = {}
    digest = hashlib.sha256()
    # Split bytes at \n only: str.splitlines would also split at U+2028, which JSON strings may hold.
    for number, line in enumerate(content.removeprefix(_BYTE_ORDER_MARK).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
            _require_flat(record, line)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} line {number} is not valid JSON: byte {error.start} is not UTF-8; save it as UTF-8"
            ) from error
        except RecursionError:
            raise ValueError(f"{path} line {number} is nested more than {MAX_DEPTH} levels deep") from None
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not valid JSON: {first_line(error)}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path} line {number} is a JSON {type(record).__name__}, not an object")
        records[number] = record
        digest.update(line.strip() + b"\n")
    return records, digest.hexdigest()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")


def _require_flat(record: Any, line: bytes) -> None:
    """RecursionError for a record nested deeper than MAX_DEPTH."""
    if line.count(b"[") + line.count(b"{") <= MAX_DEPTH:  # nearly every line
        return
    level = [record]
    for _ in range(MAX_DEPTH):
        level = [item for value in level if isinstance(value, (dict, list)) for item in _items(value)]
        if not level:
            return
    raise RecursionError


def _items(value: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else list(value)


def _parse_parquet(path: Path, content: bytes) -> list[Record]:
    # An optional package, and slow to import.
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(pyarrow.BufferReader(content)).to_pylist()
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as parquet: {first_line(error)}") from error


def _hash_records(records: Sequence[Record]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


def _read_dataset(spec: str) -> list[Record]:
    name, subset, split = _dataset_parts(spec)
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ValueError(
            f"data source {spec} is a Hugging Face dataset, which needs the datasets package: pip install datasets"
        ) from error

    try:
        return datasets.load_dataset(name, subset, split=split).to_list()
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
