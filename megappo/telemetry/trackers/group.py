"""The trackers of a run: every record goes to each of them, and a failure of one costs that tracker's record."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.config.run_sections import TelemetryConfig
from megappo.telemetry.side_work import SideWork
from megappo.telemetry.trackers.background import BackgroundTracker
from megappo.telemetry.trackers.base import Histogram, Status, Tracker
from megappo.telemetry.trackers.mlflow_run import Mlflow
from megappo.telemetry.trackers.wandb_run import Wandb, end_service

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
