import io
import logging
import time

import pytest

from megappo.telemetry.console import configure_logging
from megappo.telemetry.runlog import PPO_COLUMNS, Progress
from megappo.telemetry.timers import StageTimers


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_stages_add_up_and_keep_their_time_when_they_raise():
    clock = Clock()
    timers = StageTimers(clock)
    for seconds in (1.0, 2.0):
        with timers.stage("update"):
            clock.now += seconds
    clock.now += 0.25
    with pytest.raises(RuntimeError), timers.stage("score"):
        clock.now += 4.0
        raise RuntimeError
    assert timers.seconds == {"update": 3.0, "score": 4.0} and timers.total_s == 7.25


def test_stages_do_not_nest():
    timers = StageTimers()
    with pytest.raises(AssertionError, match="inner begins inside outer"), timers.stage("outer"), timers.stage("inner"):
        pass


def test_real_time_is_seconds():
    timers = StageTimers()
    with timers.stage("sleep"):
        time.sleep(0.02)
    assert 0.02 <= timers.seconds["sleep"] < 10


def test_time_left_follows_the_last_steps():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(PPO_COLUMNS, stream, clock=clock)
    for step in range(1, 31):
        clock.now += 1000.0 if step == 1 else 10.0  # the first step compiles and warms up
        progress.row({}, step, 400)
    rows = stream.getvalue().splitlines()
    assert rows[1].split()[-1] == "110:50:00"  # 399 steps of 1000 s
    assert rows[-1].split()[-1] == "1:01:40"  # 370 steps of 10 s


@pytest.fixture
def restored_logger():
    logger = logging.getLogger("megappo")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before[0], before[1], before[2]


@pytest.mark.parametrize("rank,expected", [(0, ["INFO", "WARNING"]), (3, ["WARNING"])])
def test_the_first_rank_speaks_and_the_others_warn(rank, expected, restored_logger):
    stream = io.StringIO()
    for _ in range(2):  # a second call does not double the lines
        configure_logging(rank, 4, stream=stream)
    logging.getLogger("megappo.engine").info("loaded")
    logging.getLogger("megappo.engine").warning("odd")
    lines = stream.getvalue().splitlines()
    assert [line.split()[3] for line in lines] == expected
    assert all(f"rank {rank} " in line and "megappo.engine: " in line for line in lines)


def test_one_process_alone_needs_no_rank(restored_logger):
    stream = io.StringIO()
    configure_logging(0, 1, stream=stream)
    logging.getLogger("megappo").info("hello")
    assert "rank" not in stream.getvalue()
