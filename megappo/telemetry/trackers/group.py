"""The trackers of a run: every record goes to each of them, and a failure of one costs that tracker's record. A tracker whose
calls may wait for a network has a thread of this process, so that a call that hangs holds no step. What its library sends later
is its own affair: W&B has a service, MLflow retries its requests."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megappo.config.redaction import hide_secrets
from megappo.config.run_sections import TelemetryConfig
from megappo.runtime.messages import first_line
from megappo.telemetry.side_work import SideWork
from megappo.telemetry.trackers.base import Histogram, Status, Tracker
from megappo.telemetry.trackers.mlflow_run import Mlflow
from megappo.telemetry.trackers.wandb_run import Wandb, end_service

FINISH_S = {"finished": 60.0, "stopped": 15.0, "failed": 5.0}
"""Seconds to wait for a tracker at the end; after a request to stop, the job has little time left."""

MAX_WAITING = 256  # records: some 80 steps with histograms, of a few KiB each


class TrackerError(OSError):
    """A record that a tracker could not take."""


class BackgroundTracker:
    """Runs tracker `name` in a daemon thread, in the order of the calls. A call appends to a bounded queue and returns.
    TrackerError if the queue is full, or once the tracker has raised, which switches it off. A process that ends without `finish`
    closes the run as failed. abandon: ends what the library has started if `finish` does not return."""

    def __init__(
        self, name: str, tracker: Tracker, abandon: Callable[[], None] = lambda: None, max_waiting: int = MAX_WAITING
    ) -> None:
        self.name = name
        self._tracker, self._abandon = tracker, abandon
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(max_waiting)
        self._reason: str | None = None
        self._limit_s: float | None = None  # seconds to wait for the end, once `finish` was called
        self._thread = threading.Thread(target=self._serve, daemon=True, name=f"tracker {name}")

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> None:
        self._start = partial(self._tracker.start, config, resumed_step)
        atexit.register(self._at_exit)
        self._thread.start()
        self._put(self._start)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._put(partial(self._tracker.metrics, step, values))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._put(partial(self._tracker.histograms, step, histograms))

    def text(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._put(partial(self._tracker.text, step, name, rows))

    def finish(self, status: Status) -> None:
        """Ask for the end; `wait` waits for it."""
        self._limit_s = FINISH_S[status]
        if self._reason is None:
            self._put(partial(self._tracker.finish, status))
            self._put(None)

    def wait(self) -> None:
        """Wait for the end, at most FINISH_S. TrackerError if records were lost meanwhile."""
        self._thread.join(self._limit_s)
        if self._thread.is_alive():
            self._abandon()
            left = f"{self._waiting.qsize()} calls were waiting"
            raise TrackerError(f"{self.name} did not finish within {self._limit_s:g} s and was left; {left}")
        if self._reason is not None:
            raise TrackerError(self._reason)

    def _put(self, call: Callable[[], None] | None) -> None:
        if self._reason is not None:
            raise TrackerError(f"{self._reason}; it is switched off")
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            raise TrackerError(f"{self.name} is too slow: {self._waiting.qsize()} records are waiting") from None

    def _serve(self) -> None:
        while (call := self._waiting.get()) is not None:
            try:
                call()
            except Exception as error:  # no network, a wrong key, a service that has died: whatever a library raises
                self._reason = hide_secrets(first_line(error, kind=True))
                return
            if call is self._start:  # which has registered exit handlers of the library, and this one has to come before them
                atexit.unregister(self._at_exit)
                atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        """Close the run of a rank that has failed, after its traceback."""
        if self._limit_s is None:
            with contextlib.suppress(TrackerError):
                self.finish("failed")
                self.wait()


logger = logging.getLogger(__name__)


class Trackers:
    """Trackers by name, started by the first record. config: of the run, without secrets. Nothing is raised."""

    def __init__(self, trackers: Mapping[str, Tracker], config: Mapping[str, Any], side_work: SideWork) -> None:
        self._trackers, self._config, self._side_work = trackers, config, side_work
        self._resumed_step: int | None = None
        self._started = False

    def resume_after(self, step: int) -> None:
        """Tell the trackers, at their start, that the records after `step` come again."""
        self._resumed_step = step

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send the finite values; others leave a gap in the curve."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._each(lambda tracker: tracker.metrics(step, finite))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._each(lambda tracker: tracker.histograms(step, histograms))

    def text(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._each(lambda tracker: tracker.text(step, name, rows))

    def finish(self, status: Status) -> None:
        """Ask every tracker that was started to close the run."""
        if self._started:
            self._each(lambda tracker: tracker.finish(status))

    def wait(self) -> None:
        """Wait for the trackers in the background, at most FINISH_S for each."""
        for name, tracker in self._trackers.items():
            if self._started and isinstance(tracker, BackgroundTracker):
                self._side_work.run(name, tracker.wait)

    def _each(self, action: Callable[[Tracker], None]) -> None:
        if not self._started:
            self._started = True
            for name, tracker in self._trackers.items():
                self._side_work.run(name, lambda: tracker.start(self._config, self._resumed_step))
        for name, tracker in self._trackers.items():
            self._side_work.run(name, lambda: action(tracker))


def make_trackers(telemetry: TelemetryConfig, run_name: str, root: Path) -> dict[str, Tracker]:
    """Make the trackers that a configuration names, not started, for the run in `root`."""
    from megappo.telemetry.trackers.tensorboard import TensorBoard  # torch's writer is slow to import

    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(root / "tensorboard"),  # its library has a thread of its own
        "wandb": lambda: BackgroundTracker("wandb", Wandb(root, run_name, logger.info), end_service),
        "mlflow": lambda: BackgroundTracker("mlflow", Mlflow(root, run_name, logger.info)),
    }
    return {name: makers[name]() for name in telemetry.trackers}
