"""Limits of waiting in the groups of a role and at a meeting, and the message when a rank does not come."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from megappo.config.run_sections import TimeoutsConfig
from tests.worlds import spawn_world

START_S, PASS_S, LATE_S = 12.0, 2.0, 5.0


def waits(rank: int, case: str) -> tuple[str, float]:
    """(what was raised, or "", seconds until then) on this rank; rank 1 is late."""
    from megappo.parallel.groups import build_groups, meet, settle
    from megappo.parallel.layout import ParallelLayout
    from megappo.parallel.meeting import RankIsLate

    timeouts = TimeoutsConfig(start_s=START_S, pass_s=PASS_S, meeting_s=60)
    groups = build_groups(ParallelLayout(3), timeouts=timeouts)
    if case == "settled":
        settle([groups], timeouts)
    groups.meet("the test")
    start = time.monotonic()
    if rank == 1:
        time.sleep(LATE_S)
    try:
        if case == "absent":
            meet("the next pass", PASS_S)
        elif case == "met":
            groups.meet("the next pass")
        if case != "absent":
            dist.all_reduce(torch.ones(1), group=groups.dp)
    except RankIsLate as error:
        raised = f"late: {error}"
    except RuntimeError as error:
        raised = str(error)
    else:
        raised = ""
    seconds = time.monotonic() - start
    if raised and rank != 1:
        time.sleep(LATE_S)  # a rank that leaves would be another reason for its peers
    return raised, seconds


def outcome(case: str) -> list[tuple[str, float]]:
    return spawn_world(_alone, 3, case)


def _alone(rank: int, case: str) -> tuple[str, float]:
    """A broken group breaks the barrier at the end of a test world: leave with a world of its own for that."""
    found = waits(rank, case)
    if case in ("settled", "absent"):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


@pytest.mark.parametrize("case", ["made", "met"])
def test_the_first_passes_and_a_meeting_wait_for_a_late_rank(case: str) -> None:
    assert [raised for raised, _ in outcome(case)] == ["", "", ""]


def test_a_settled_group_waits_for_the_short_limit_only() -> None:
    found = outcome("settled")
    assert all("Timed out waiting 2000ms" in found[rank][0] for rank in (0, 2))
    assert all(found[rank][1] >= PASS_S for rank in (0, 2))


def test_who_missed_a_meeting_is_named() -> None:
    found = outcome("absent")
    for rank in (0, 2):
        expected = f"late: rank {rank} waited for rank 1 before the next pass (run.timeouts.meeting_s = 2): "
        assert found[rank][0].startswith(expected)


def test_a_world_with_two_backends_can_meet() -> None:
    """As that of a GPU, which torch's function refuses."""
    assert spawn_world(both_backends, 2) == ["monitored_barrier is only implemented for GLOO backend."] * 2


def both_backends(rank: int) -> str:
    from megappo.parallel.groups import meet

    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.PrefixStore("both", store), rank=rank, world_size=2)
    meet("the next pass", 60)
    with pytest.raises(ValueError) as refused:
        dist.monitored_barrier()
    return str(refused.value)
