"""Decides which steps get a checkpoint: by steps, by time, or as the best by a metric. Knows no ranks: rank 0 asks for all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megappo.checkpoint.interval import best_interval_s
from megappo.config.run_sections import CheckpointConfig
from megappo.trainer.state import TrainerState


class BestCheckpoint:
    """Best step so far, kept in the trainer's state, so every checkpoint names the best step when it was made. metric: None for
    none. mode: max or min. `forget_unsaved` goes back from a step without a checkpoint to the last saved one."""

    def __init__(self, metric: str | None, mode: str, state: TrainerState) -> None:
        self._metric, self._mode, self._state = metric, mode, state
        self._saved: dict[str, Any] | None = None

    def observe(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take the metrics of an evaluation after `step`; return True if it is the best so far and must be saved."""
        value = metrics.get(self._metric) if self._metric is not None else None
        if value is None or not math.isfinite(value):
            return False
        best = self._state.best
        if best is not None and not (value > best["value"] if self._mode == "max" else value < best["value"]):
            return False
        self._state.best = {"metric": self._metric, "mode": self._mode, "step": step, "value": value}
        return True

    def saved(self, step: int, best: dict[str, Any] | None) -> None:
        """Note that the checkpoint of `step` is complete. best: of the state that it holds."""
        if best is not None and best["step"] == step:
            self._saved = best

    def forget_unsaved(self) -> None:
        """Go back to the best saved step, after a save has failed."""
        self._state.best = self._saved

    def resume(self, steps: Collection[int]) -> str:
        """Check the best step after a resume; return a log line if it no longer counts. steps: of the existing checkpoints."""
        best, reason = self._state.best, ""
        if best is not None and (best["metric"], best["mode"]) != (self._metric, self._mode):
            reason = (
                f"step {best['step']} was the best by {best['metric']} ({best['mode']}), which trainer.keep_best no longer names"
            )
        elif best is not None and best["step"] not in steps:
            reason = f"step {best['step']} was the best by {best['metric']}, and its checkpoint is gone"
        if reason:
            self._state.best = None
        self._saved = self._state.best
        return reason and f"{reason}; the next evaluation is the best so far"


RETRY_S = (0.0, 300.0)
"""Seconds before an extra attempt after the first and second failed save in a row: at once, as a lost mount often returns, then
after time to free some space. A save that is due anyway does not wait."""


class SaveSchedule:
    """Schedule of one run on one rank. mtbf_hours: expected mean time between failures, for `save_every: auto`."""

    def __init__(self, settings: CheckpointConfig, mtbf_hours: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = settings.save_every
        self._mtbf_hours, self._clock, self._epochs_done = mtbf_hours, clock, 0
        self._worked = self._boundary = clock()
        self._held_s, self._saves, self._failures = 0.0, 0, 0

    @property
    def save_s(self) -> float:
        """Mean seconds that a save blocked training; 0 before the first."""
        return self._held_s / self._saves if self._saves else 0.0

    @property
    def interval_s(self) -> float:
        """Seconds between checkpoints under `auto`; 0 until the first save has been measured."""
        return best_interval_s(self.save_s, self._mtbf_hours)

    def expect(self, save_s: float, epochs_done: int) -> None:
        """Continue from an earlier process of the run, with its seconds per save (0: unknown) until a new save is measured."""
        self._epochs_done = epochs_done
        if save_s > 0:
            self._held_s, self._saves = save_s, 1

    def is_due(self, step: int, epochs_done: int) -> bool:
        """Return True if a checkpoint is due after `step`; call once per step. epochs_done: whole passes over the prompts."""
        ended_epoch, self._epochs_done = epochs_done > self._epochs_done, epochs_done
        now = self._clock()
        step_s, self._boundary = now - self._boundary, now
        waited = now - self._worked
        if self._failures and waited >= RETRY_S[min(self._failures, len(RETRY_S)) - 1]:
            return True
        if isinstance(self._every, int):
            return self._every > 0 and step % self._every == 0
        if self._every != "auto":
            return self._every == "epoch" and ended_epoch
        # A new run saves its first step: that measures a save, and shows early that one works. A resumed run knows the cost: if it
        # saved at once too, a fault that comes at the same step in every attempt would look like progress. Otherwise the step
        # boundary that is nearest to the interval's end.
        return waited + step_s / 2 >= self.interval_s

    def worked(self, seconds: float) -> None:
        """Count seconds for which a save blocked training until now."""
        self._held_s += seconds
        self._worked = self._boundary = self._clock()

    def saved(self) -> None:
        """Note that a checkpoint is complete."""
        self._saves, self._failures = self._saves + 1, 0

    def failed(self) -> None:
        self._failures += 1
