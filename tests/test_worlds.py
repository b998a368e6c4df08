import time

import pytest
import torch
import torch.distributed as dist

from tests.worlds import WorldError, spawn_world


def sum_of_ranks(rank, offset):
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return int(total), rank


def one_rank_raises(rank):
    if rank == 1:
        raise RuntimeError("the culprit")
    dist.barrier()


def sleeps(rank):
    time.sleep(60)


def test_results_come_in_rank_order():
    assert spawn_world(sum_of_ranks, 2, 10) == [(21, 0), (21, 1)]


def test_the_first_traceback_is_reported():
    with pytest.raises(WorldError, match="(?s)rank 1 failed first.*the culprit"):
        spawn_world(one_rank_raises, 2)


def test_a_world_that_hangs_is_ended():
    with pytest.raises(WorldError, match="ran past 2 s"):
        spawn_world(sleeps, 2, timeout_s=2)
