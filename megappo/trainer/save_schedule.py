"""Steps after which a checkpoint is due, by number of steps or by time. Knows no ranks: rank 0 asks and tells the others."""

from __future__ import annotations

import time
from collections.abc import Callable

from megappo.checkpoint.interval import best_interval_s
from megappo.config.run_sections import CheckpointConfig

RETRY_S = (0.0, 300.0)
"""Seconds before an extra attempt after the first and the second failed save in a row: at the next step, as a lost mount often
comes back at once, and then in time for a person to free some space. A save that is due anyway does not wait."""


class SaveSchedule:
    """Schedule of one run on one rank. mtbf_hours: mean time between failures that `save_every: auto` counts with."""

    def __init__(self, settings: CheckpointConfig, mtbf_hours: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._strategy, self._every = settings.save_strategy, settings.save_every
        self._mtbf_hours, self._clock, self._epochs_done = mtbf_hours, clock, 0
        self._worked = self._boundary = clock()
        self._held_s, self._saves, self._failures = 0.0, 0, 0

    @property
    def save_s(self) -> float:
        """Mean seconds that a save held training; 0 before the first."""
        return self._held_s / self._saves if self._saves else 0.0

    @property
    def interval_s(self) -> float:
        """Seconds between checkpoints under `auto`; 0 until the first save has shown what one costs."""
        return best_interval_s(self.save_s, self._mtbf_hours)

    def expect(self, save_s: float, epochs_done: int) -> None:
        """Go on from an earlier process of the run: count with its seconds of a save until one shows others. 0: unknown."""
        self._epochs_done = epochs_done
        if save_s > 0:
            self._held_s, self._saves = save_s, 1

    def is_due(self, step: int, epochs_done: int) -> bool:
        """True if a checkpoint is due after `step`. Call it once after each. epochs_done: whole passes over the prompts so far."""
        ended_epoch, self._epochs_done = epochs_done > self._epochs_done, epochs_done
        now = self._clock()
        step_s, self._boundary = now - self._boundary, now
        waited = now - self._worked
        if self._failures and waited >= RETRY_S[min(self._failures, len(RETRY_S)) - 1]:
            return True
        if self._strategy != "steps":
            return self._strategy == "epoch" and ended_epoch
        if isinstance(self._every, int):
            return self._every > 0 and step % self._every == 0
        # A new run saves its first step: that measures a save, and shows early that one works. A resumed run knows the cost: if it
        # saved at once too, a fault that comes at the same step in every attempt would look like progress. Otherwise the step
        # boundary that is nearest to the interval's end.
        return waited + step_s / 2 >= self.interval_s

    def worked(self, seconds: float) -> None:
        """Work on a save held training for so long, until now."""
        self._held_s += seconds
        self._worked = self._boundary = self._clock()

    def saved(self) -> None:
        """A checkpoint is complete."""
        self._saves, self._failures = self._saves + 1, 0

    def failed(self) -> None:
        self._failures += 1
