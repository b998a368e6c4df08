"""Read a run directory: the state of the run (lease.json, ended.json), last step (metrics.jsonl), last
checkpoint and size on disk.

Reads only. A file that cannot be read is a fault of its run and hides no other run. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import BEST, MANIFEST
from megappo.config.errors import ConfigError
from megappo.config.run_directory import CHECKPOINTS, ENDED, LAUNCHES, METRICS
from megappo.runtime.ending import CONFIG, Ended, Outcome, read_end
from megappo.runtime.lease import LEASE, LeaseRecord, read_lease
from megappo.telemetry.jsonl import read_lines
from megappo.telemetry.metrics import Metric, nearest_name

State = Literal["running", "finished", "stopped", "failed", "died", "submitted", "unknown"]
# A line of metrics has about 3 KiB: the last whole one is within this many bytes of the end.
TAIL_BYTES = 1 << 16
# Our records have a few KiB; a larger file is not one.
MOST_BYTES = 1 << 20
# By a pattern of the text that `config/dump.py` writes: YAML takes 10 ms a file, a second for a hundred runs.
_TOTAL = re.compile(r"^trainer:\n(?:  .*\n)*?  steps: (\d{1,18})$", re.MULTILINE)
# Everything that a damaged or forged file makes the readers raise: a record that lacks a field, numbers of thousands of digits,
# JSON nested thousands deep.
BROKEN = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
LATEST_TIME = 1e11  # epoch seconds, in the year 5138: later ones have no calendar date on every platform

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """The newest complete checkpoint; its sizes are checked, its contents not."""

    step: int
    time: float  # when it was committed, epoch seconds
    bytes: int
    weights_only: bool  # saved by `checkpoint.save_only_model`: nothing to resume from
    best: Mapping[str, Any] | None = None  # {step, metric, mode, value} of the run's best step, which has a checkpoint too


@dataclass(frozen=True)
class Run:
    """One run directory."""

    path: Path
    state: State
    lease: LeaseRecord | None
    ended: Ended | None
    step: int | None  # last of metrics.jsonl
    total_steps: int | None  # None if it follows from the data
    checkpoint: Checkpoint | None
    bytes: int  # on disk
    faults: tuple[str, ...]  # one line per unreadable file


def find_runs(directory: Path) -> list[Path]:
    """List run directories right below `directory`, or `directory` itself if it is one. Raises ConfigError, one
    line, without any."""
    try:
        if any((directory / name).is_file() for name in (CONFIG, METRICS, LEASE, ENDED)):
            return [directory]
        found = sorted(path for path in directory.iterdir() if path.is_dir() and _looks_like_a_run(path))
    except OSError as error:  # missing, a file, without permission, a name that is too long
        fix = "name the directory that holds the runs (run.output_dir), or one run in it"
        raise ConfigError(f"{directory}: {error.strerror}; {fix}") from None
    if not found:
        what = f"no directory with {CONFIG}, {METRICS} or {CHECKPOINTS}/ in it"
        raise ConfigError(f"{directory} holds no run ({what}); name the directory that holds the runs (run.output_dir)")
    return found


def _looks_like_a_run(path: Path) -> bool:
    """True if the directory holds a name that a run writes."""
    try:
        return not {CONFIG, METRICS, CHECKPOINTS, LEASE, ENDED, LAUNCHES}.isdisjoint(os.listdir(path))
    except OSError:
        return True  # unreadable: its row says so


def read_run(path: Path) -> Run:
    """Read one run directory. Raises nothing for its files: what cannot be read is in `faults`."""
    faults: list[str] = []

    def attempt(what: str, read: Callable[[Path], T | None]) -> T | None:
        try:
            return read(path)
        except BROKEN as error:
            faults.append(f"{what}: {_said(error)}")
            return None

    names = attempt("directory", lambda run_dir: set(os.listdir(run_dir)))
    if names is None:
        return Run(path, "unknown", None, None, None, None, None, 0, tuple(faults))
    lease, ended = attempt(LEASE, _read_holder), attempt(ENDED, _read_ended)
    checkpoint, damaged = attempt(CHECKPOINTS, _newest) or (None, [])
    faults += damaged
    lives = lease is not None and attempt(LEASE, lambda _: lease.is_alive()) is True
    is_submitted = {name for name in names if not name.startswith(".")} == {LAUNCHES}
    state: State = "running" if lives else _state_at_rest(lease, ended, is_submitted=is_submitted)
    step, total = attempt(METRICS, _last_step), attempt(CONFIG, _total_steps)
    size = attempt("size", lambda run_dir: sum(_sizes(str(run_dir)))) or 0
    return Run(path, state, lease, ended, step, total, checkpoint, size, tuple(faults))


def _said(error: BaseException) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)


def _state_at_rest(lease: LeaseRecord | None, ended: Ended | None, *, is_submitted: bool) -> State:
    """State of a run that no process holds. lease: left by the last holder if it was killed."""
    # An end that is older than the lease is that of an earlier start.
    if ended is not None and (lease is None or ended.time >= lease.since):
        return ended.outcome
    if lease is not None:
        return "died"
    return "submitted" if is_submitted else "unknown"


def _read_text(path: Path, last: int | None = None) -> str | None:
    """Read a small file, or its `last` bytes; None without a file. Raises ValueError if it is not a plain file or not small."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(facts.st_mode):  # opening a pipe would wait for its writer
        raise ValueError("is not a file")
    if last is None and facts.st_size > MOST_BYTES:
        raise ValueError(f"has {facts.st_size} bytes, and a record a few thousand")
    with path.open("rb") as file:
        if last is not None and facts.st_size > last:
            file.seek(-last, os.SEEK_END)
        return file.read().decode("utf-8", errors="replace")


