"""Limits of sections are learned from the run, and time in which the process was stopped does not count."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from megappo.config.run_sections import TimeoutsConfig
from megappo.runtime import sections
from megappo.runtime.messages import name_ranks, ranks_by_value
from megappo.runtime.sections import BETWEEN, GENERATING, LOADING, TRAINING_HALF, WARM_UP, AwakeClock, Sections
from megappo.runtime.verdict import Place, main_thread_place
from megappo.telemetry.timers import StageTimers

TIMEOUTS = TimeoutsConfig(meeting_s=1000, heartbeat_s=10)


class Clock:
    """Stands for `time` in the module."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sections, "time", clock)
    return clock


def work(marks: Sections, clock: Clock, name: str, seconds: float) -> None:
    with marks.section(name):
        clock.seconds += seconds


def test_a_limit_is_learned_after_the_first_occurrences(clock: Clock) -> None:
    marks = Sections(TIMEOUTS, AwakeClock(1.0))
    for seconds in (500.0, 1.0, 1.0, 1.0):
        work(marks, clock, "generate", seconds)
        assert marks.limit_s("generate") == 1000, "it may compile"
    work(marks, clock, "generate", 1.0)
    assert marks.limit_s("generate") == 5 * 500.0
    for _ in range(WARM_UP):
        work(marks, clock, "score", 0.1)
    assert marks.limit_s("score") == 20, "the least limit"
    for _ in range(200):
        work(marks, clock, "generate", 10.0)
    assert marks.limit_s("generate") == 50, "one slow occurrence in 200 is above the 99th percentile"
    assert marks.limit_s("checkpoint") == 1000, "each has its own"


def test_a_section_that_has_occurred_once_is_not_given_an_hour(clock: Clock) -> None:
    marks = Sections(TimeoutsConfig(), AwakeClock(1.0))
    assert marks.limit_s("generate") == 3600, "nothing is known of it"
    work(marks, clock, "generate", 2.0)
    assert marks.limit_s("generate") == 600, "start_s: compiling, connections"
    work(marks, clock, "generate", 70.0)
    assert marks.limit_s("generate") == 20 * 70.0
    work(marks, clock, "generate", 200.0)
    assert marks.limit_s("generate") == 3600, "never more than meeting_s"


def test_sections_inside_others_and_between_stages(clock: Clock) -> None:
    marks = Sections(TIMEOUTS, AwakeClock(1.0))
    assert marks.now().section == LOADING and marks.now().limit_s == 1000
    timers = StageTimers(observer=marks.of_step(3))
    with timers.stage("score"):
        clock.seconds += 5.0
        assert (marks.now().section, marks.now().step, marks.now().seconds) == ("score", 3, 5.0)
        work(marks, clock, "checkpoint", 7.0)
        assert (marks.now().section, marks.now().seconds) == ("score", 0.0)
    clock.seconds += 2.0
    assert (marks.now().section, marks.now().seconds) == (BETWEEN, 2.0)
    for _ in range(2 * WARM_UP):
        with timers.stage("prompts"):
            pass
    assert marks.now().limit_s == 1000, "nothing is learned between the stages"
    with pytest.raises(KeyError), timers.stage("score"):
        raise KeyError
    assert marks.raised_in is not None and marks.raised_in.section == "score" and marks.now().section == BETWEEN


def test_a_rank_without_stages_says_what_it_does(clock: Clock) -> None:
    """Generation beside training: it advances with every engine step, and what it waits for does not while it looks for it."""
    marks = Sections(TIMEOUTS, AwakeClock(1.0))
    for name, advances, seconds in ((GENERATING, True, 0.0), (TRAINING_HALF, False, 5.0)):
        for _ in range(3):
            marks.turn_to(name, advances=advances)
            here = marks.now()
            clock.seconds += 2.5
        assert (here.section, here.seconds, here.limit_s) == (name, seconds, 1000.0) and marks.may_stand_still()


def test_only_new_work_may_stand_still(clock: Clock) -> None:
    marks = Sections(TIMEOUTS, AwakeClock(1.0))
    assert marks.may_stand_still(), "loading"
    marks.of_step(1)
    assert not marks.may_stand_still(), "trackers, the log"
    for _ in range(WARM_UP):
        with marks.section("score"):
            assert marks.may_stand_still()
    with marks.section("score"):
        assert not marks.may_stand_still(), "its limit is learned"
    for _ in range(WARM_UP + 1):
        with marks.section("checkpoint"):
            assert marks.may_stand_still(), "its limit never is"


def test_time_in_which_the_process_was_stopped_does_not_count(clock: Clock) -> None:
    awake = AwakeClock(1.0)
    marks = Sections(TIMEOUTS, awake)
    for seconds in (1.0, 2.0, 3600.0, 1.0):  # Ctrl-Z, or a suspended job
        clock.seconds += seconds
        awake.tick()
    assert marks.now().seconds == 4.0


def place_during(work: Callable[[], object]) -> Place:
    """Of the main thread, while it runs `work` for half a second."""
    found: list[Place] = []
    reader = threading.Thread(target=lambda: (time.sleep(0.2), found.append(main_thread_place())))
    reader.start()
    work()
    reader.join()
    return found[0]


def test_a_waiting_rank_says_in_which_exchange_and_where() -> None:
    module: Any = ModuleType("torch.distributed.imitation")
    exec("def all_gather_object(wait):\n    gather(wait)\ndef gather(wait):\n    wait(0.5)", vars(module))

    def hook(seconds: float) -> None:
        time.sleep(seconds)

    waits, works = place_during(lambda: module.all_gather_object(time.sleep)), place_during(lambda: module.all_gather_object(hook))
    assert waits.waits_in == "all_gather_object" and "test_sections.py" in waits.at
    assert works.waits_in is None and "(hook)" in works.at, "work that an exchange calls is no waiting"
    assert place_during(lambda: time.sleep(0.5)).waits_in is None


def test_ranks_in_words() -> None:
    assert [name_ranks(ranks) for ranks in ([3], [1, 0], [0, 2, 3, 4, 7])] == ["rank 3", "ranks 0-1", "ranks 0, 2-4, 7"]
    assert list(ranks_by_value({0: "a", 1: "b", 2: "a"}).items()) == [("b", [1]), ("a", [0, 2])]


def test_a_limit_is_for_each_stretch_without_progress(clock: Clock) -> None:
    """Scoring that takes an hour and goes on is no hang; one that stands still for as long as it never did is one."""
    marks = Sections(TIMEOUTS, AwakeClock(1.0))
    marks.advance()  # outside of a section too
    for _ in range(WARM_UP):
        with marks.section("score"):
            for seconds in (3.0, 7.0, 5.0):
                clock.seconds += seconds
                marks.advance()
                assert marks.now().seconds == 0
            clock.seconds += 6.0
            assert marks.now().seconds == 6.0
    assert marks.limit_s("score") == 5 * 7.0
    with marks.section("score"), marks.section("checkpoint"):
        marks.advance()
        clock.seconds += 50.0
    assert marks.limit_s("score") == 5 * 50.0, "a section inside belongs to the outer one, as without progress"
