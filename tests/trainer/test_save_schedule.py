"""Steps after which a checkpoint is due, with a clock of the test's own."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from megappo.config.run_sections import CheckpointConfig
from megappo.trainer.save_schedule import RETRY_S, SaveSchedule

MTBF_HOURS = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def saved_steps(
    steps: int,
    step_s: float,
    save_s: float,
    *,
    expected: float = 0.0,
    fails: range = range(0),
    steps_per_epoch: float = 1e9,
    done_before: int = 0,
    **keys: Any,
) -> list[int]:
    """Steps after which a run of so many steps saves. fails: numbers of the attempts, from 0, that fail."""
    clock = Clock()
    schedule = SaveSchedule(CheckpointConfig(**keys), MTBF_HOURS, clock)
    if expected or done_before:
        schedule.expect(expected, done_before)
    attempts: list[int] = []
    for step in range(1, steps + 1):
        clock.now += step_s
        if schedule.is_due(step, done_before + int(step / steps_per_epoch)):
            clock.now += save_s
            schedule.failed() if len(attempts) in fails else schedule.saved()
            schedule.worked(save_s)
            attempts.append(step)
    return attempts


def test_a_number_is_a_number_of_steps() -> None:
    assert saved_steps(10, 1.0, 5.0, save_every=3) == [3, 6, 9]
    assert saved_steps(10, 1.0, 5.0, save_every=0) == []


def test_an_epoch_is_saved_after_the_step_that_ends_it() -> None:
    assert saved_steps(10, 1.0, 5.0, save_every="epoch", steps_per_epoch=3) == [3, 6, 9]
    assert saved_steps(10, 1.0, 5.0, save_every="epoch", steps_per_epoch=2.5) == [3, 5, 8, 10], "within a step"
    assert saved_steps(4, 1.0, 5.0, save_every="epoch", steps_per_epoch=0.5) == [1, 2, 3, 4], "two in a step"


def test_a_resumed_run_counts_the_epochs_that_are_left() -> None:
    assert saved_steps(7, 1.0, 5.0, save_every="epoch", steps_per_epoch=3, done_before=2, expected=1.0) == [3, 6]


def test_never_nothing_is_due() -> None:
    assert saved_steps(50, 1.0, 5.0, save_every="never") == []


def test_auto_saves_the_first_step_and_then_at_young_and_dalys_interval() -> None:
    save_s, step_s = 1.0, 40.0
    interval = sqrt(2 * save_s * MTBF_HOURS * 3600)  # 379 s
    steps = saved_steps(60, step_s, save_s)
    assert steps[0] == 1
    gaps = {b - a for a, b in zip(steps, steps[1:])}
    assert gaps == {round(interval / step_s)}, "the nearest step boundary"


@pytest.mark.parametrize("save_s", [1.0, 100.0, 600.0])
def test_auto_saves_at_least_every_30_minutes(save_s: float) -> None:
    steps = saved_steps(100, 60.0, save_s)
    assert max(b - a for a, b in zip(steps, steps[1:])) <= 30


def test_steps_longer_than_the_interval_are_all_saved() -> None:
    assert saved_steps(4, 3000.0, 1.0) == [1, 2, 3, 4]


def test_a_resumed_run_does_not_save_its_first_step() -> None:
    assert saved_steps(60, 40.0, 1.0, expected=1.0) == [9, 18, 27, 36, 45, 54]


def test_a_failed_save_is_tried_at_the_next_step_and_then_after_some_minutes() -> None:
    assert saved_steps(100, 10.0, 1.0, save_every=50, fails=range(2)) == [50, 51, 51 + int(RETRY_S[1] / 10.0), 100]


def test_what_is_due_anyway_does_not_wait() -> None:
    assert saved_steps(8, 10.0, 1.0, save_every=2, fails=range(1, 3)) == [2, 4, 5, 6, 8]
