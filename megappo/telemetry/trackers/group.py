"""The trackers of a run: every record goes to each of them, and a failure of one costs its record."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megappo.config.run_sections import TelemetryConfig
from megappo.telemetry.side_work import SideWork
from megappo.telemetry.trackers.base import Histogram, Status, Tracker
from megappo.telemetry.trackers.helper import HelperTracker, TrackerError

FINISH_S = {"finished": 60.0, "stopped": 15.0, "failed": 5.0}
"""Seconds to wait for the trackers at the end; after a request to stop the job has little time left."""

logger = logging.getLogger(__name__)


class Trackers:
    """Trackers by name, started by the first record. config: of the run, without secrets. Nothing is raised."""

    def __init__(self, trackers: Mapping[str, Tracker], config: Mapping[str, Any], side_work: SideWork) -> None:
        self._trackers, self._config, self._side_work = trackers, config, side_work
        self._resumed_step: int | None = None
        self._started = False
        self._status: Status = "failed"

    def resume_after(self, step: int) -> None:
        """Tell the trackers, at their start, that the records after `step` come again."""
        self._resumed_step = step

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Values that are not finite are left out: a gap in the curve."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._each(lambda tracker: tracker.metrics(step, finite))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._each(lambda tracker: tracker.histograms(step, histograms))

    def text(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._each(lambda tracker: tracker.text(step, name, rows))

    def finish(self, status: Status) -> None:
        """Ask every tracker that was started to close the run."""
        self._status = status
        if self._started:
            self._each(lambda tracker: tracker.finish(status))

    def wait(self) -> None:
        """Wait for the trackers in helper processes, at most FINISH_S in all."""
        for name, tracker in self._trackers.items():
            if isinstance(tracker, HelperTracker):
                self._side_work.run(name, partial(tracker.wait, FINISH_S[self._status]))
                self._hear(name, tracker)

    def _each(self, action: Callable[[Tracker], None]) -> None:
        if not self._started:
            self._started = True
            for name, tracker in self._trackers.items():
                self._side_work.run(name, lambda: tracker.start(self._config, self._resumed_step))
        for name, tracker in self._trackers.items():
            self._side_work.run(name, lambda: action(tracker))
            if isinstance(tracker, HelperTracker):
                self._hear(name, tracker)

    def _hear(self, name: str, tracker: HelperTracker) -> None:
        """Count what the helper process has lost, and tell what it has to say."""
        for reply in tracker.replies():
            if reply.kind == "note":
                logger.info(reply.text)
            else:
                self._side_work.lose(name, TrackerError(reply.text))


def make_trackers(telemetry: TelemetryConfig, run_name: str, root: Path) -> dict[str, Tracker]:
    """The trackers that a configuration names, not started, for the run in `root`."""
    from megappo.telemetry.trackers.tensorboard import TensorBoard  # torch's writer is slow to import

    named = telemetry.model_copy(update={"experiment": telemetry.experiment or run_name})
    return {
        name: TensorBoard(root / "tensorboard") if name == "tensorboard" else HelperTracker(name, root, named)
        for name in telemetry.trackers
    }
