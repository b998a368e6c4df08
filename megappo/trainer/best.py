"""Choice of the best checkpoint of a run by a metric of its evaluations (`trainer.keep_best`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from megappo.trainer.state import TrainerState


class BestCheckpoint:
    """Best step so far, kept in the trainer's state: every checkpoint says which step was the best when it was made.

    metric: None chooses nothing. mode: max or min. The state names a step from the moment that its value is known; `saved` is the
    last one whose checkpoint is complete, and `forget_unsaved` goes back to it.
    """

    def __init__(self, metric: str | None, mode: str, state: TrainerState) -> None:
        self._metric, self._mode, self._state = metric, mode, state
        self._saved: dict[str, Any] | None = None

    def observe(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Take the metrics of an evaluation after `step`; returns True if it is the best so far, and its checkpoint to be saved."""
        value = metrics.get(self._metric) if self._metric is not None else None
        if value is None or not math.isfinite(value):
            return False
        best = self._state.best
        if best is not None and not (value > best["value"] if self._mode == "max" else value < best["value"]):
            return False
        self._state.best = {"metric": self._metric, "mode": self._mode, "step": step, "value": value}
        return True

    def saved(self, step: int, best: dict[str, Any] | None) -> None:
        """The checkpoint of `step` is complete. best: of the state that it holds."""
        if best is not None and best["step"] == step:
            self._saved = best

    def forget_unsaved(self) -> None:
        """A save has failed: a best step without a checkpoint is none."""
        self._state.best = self._saved

    def resume(self, steps: Collection[int]) -> str:
        """After a resume; steps: of the checkpoints that exist. Returns a line for the log if the best does not count any more."""
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
