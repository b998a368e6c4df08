"""Ranks wait long for one whose generation, reward or save takes longer, and not for one that hangs inside a pass."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.listening import WILDCARDS, Listener, Watch
from tests.trainer.small_run import run_many, small_config, write_small_task
from tests.worlds import WorldError, spawn_world

PASS_S, LATE_S = 5.0, 7.0
TIMEOUTS = {"start_s": 100.0, "pass_s": PASS_S, "meeting_s": 100.0}
LATE = ("generation", "reward", "between passes", "save")


def one_run(
    rank: int, folder: str, port: int, config: dict[str, Any], late: tuple[str, ...], hangs: bool, meets: bool
) -> list[str]:
    """Train in a world of the trainer's own making; on rank 1 each of `late` takes LATE_S longer, once the limits are short."""
    from megappo.checkpoint import store
    from megappo.engine import build
    from megappo.parallel.groups import ProcessGroups
    from megappo.rewards.scorer import Scorer
    from megappo.trainer import roles, rollout_side, updates

    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    settled, slept, settle = [], [], build.settle

    def record(*args: Any) -> None:
        settled.append(True)
        settle(*args)

    def slow(owner: Any, name: str, work: str, seconds: float) -> None:
        plain: Callable = getattr(owner, name)

        def slowed(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs) if work == "generation" else None
            if rank == 1 and settled and work not in slept:
                slept.append(work)
                time.sleep(seconds)
            return result if work == "generation" else plain(*args, **kwargs)

        setattr(owner, name, slowed)

    build.settle = record
    places = {
        "generation": (rollout_side, "generate"),
        "reward": (Scorer, "submit"),
        "between passes": (updates, "run_updates"),
        "save": (store, "encode_rng"),
    }
    for work in late:
        # Without the meeting it must be asleep still when the watchdogs look at it, on a busy machine too.
        slow(*places[work], work, LATE_S if meets else 4 * LATE_S)
    if hangs:
        slow(roles.Policy, "update", "a hang", 1000.0)
    if not meets:
        ProcessGroups.meet = lambda self, before: None
    run_many(rank, [(config, False)])
    dist.init_process_group("gloo", init_method=f"file://{folder}/after", rank=rank, world_size=2)  # for the world of the test
    return slept


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("late")
    write_small_task(folder)
    return folder


class Ran(NamedTuple):
    """slept: what each rank did later than the other. port: of the rendezvous. listeners: sockets that accepted connections."""

    slept: list[list[str]]
    port: int
    listeners: set[Listener]


def run(folder: Path, name: str, late: tuple[str, ...] = (), *, hangs: bool = False, meets: bool = True) -> Ran:
    changes = {"rollout.engine": "megatron", "run.timeouts": TIMEOUTS, "trainer.eval_before": False, "checkpoint.save_every": 1}
    changes["critic.parallel"] = {"tp": 2}  # between stages gloo keeps the limit of the start
    config = small_config(folder, name, steps=2, **changes)
    (folder / name).mkdir()
    while True:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        try:
            with Watch() as watch:
                slept = spawn_world(one_run, 2, str(folder / name), port, config, late, hangs, meets)
            return Ran(slept, port, watch.seen)
        except WorldError as error:
            if "EADDRINUSE" not in str(error):  # another test's, meanwhile
                raise


@pytest.fixture(scope="module")
def late_run(task: Path) -> Ran:
    return run(task, "late", LATE)


def test_ranks_that_come_late_after_uneven_work_are_waited_for(task: Path, late_run: Ran) -> None:
    assert late_run.slept == [[], list(LATE)]
    assert (task / "runs" / "late" / "checkpoints" / "step-2").is_dir()


def test_only_the_rendezvous_listens_on_all_interfaces(late_run: Ran) -> None:
    """torch's store of rank 0 does, whatever the address; tests/trainer/test_resume.py has a run with vLLM and without it."""
    assert {listener.port for listener in late_run.listeners if listener.address in WILDCARDS} == {late_run.port}
    assert len(late_run.listeners) > 1, "gloo's connections are seen too"


def ended_by_the_watchdogs(folder: Path, name: str, late: tuple[str, ...] = (), **how: bool) -> str:
    """Report of a run whose rank 0 gave up waiting for rank 1 after PASS_S. late, how: as of `run`."""
    with pytest.raises(WorldError) as ended:
        run(folder, name, late, **how)
    file = folder / "runs" / name / "stacks" / "verdict.json"
    assert file.exists(), ended.value
    verdict = json.loads(file.read_text())
    assert verdict["rank"] == 1, "the late rank, and not the one that raised"
    assert "noticed by rank 0: rank 0 gave up waiting: rank 0 waited for rank 1 before" in verdict["text"]
    assert f"Timed out waiting {PASS_S * 1000:.0f}ms" in verdict["text"]
    return verdict["text"]


def test_a_rank_that_hangs_inside_a_pass_is_noticed_after_the_short_limit(task: Path) -> None:
    report = ended_by_the_watchdogs(task, "hang", hangs=True)
    assert "megappo: rank 1 on" in report and "hangs (update_policy, step 2" in report
    assert "rank 0: the meeting before forward and backward of the policy in engine/role_engine.py" in report
    assert "(update_policy, step 2" in report


def test_without_the_meeting_a_late_rank_ends_the_run(task: Path) -> None:
    """Negative control: the pass that follows counts the time of who is late."""
    assert "before forward and backward of the critic" in ended_by_the_watchdogs(task, "unmet", ("between passes",), meets=False)
