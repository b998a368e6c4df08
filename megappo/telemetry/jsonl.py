"""Files of one JSON object per line; `metrics.jsonl` survives crashes, resumes and full disks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.telemetry.metrics import finite_or_none

LONGEST_LINE = 1 << 16  # bytes of a line of metrics: some 100 names and numbers are 4 KiB


def dump_line(record: Mapping[str, Any]) -> bytes:
    """Encode one line of valid JSON in UTF-8; non-finite numbers become null, a lone surrogate its escape."""
    text = json.dumps(finite_or_none(dict(record)), allow_nan=False, ensure_ascii=False)
    # A lone surrogate has no UTF-8. Python's escape of it, \ud800, is JSON's too, and outside of strings there is none.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader never sees half of it, and a failure leaves the old file and nothing else."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk, its half is room for others
        raise


def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file atomically by these records."""
    replace_file(path, b"".join(map(dump_line, records)))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read all records. A last line torn by a crash is left out; any other broken line raises ValueError with its number."""
    return read_whole_lines(path)[0]


def read_whole_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Read records as `read_lines` does; also True if a torn last line was left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):  # without its line break: torn by a crash
                return records, True
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg}); delete or repair this line") from error
    return records, False


class MetricsFile:
    """Appends one record per step; a crash or a full disk loses at most the record being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def truncate_after(self, step: int) -> None:
        """Drop the records after `step`. Call it before the first append of a resumed run."""
        assert self._descriptor is None, "truncate_after comes before the first append"
        # The resumed run logs these steps again.
        kept = [record for record in read_lines(self.path) if record["step"] <= step] if self.path.exists() else []
        write_lines(self.path, kept)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record with an integer `step`. OSError if it cannot be written; then the file is as before."""
        line = dump_line(record)
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._drop_torn_line()
        try:
            # Unbuffered: in the system once this returns, which writes it even if this process is killed.
            written = os.write(self._descriptor, line)
            while written < len(line):  # the disk took a part; the next write says why
                written += os.write(self._descriptor, line[written:])
        except OSError:
            with contextlib.suppress(OSError):  # or the next append does it
                self._drop_torn_line()
            raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _drop_torn_line(self) -> None:
        assert self._descriptor is not None
        end = os.fstat(self._descriptor).st_size
        start = max(0, end - LONGEST_LINE)
        whole = start + os.pread(self._descriptor, end - start, start).rfind(b"\n") + 1
        if whole < end:
            os.ftruncate(self._descriptor, whole)
