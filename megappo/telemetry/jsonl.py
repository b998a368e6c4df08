"""Files of one JSON object per line; `metrics.jsonl` of a run survives crashes and resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megappo.telemetry.metrics import finite_or_none


def dump_line(record: Mapping[str, Any]) -> str:
    """Encode one line of valid JSON; non-finite numbers become null."""
    return json.dumps(finite_or_none(dict(record)), allow_nan=False, ensure_ascii=False) + "\n"


def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file atomically: a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(dump_line(record) for record in records), encoding="utf-8")
    os.replace(partial, path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read all records. A last line torn by a crash is left out; any other broken line raises ValueError with its number."""
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):  # without its line break: torn by a crash
                break
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg}); delete or repair this line") from error
    return records


class MetricsFile:
    """Append one record per step; a crash loses at most the line being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def truncate_after(self, step: int) -> None:
        """Drop the records after `step`. Call it before the first append of a resumed run."""
        assert self._file is None, "truncate_after comes before the first append"
        # The resumed run logs these steps again.
        kept = [record for record in read_lines(self.path) if record["step"] <= step] if self.path.exists() else []
        write_lines(self.path, kept)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record with an integer `step`."""
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(dump_line(record))
        self._file.flush()  # to the system, which writes it even if this process is killed

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
