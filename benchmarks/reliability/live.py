"""A live `megappo train`, followed from outside: progress by metrics.jsonl, what it says by a pipe, ranks by their notes."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.telemetry.jsonl import read_lines

Found = TypeVar("Found")
POLL_S = 0.05


@dataclass(frozen=True)
class Row:
    """A step that was logged. time: seconds since the epoch, at its end. seconds: of the step. skipped: updates left out."""

    step: int
    time: float
    seconds: float
    skipped: float


class LiveRun:
    """The command, its ranks and its progress. rows: every step ever logged, repeated ones too, in the order of their times.

    lines: what the command and its ranks have printed, with the time at which it was read; all of it goes to `log` too.
    notes: folder in which the ranks leave their process ids.
    """

    def __init__(self, command: Sequence[str], run_dir: Path, environment: Mapping[str, str], log: Path, notes: Path) -> None:
        self.run_dir, self.log, self._notes = run_dir, log, notes
        self.checkpoints = CheckpointDirectory(run_dir / "checkpoints")
        self.rows: list[Row] = []
        self.lines: list[tuple[float, str]] = []
        self._command, self._environment = list(command), dict(environment)
        self._process: subprocess.Popen[str] | None = None
        self._seen: tuple[int, int] | None = None

    # ------------------------------------------------------------------------------------------------------ the command

    def start(self, *, resume: bool = False) -> float:
        """Start the command; returns the time."""
        started = time.time()
        self._process = subprocess.Popen(
            [*self._command, *(["--resume"] if resume else [])],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._read_output, args=(self._process,), daemon=True).start()
        return started

    @property
    def launcher(self) -> psutil.Process:
        assert self._process is not None, "started"
        return psutil.Process(self._process.pid)

    @property
    def exit_code(self) -> int | None:
        """Of the command that was started last; None while it runs."""
        assert self._process is not None, "started"
        return self._process.poll()

    def close(self) -> None:
        """Kill what is left of the command and of its ranks."""
        if self._process is None:
            return
        left = list(self.ranks().values())
        if self._process.poll() is None:
            left += self.launcher.children(recursive=True)
        self._process.kill()
        for process in left:
            kill(process)
        self._process.wait()

    def _read_output(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with self.log.open("a", encoding="utf-8") as log:
            for line in process.stdout:
                self.lines.append((time.time(), line.rstrip("\n")))
                log.write(line)
                log.flush()

    # ------------------------------------------------------------------------------------------------------- processes

    def ranks(self) -> dict[int, psutil.Process]:
        """Ranks that have taken an optimizer step and still run; see own_faults.py."""
        found = {}
        for path in self._notes.glob("rank-*"):
            number = path.name.removeprefix("rank-")
            with contextlib.suppress(psutil.NoSuchProcess, ValueError, OSError):  # gone; or being replaced
                if number.isdigit() and not is_gone(process := psutil.Process(int(path.read_text()))):
                    found[int(number)] = process
        return found

    def writers(self, rank: int) -> list[psutil.Process]:
        """Processes that write the checkpoints of a rank in the background."""
        return [child for child in self.ranks()[rank].children() if "checkpoint writer" in child.cmdline()]

    # -------------------------------------------------------------------------------------------------------- progress

    def poll(self) -> None:
        """Read the rows that are new."""
        path = self.run_dir / "metrics.jsonl"
        try:
            state = path.stat()
        except FileNotFoundError:
            return
        if self._seen == (state.st_ino, state.st_size):
            return
        self._seen = (state.st_ino, state.st_size)
        known = {(row.step, row.time) for row in self.rows}
        for record in read_lines(path):
            if record["step"] > 0 and (record["step"], record["time"]) not in known:
                skipped = (record.get("policy/skipped_updates") or 0.0) + (record.get("critic/skipped_updates") or 0.0)
                self.rows.append(Row(record["step"], record["time"], record.get("timing/step_s", 0.0), skipped))

    def watch(self, found: Callable[[], Found | None], limit_s: float) -> Found | None:
        """Follow the run until `found` returns something that is not None or False, or `limit_s` seconds are over (None)."""
        deadline = time.monotonic() + limit_s
        while True:
            self.poll()
            result = found()
            if result is not None and result is not False:
                return result
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)

    @property
    def step(self) -> int:
        """Step that was logged last, 0 before the first."""
        return self.rows[-1].step if self.rows else 0

    def first_row_after(self, moment: float) -> Row | None:
        return next((row for row in self.rows if row.time > moment), None)

    def first_line_after(self, moment: float, text: str) -> float | None:
        """Time of the first printed line with this text after `moment`."""
        return next((when for when, line in self.lines if when > moment and text in line), None)


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def is_gone(process: psutil.Process) -> bool:
    """True if the process has ended; one that nobody has waited for yet (a zombie) has."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