def _read_holder(run_dir: Path) -> LeaseRecord | None:
    if _read_text(run_dir / LEASE) is None:
        return None
    lease = read_lease(run_dir)
    if lease is not None:
        _check_times(lease.since, lease.beat)
    return lease


def _read_ended(run_dir: Path) -> Ended | None:
    if _read_text(run_dir / ENDED) is None:
        return None
    ended = read_end(run_dir)
    if ended is None:
        raise ValueError("it is not a record of megappo")
    if ended.outcome not in get_args(Outcome):
        raise ValueError(f"outcome {ended.outcome!r} is not one of {', '.join(get_args(Outcome))}")
    _check_times(ended.time)
    return ended


def _check_times(*times: float) -> None:
    wrong = [time for time in times if not 0 <= time < LATEST_TIME]
    if wrong:
        raise ValueError(f"{wrong[0]} is no time in epoch seconds")


def _last_step(run_dir: Path) -> int | None:
    text = _read_text(run_dir / METRICS, last=TAIL_BYTES)
    # A line without its end is being written, or was when the process was killed.
    lines = text.split("\n")[:-1] if text else []
    if not lines:
        if text:
            raise ValueError(f"no whole line in its last {TAIL_BYTES} bytes")
        return None
    step = json.loads(lines[-1]).get("step")
    if type(step) is not int:
        raise ValueError("its last line has no step")
    return step


def _total_steps(run_dir: Path) -> int | None:
    found = _TOTAL.search(_read_text(run_dir / CONFIG) or "")
    return int(found[1]) if found else None


def _newest(run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest complete checkpoint, and faults of newer ones."""
    directory, faults = CheckpointDirectory(run_dir / CHECKPOINTS), []
    for step in directory.steps():
        place = directory.step_path(step)
        try:
            manifest = directory.read(step)
            time = (place / MANIFEST).stat().st_mtime
            return Checkpoint(step, time, manifest.total_bytes, manifest.model_only, manifest.facts.get(BEST)), faults
        except BROKEN as error:
            # Retention of a live run removes checkpoints while they are read.
            if place.exists():
                faults.append(f"{place.name}: {_said(error)}")
    return None, faults


def _sizes(folder: str) -> Iterator[int]:
    """Yield the bytes on disk of every file below; links are not followed."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(entry.path)
                else:
                    yield entry.stat(follow_symlinks=False).st_blocks * 512  # POSIX's unit, whatever the file system's is
    except FileNotFoundError:  # a live run has removed it meanwhile
        return


Rows = Mapping[int, Mapping[str, Any]]  # step -> metric -> value as logged; None where it was not finite


def read_rows(run_dir: Path) -> Rows:
    """Read all rows; of a step logged twice the later values count. Raises ConfigError, one line: no run, or nothing logged."""
    path = run_dir / METRICS
    try:
        records = read_lines(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name the directory of a run (run.output_dir/run.name)") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8; it is not a file of megappo") from None
    rows: dict[int, dict[str, Any]] = {}
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise ConfigError(f"{path}, record {number}: has no step; it is not a line of megappo")
        values = {name: value for name, value in record.items() if "/" in name}
        rows.setdefault(record["step"], {}).update(values)  # an evaluation may have a line of its own
    if not rows:
        raise ConfigError(f"{path}: has no line yet; the run has logged no step")
    return rows


def logged_names(rows: Rows) -> set[str]:
    return {name for row in rows.values() for name in row}


def is_known(metric: str, logged: Collection[str]) -> bool:
    """True if a metric was logged or is one that megappo logs."""
    return metric in logged or (metric in set(Metric) and "*" not in metric)


def nearest_hint(metric: str, logged: Collection[str]) -> str:
    """Return `; did you mean NAME?` for an unknown metric, or nothing."""
    nearest = nearest_name(metric, sorted(logged))
    return f"; did you mean {nearest}?" if nearest else ""


def finite(value: Any) -> float | None:
    """Convert to a number; None if it is none or not finite."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def step_text(run: Run) -> str:
    """Format the last step of a run and, if it is known, the number of its steps: `40/200`."""
    return f"{'-' if run.step is None else run.step}" + ("" if run.total_steps is None else f"/{run.total_steps}")


def value_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
