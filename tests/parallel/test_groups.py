"""Limits of waiting in the groups of a role and at a meeting, and the message when a rank does not come."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megappo.config.run_sections import TimeoutsConfig
from tests.worlds import spawn_world

START_S, PASS_S, LATE_S = 300.0, 2.0, 3.0
WAITED_FOR = ("made", "met")


def told(what: str, ranks: tuple[int, ...]) -> None:
    """Tell it, and wait until these ranks have told it."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{what} {dist.get_rank()}", "")
    store.wait([f"{what} {rank}" for rank in ranks], timedelta(seconds=START_S))


def waits(rank: int, case: str) -> tuple[str, float]:
    """(what was raised, or "", seconds until then) on this rank; rank 1 is late: LATE_S, or until the others gave up."""
    from megappo.parallel.groups import build_groups, meet, settle
    from megappo.parallel.layout import ParallelLayout
    from megappo.parallel.meeting import RankIsLate

    start_s = PASS_S if case == "absent from the first pass" else START_S
    timeouts = TimeoutsConfig(start_s=start_s, pass_s=PASS_S / 2 if start_s == PASS_S else PASS_S, meeting_s=60)
    groups = build_groups(ParallelLayout(3), timeouts=timeouts)
    if case in ("settled", "absent from a pass"):
        settle([groups], timeouts)
    groups.meet("the test")
    start = time.monotonic()
    if rank == 1 and case in WAITED_FOR:
        time.sleep(LATE_S)
    elif rank == 1:
        told("gave up", (0, 2))
    try:
        if case == "absent":
            meet("the next pass", PASS_S)
        elif case in ("absent from a pass", "absent from the first pass"):
            groups.agree("a pass of the policy", 1, torch.tensor([3, 4]), 1)
        elif case == "met":
            groups.meet("the next pass")
        if not case.startswith("absent"):
            dist.all_reduce(torch.ones(1), group=groups.dp)
    except RankIsLate as error:
        raised = f"late: {error}"
    except RuntimeError as error:
        raised = str(error)
    else:
        raised = ""
    seconds = time.monotonic() - start
    if case not in WAITED_FOR:
        if rank != 1:
            told("gave up", ())
        told("over", (0, 1, 2))  # a rank that leaves would be another reason for its peers
    return raised, seconds


def outcome(*cases: str) -> list[list[tuple[str, float]]]:
    """By rank, the results of the cases; one that breaks a group has a world of its own."""
    return spawn_world(_alone, 3, cases)


def _alone(rank: int, cases: tuple[str, ...]) -> list[tuple[str, float]]:
    """A broken group breaks the barrier at the end of a test world: leave with a world of its own for that."""
    found = [waits(rank, case) for case in cases]
    if not set(cases) <= set(WAITED_FOR):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


def test_the_first_passes_and_a_meeting_wait_for_a_late_rank() -> None:
    assert LATE_S > PASS_S
    for results in outcome(*WAITED_FOR):
        assert [raised for raised, _ in results] == ["", ""]


def test_a_settled_group_waits_for_the_short_limit_only() -> None:
    found = [result for (result,) in outcome("settled")]
    assert all("Timed out waiting 2000ms" in found[rank][0] for rank in (0, 2))
    assert all(found[rank][1] >= PASS_S for rank in (0, 2))


def test_who_missed_a_meeting_is_named() -> None:
    found = [result for (result,) in outcome("absent")]
    for rank in (0, 2):
        expected = f"late: rank {rank} waited for rank 1 before the next pass (run.timeouts.meeting_s = 2): "
        assert found[rank][0].startswith(expected)


@pytest.mark.parametrize("case, key", [("absent from a pass", "pass_s"), ("absent from the first pass", "start_s")])
def test_who_missed_a_pass_is_named_after_the_limit_of_passes(case: str, key: str) -> None:
    found = [result for (result,) in outcome(case)]
    for rank in (0, 2):
        expected = f"late: rank {rank} waited for rank 1 before a pass of the policy (run.timeouts.{key} = 2): "
        assert found[rank][0].startswith(expected)


def agreements(rank: int, layouts: list[dict[str, int]]) -> list[dict[str, Any]]:
    """Agreements before passes: replica `dp` has dp + 2 sequences and needs 5 - dp micro-batches. Rank 3 may have others."""
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout
    from megappo.parallel.meeting import Limit, Point, ScheduleDiverged, meet

    results = []
    for sizes in layouts:
        groups = build_groups(ParallelLayout(4, **sizes))
        share = groups.coordinates.dp
        lengths = 10 + torch.arange(share + 2)
        found: dict[str, Any] = {"agreed": tuple(groups.agree("a pass", 1, lengths, 5 - share))}
        for name, other in {"longer": lengths + 1, "fewer": lengths[1:], "none": lengths[:0], "reversed": lengths.flip(0)}.items():
            try:
                groups.agree("a pass", 2, other if rank == 3 else lengths, 1)
                found[name] = ""
            except ScheduleDiverged as error:
                found[name] = str(error)
        # More values than the first exchange of a meeting takes.
        values = [place * (rank + 1) for place in range(-20, 20)]
        found["values"] = meet(Point("values"), Limit("pass_s", PASS_S), groups.host, values)
        results.append(found)
    return results


# Layout of four ranks -> sequences of all replicas, and the ranks of the replica of rank 3 as a message names them.
AGREED: list[tuple[dict[str, int], int, list[str]]] = [
    ({"tp": 2}, 5, ["rank 2 is", "rank 3 is"]),
    ({"pp": 2}, 5, ["rank 1 is", "rank 3 is"]),
    ({"tp": 2, "pp": 2}, 2, ["rank 3 is", "ranks 0-2 are"]),
    ({}, 14, []),
]


def together(rank: int) -> tuple[list[dict[str, Any]], list[Any]]:
    return agreements(rank, [sizes for sizes, *_ in AGREED]), faults(rank)


def faults(rank: int) -> list[Any]:
    """What this rank gets of work that fails on no rank, on rank 2, and on ranks 1 and 2 with different errors."""
    from megappo.parallel.consensus import raised_by_all

    outcomes: list[Any] = []
    for failing in ((), (2,), (1, 2)):

        def work() -> int:
            if rank in failing:
                raise FileNotFoundError("no file") if rank == 1 else ValueError("no number")
            return rank

        try:
            outcomes.append(raised_by_all(work, ValueError, OSError))
        except Exception as error:
            outcomes.append(repr(error))
    return outcomes


@pytest.fixture(scope="module")
def agreed() -> list[tuple[list[dict[str, Any]], list[Any]]]:
    return spawn_world(together, 4)


def test_all_ranks_raise_the_error_of_the_first_that_failed(agreed: list[tuple[list, list[Any]]]) -> None:
    one = "ValueError('no number')"
    others, first = "OSError('no file')", "FileNotFoundError('no file')"
    assert [raised for _, raised in agreed] == [[0, one, others], [1, one, first], [2, one, others], [3, one, others]]


def test_ranks_agree_on_the_size_of_a_pass_and_on_the_lengths_of_each_replica(agreed: list[tuple[list, list]]) -> None:
    for of_rank, _ in agreed:
        for found, (sizes, sequences, named) in zip(of_rank, AGREED, strict=True):
            assert found.pop("agreed") == (5, sequences), "the largest number of micro-batches"
            assert found.pop("values") == [*range(-20, 0), *range(0, 80, 4)]
            for message in found.values():
                parts = message.partition(": ")[2].split("; ") if named else []
                assert [part.partition(" before a pass (pass 2) with lengths ")[0] for part in parts] == named, (sizes, message)
                assert bool(message) == bool(named)


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
