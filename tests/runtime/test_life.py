"""The launcher ends a world in which nobody is left to notice the hang: its only rank, or all ranks at once."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megappo.commands.launch.local import Requests, WorldEnd, run_world
from megappo.commands.launch.processes import RankProcess
from tests.runtime.hanging_ranks import ALL, HEARTBEAT_S, STEPS_BEFORE, rank_main
from tests.worlds import IMPORTED_ONCE

pytestmark = pytest.mark.slow  # starts ranks without `spawn_world`
# Seconds for steps before the fault, the launcher's looks, and the end: no longer where all ranks are silent than where one is.
END_S = 30.0


class Forked:
    """A rank that is forked from the tests' server."""

    def __init__(self, process) -> None:
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode


class Forks:
    descriptors: Sequence[int] = ()

    def __init__(self, folder: Path, fault: str) -> None:
        self._folder, self._fault = folder, fault
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED_ONCE)

    def start(self, environment: Mapping[str, str], arguments: Sequence[str]) -> RankProcess:
        world = (int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment["MASTER_PORT"]))
        process = self._context.Process(
            target=rank_main, args=(*world, str(self._folder), self._fault, ALL, dict(environment)), daemon=True
        )
        process.start()
        return Forked(process)


def end_of(folder: Path, world: int, fault: str) -> tuple[WorldEnd, float]:
    """How the world ended, and seconds since the fault."""
    with Requests(stoppable=True) as requests:
        end = run_world(Forks(folder, fault), world, [], requests, folder)
    return end, time.time() - (folder / "fault").stat().st_mtime


@pytest.mark.parametrize(
    ("world", "fault"), [(1, "holding_the_interpreter"), (1, "stopped"), (2, "holding_the_interpreter"), (2, "stopped")]
)
def test_ranks_that_nobody_else_can_end_are_ended_with_a_report(tmp_path: Path, capsys, world: int, fault: str) -> None:
    end, seconds = end_of(tmp_path, world, fault)
    assert end.code == 137 and end.failure is not None and end.failure.hangs
    assert HEARTBEAT_S < seconds < HEARTBEAT_S + END_S
    said = capsys.readouterr().err
    assert f"hangs (last seen in score, step {STEPS_BEFORE + 1}, " in said and "noticed by the launcher: no sign of life" in said
    stacks = (tmp_path / f"rank-{end.failure.rank}.stacks").read_text()
    # Its own watchdog is late at the same moment, and says so in another file.
    assert "in rank_main" in stacks and "Timeout" not in stacks
    if fault != "stopped":  # that one is woken to be asked and then killed: its own delay may end between the two, or not
        assert "in rank_main" in (tmp_path / f"rank-{end.failure.rank}.late.stacks").read_text()


def test_a_slow_rank_is_left_alone(tmp_path: Path) -> None:
    """Negative control."""
    end, _ = end_of(tmp_path, 1, "healthy")
    assert end == WorldEnd(0)
