"""A world of some ranks inside the world, without vLLM: what its members do there, the other ranks need not know."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

from megappo.rollout.subworld import SubWorld, prepare_rollout_world
from megappo.rollout.vllm_process import default_group_kept
from tests.worlds import spawn_world

RANKS = 4
MEMBERS = (1, 3)
SHORT_S = 3


# ------------------------------------------------------------------------------------------------------------- in the world


def total(group: dist.ProcessGroup | None = None) -> int:
    """Sum of the world's ranks over a group."""
    mine = torch.tensor(dist.get_rank())
    dist.all_reduce(mine, group=group)
    return int(mine)


def as_vllm_does() -> dict[str, Any]:
    """What vLLM does with the default group at its start, and the refused destruction of it at the end."""
    size, rank = dist.get_world_size(), dist.get_rank()
    singles = [dist.new_group([one], backend="gloo") for one in range(size)]
    everyone = dist.new_group(list(range(size)), backend="gloo")
    box = [f"from {rank}"]
    dist.broadcast_object_list(box, src=size - 1, group=everyone)
    found = {
        "rank": rank,
        "ranks": dist.get_process_group_ranks(everyone),
        "alone": total(singles[rank]),
        "together": total(everyone),
        "default": total(),
        "broadcast": box[0],
    }
    dist.barrier()
    with default_group_kept():
        dist.destroy_process_group(singles[rank])
        dist.destroy_process_group(everyone)
        dist.destroy_process_group()
    return found


def seen_by_another_thread() -> list[int]:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend((dist.get_rank(), dist.get_world_size())))
    thread.start()
    thread.join()
    return seen


def run_members(world: SubWorld) -> dict[str, Any]:
    with world.entered():
        found: dict[str, Any] = {"first": as_vllm_does(), "thread": seen_by_another_thread()}
        kept = dist.new_group([0, 1])
    found["kept"] = total(kept)  # outside, with the ranks of the world
    with world.entered():
        found["second"] = as_vllm_does()
    with pytest.raises(KeyError), world.entered():
        raise KeyError
    found["outside"] = (dist.get_rank(), dist.get_world_size())
    return found


def work_of_the_world() -> dict[str, Any]:
    """Groups and collectives of all ranks, as a trainer has them; a collective that finds its group by name too."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    by_name = _functional_collectives.all_reduce(torch.tensor(dist.get_rank()), "sum", pair)
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, dist.get_rank())
    dist.barrier()
    return {"pair": total(pair), "by name": int(by_name), "all": total(), "gathered": gathered, "name": pair.group_name}


def default_exchanged_alone(group: dist.ProcessGroup | None) -> str:
    """Negative control: members make a group under another default group, with the same counter; then the world makes one."""
    if group is not None:
        state: Any = dist.distributed_c10d._world
        state.default_pg, former = group, state.default_pg
        dist.new_group([0, 1])
        state.default_pg = former
    try:
        total(dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=SHORT_S)))
    except RuntimeError as error:
        return str(error)
    return ""


def in_world(rank: int) -> dict[str, Any]:
    world = prepare_rollout_world(MEMBERS)
    found: dict[str, Any] = {"before": work_of_the_world(), "members": None if world is None else run_members(world)}
    found["after"] = work_of_the_world()
    group = dist.new_group(list(MEMBERS))
    found["alone"] = default_exchanged_alone(group if rank in MEMBERS else None)
    return found


# ----------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return spawn_world(in_world, RANKS)


def test_members_see_a_world_of_their_own(world):
    for rank, result in enumerate(world):
        if rank not in MEMBERS:
            assert result["members"] is None
            continue
        position = MEMBERS.index(rank)
        expected = {"rank": position, "ranks": [0, 1], "alone": position, "together": 1, "default": 1, "broadcast": "from 1"}
        assert result["members"]["first"] == result["members"]["second"] == expected


def test_the_world_is_as_before_on_all_ranks(world):
    for rank, result in enumerate(world):
        of_pair = 1 if rank < 2 else 5
        for when in ("before", "after"):
            work = result[when]
            assert (work["pair"], work["by name"], work["all"]) == (of_pair, of_pair, 6) and work["gathered"] == [0, 1, 2, 3]
    # Pairs have names of a common counter.
    assert [int(result["after"]["name"]) - int(result["before"]["name"]) for result in world] == [2] * RANKS


def test_outside_and_other_threads_have_the_ranks_of_the_world(world):
    for rank in MEMBERS:
        members = world[rank]["members"]
        assert members["outside"] == (rank, RANKS) and members["thread"] == [rank, RANKS]
        assert members["kept"] == sum(MEMBERS)


def test_a_default_group_exchanged_alone_would_part_the_ranks(world):
    assert all(result["alone"] for result in world), "negative control: the world's next group has two names"
