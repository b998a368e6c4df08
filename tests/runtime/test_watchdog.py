"""Runs that hang end in time, with the culprit's name, its section, the exchange that the others wait in, and all stacks."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megappo.runtime.failure import first_failure
from megappo.runtime.watchdog import _Pulse
from tests.runtime.hanging_ranks import AT_FIRST, HEARTBEAT_S, STILL_S, Ended, run_world

pytestmark = pytest.mark.slow  # starts ranks without `spawn_world`

# Seconds for the verdict, the report and SIGKILL after the limit, of which the exchange takes about 3.
END_S = 30.0
KILLED = -signal.SIGKILL
# Fault -> (ranks, culprit, the report's words about it)
HANGS = {
    "stopped": (3, 1, "no sign of life"),
    "stopped, rank 0": (2, 0, "did not answer"),  # which holds the store here
    "sleeping": (2, 1, "in no exchange while the others wait"),
    "holding_the_interpreter": (2, 1, "no sign of life"),
    "in_another_exchange": (3, 1, "in another exchange than the others"),
    "sleeping_in_a_pass": (2, 1, "in no exchange while the others wait"),
    "sleeping, alone": (1, 0, "score takes"),
    "sleeping_at_first": (2, 1, "in no exchange while the others wait"),
    "sleeping_at_first, alone": (1, 0, "no rank works for"),
}


@pytest.fixture(scope="module", params=HANGS)
def hang(request, tmp_path_factory) -> tuple[str, Ended]:
    folder = tmp_path_factory.mktemp("hang")
    world, culprit, _ = HANGS[request.param]
    return request.param, run_world(folder, world, request.param.split(",")[0], culprit)


def test_every_process_is_gone_in_time_by_sigkill(hang: tuple[str, Ended]) -> None:
    case, ended = hang
    raises = [1 if case == "sleeping_in_a_pass" and rank == 0 else KILLED for rank in range(len(ended.codes))]
    assert ended.codes == raises, ended.logs
    limit_s = STILL_S if case.split(",")[0] in AT_FIRST else HEARTBEAT_S
    assert limit_s * 0.5 < ended.seconds < limit_s + END_S


def test_the_report_names_rank_host_section_and_exchange(hang: tuple[str, Ended]) -> None:
    case, ended = hang
    world, culprit, words = HANGS[case]
    said = "".join(ended.logs)
    assert words in said
    if "rank 0" in case:  # nobody can ask the others: each survivor says where it waits
        assert re.search(r"rank 1: all_reduce in .*hanging_ranks.py:\d+ \(rank_main\) \(score, step 7, \d s\)", said), said
        return
    assert said.count("megappo: noticed by rank") == 1, "one rank prints the report"
    step = 1 if case.split(",")[0] in AT_FIRST else 7
    assert re.search(rf"megappo: rank {culprit} on \S+ hangs \((last seen in )?score, step {step}, \d+ s\): ", said), said
    others = "ranks 0, 2" if world == 3 else "rank 0"
    if world > 1:
        assert re.search(rf"  {others}: all_reduce in .*hanging_ranks.py:\d+ \(rank_main\) \(score, step {step}", said), said
        ends = [rank for rank, log in enumerate(ended.logs) if f"rank {rank} ends: rank {culprit} on" in log]
        # A rank that was stopped may say it too, when it is continued to write its stacks.
        assert set(ends) - {culprit} == set(range(1, world)) - {culprit}


def test_the_stacks_of_all_ranks_are_left(hang: tuple[str, Ended]) -> None:
    """Also of a rank that was stopped, or whose interpreter is blocked."""
    case, ended = hang
    for rank in range(len(ended.codes)):
        assert "in rank_main" in ended.stacks(rank), f"rank {rank}"


def test_the_launchers_report_names_the_culprit(hang: tuple[str, Ended]) -> None:
    """And not the rank that ended first."""
    case, ended = hang
    failure = first_failure(ended.folder)
    assert failure is not None and failure.rank == HANGS[case][1]
    assert HANGS[case][2] in failure.report() and "hangs" in failure.report()


def test_a_slow_rank_ends_nobody(tmp_path: Path) -> None:
    """Negative control; at the end no thread and no file of the watchdog is left."""
    ended = run_world(tmp_path, 2, "healthy", 1)
    assert ended.codes == [0, 0], ended.logs
    assert [(tmp_path / f"finished-{rank}").read_text() for rank in range(2)] == ["[]"] * 2
    assert not list(tmp_path.glob("*.stacks")) and not (tmp_path / "verdict.json").exists()


@pytest.mark.parametrize("world", [1, 2])
def test_a_stage_that_is_slow_the_first_time_ends_nobody_while_it_works(tmp_path: Path, world: int) -> None:
    """It computes, waits for a process that does, writes, or says that it goes on; the other rank waits for it all the while."""
    ended = run_world(tmp_path, world, "slow_at_first", world - 1)
    assert ended.codes == [0] * world, ended.logs
    assert ended.seconds > 2 * STILL_S and not (tmp_path / "verdict.json").exists()


def test_no_rank_outlives_one_that_raises(tmp_path: Path) -> None:
    """Without a launcher that ends them: their exchange fails. The watchdogs leave the word to the traceback."""
    ended = run_world(tmp_path, 3, "raising", 1)
    assert ended.codes == [1, 1, 1] and ended.seconds < 30, "an exchange may take 300"
    assert "RuntimeError: the culprit" in ended.logs[1] and "in stage score, on rank 1" in ended.logs[1]
    assert not (tmp_path / "verdict.json").exists() and not list(tmp_path.glob("*.stacks"))


def test_a_spare_rank_that_is_silent_is_given_up_and_the_one_after_it_is_watched() -> None:
    """Negative control: a rank that is not spare is suspected."""
    now, given_up, ended = [0.0], list[str](), list[int]()
    owner: Any = SimpleNamespace(
        _rank=0,
        _members=[SimpleNamespace(rank=rank) for rank in range(4)],
        _clock=SimpleNamespace(now=lambda: now[0]),
        _heartbeat_s=30.0,
        _spare={1: given_up.append},
        _end_here=ended.extend,
    )
    pulse = _Pulse(owner, SimpleNamespace())  # type: ignore[arg-type]  # no store is asked
    now[0] = pulse._answered_at = 31.0
    assert pulse.silence(30.0) is None
    pulse._pass_over()
    assert (given_up, ended, pulse._next) == (["no sign of life of rank 1 for 31 s"], [1], 2)
    owner._members = [member for member in owner._members if member.rank != 2]  # left out with its replica
    pulse._pass_over()
    assert pulse._next == 3
    now[0] = pulse._answered_at = 70.0
    pulse._pass_over()
    suspected = pulse.silence(30.0)
    assert suspected is not None and suspected.rank == 3 and given_up[1:] == []
