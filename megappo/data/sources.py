"""Records from files and Hugging Face datasets. `prompts.py` and `demonstrations.py` interpret them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]

_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_records(spec: str) -> list[Record]:
    """Read all records of a `.jsonl` file, a `.parquet` file or a Hugging Face dataset, in order.

    A dataset is `name` (its "train" split) or `name:subset:split` (an empty subset means the default one). ValueError, one line,
    for a missing or malformed source; a bad line of a .jsonl file is named by its number.
    """
    path = Path(spec)
    if path.suffix in (".jsonl", ".parquet"):
        if not path.is_file():
            raise ValueError(f"data file {spec} does not exist")
        return list(_read_jsonl(path)) if path.suffix == ".jsonl" else _read_parquet(path)
    if path.exists():
        raise ValueError(f"data source {spec} is neither a .jsonl nor a .parquet file")
    return _read_dataset(spec)


def _read_jsonl(path: Path) -> Iterator[Record]:
    # Split bytes at \n only: str.splitlines would also split at U+2028, which JSON strings may hold.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not valid JSON: {str(error).splitlines()[0]}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path} line {number} is a JSON {type(record).__name__}, not an object")
        yield record


def _read_parquet(path: Path) -> list[Record]:
    # An optional package, and slow to import.
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from error


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
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"cannot load the Hugging Face dataset {spec}: {reason}; for a local file give a .jsonl or .parquet path"
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
