"""A tracker in a helper process of this rank (`process.py`): what blocks, hangs or dies there costs records and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from megappo.config.run_sections import TelemetryConfig
from megappo.runtime.helpers import deaf_to_stop
from megappo.telemetry.trackers.base import Histogram, Status

MAX_WAITING = 256  # records: some 80 steps with histograms, of a few KiB each
MAX_STARTS = 4  # of the process in one run

# Defaults for the libraries in the helper: no reports to their makers, and an end to waiting for a server that is down.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "WANDB_ERROR_REPORTING": "false",
}


class TrackerError(OSError):
    """A record that a tracker could not take."""


class Reply(NamedTuple):
    """kind: `lost`, with the reason, or `note`, with a line for the user."""

    kind: str
    text: str


class HelperTracker:
    """Tracker `name` of `process.TRACKERS`, for the run in `root`.

    A call appends a record to a bounded queue and returns; TrackerError if the queue is full or the process has ended too often.
    `replies` hands back what the process said meanwhile. telemetry: with `experiment` set.
    """

    def __init__(self, name: str, root: Path, telemetry: TelemetryConfig, max_waiting: int = MAX_WAITING) -> None:
        self.name = name
        self._root, self._telemetry, self._max_waiting = root, telemetry, max_waiting
        self._opening: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._replies: deque[Reply] = deque()
        self._reader: threading.Thread | None = None

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> None:
        self._opening = {
            "do": "start",
            "root": str(self._root),
            "telemetry": self._telemetry.model_dump(mode="json"),
            "config": config,
            "resumed_step": resumed_step,
        }
        self._start_process()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._send({"do": "metrics", "step": step, "values": values})

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._send({"do": "histograms", "step": step, "histograms": {name: asdict(h) for name, h in histograms.items()}})

    def text(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._send({"do": "text", "step": step, "name": name, "rows": rows})

    def finish(self, status: Status) -> None:
        """Ask for the end; `wait` waits for it."""
        if self._process is not None and self._process.poll() is None:
            self._append({"do": "finish", "status": status})

    def wait(self, limit_s: float) -> None:
        """Wait for the process to end; after `limit_s` seconds it is killed. TrackerError if records were lost by that."""
        if self._process is None:
            return
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise TrackerError(
                f"{self.name} did not finish within {limit_s:g} s and was ended; {len(self._waiting)} records were waiting"
            ) from None
        finally:
            if self._reader is not None:
                self._reader.join(1.0)
        if code != 0:
            raise TrackerError(f"its process ended with code {code}")

    def replies(self) -> list[Reply]:
        """Replies of the process since the last call."""
        return [self._replies.popleft() for _ in range(len(self._replies))]

    # ---------------------------------------------------------------------------------------------------------- process

    def _send(self, record: Mapping[str, Any]) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start_process()
        if len(self._waiting) >= self._max_waiting:
            raise TrackerError(f"{self.name} is too slow: {len(self._waiting)} records are waiting")
        self._append(record)

    def _append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False).encode("utf-8") + b"\n"  # ASCII: half a surrogate pair is its escape
        with self._changed:
            self._waiting.append(line)
            self._changed.notify()

    def _start_process(self) -> None:
        """Start the process and its two threads; TrackerError if it has ended too often."""
        if self._num_starts >= MAX_STARTS:
            raise TrackerError(f"its process has ended {MAX_STARTS} times")
        self._num_starts += 1
        command = [sys.executable, "-P", "-m", "megappo.telemetry.trackers.process", self.name, str(os.getpid())]
        with deaf_to_stop():  # a request to stop is the rank's: the records of its last step are yet to come
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**ENVIRONMENT, **os.environ}
            )
        self._waiting.clear()
        self._append(self._opening)
        threading.Thread(target=self._write, args=(process,), daemon=True, name=f"{self.name} records").start()
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True, name=f"{self.name} replies")
        self._reader.start()

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        """Hand the waiting records to the process as fast as it takes them, until it ends."""
        assert process.stdin is not None
        while process is self._process:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting, timeout=1.0)
                line = self._waiting.popleft() if self._waiting else b""
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except (OSError, ValueError):  # it has ended; the next record starts another
                if line:
                    self._replies.append(Reply("lost", "its process has ended"))
                return

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._replies.extend(Reply(kind, text) for kind, text in json.loads(line).items())
