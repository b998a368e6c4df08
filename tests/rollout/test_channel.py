"""Messages between the halves: order, announcements, limits that name the late rank, failures, and what the store keeps."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from megappo.parallel.meeting import RankIsLate
from megappo.rollout.channel import Channel, HalfFailed

LEADERS = (2, 4)


def ends(limit_s: float = 5.0) -> tuple[dist.HashStore, Channel, Channel, Channel]:
    """Return a store and its ends at ranks 0 and 1, which train, and at rank 4, the first of replica 1."""
    store = dist.HashStore()
    first, second, replica = (Channel(store, rank, LEADERS, limit_s) for rank in (0, 1, 4))
    return store, first, second, replica


def test_every_message_is_heard_once_in_its_order_and_meetings_leave_nothing_behind():
    store, first, second, replica = ends()
    empty = store.num_keys()
    told = [("requests", {"step": 3, "rows": [7, 1]}), ("push", {"version": 2}), ("hand_over", {"key": "step/3"})]
    for kind, fields in told[:2]:
        first.tell(kind, **fields)
        second.tell(kind, **fields)
    assert replica.num_new() == 2
    first.tell(told[2][0], **told[2][1])  # after the count: the next one
    second.tell(told[2][0], **told[2][1])
    assert [replica.hear() for _ in range(2)] == [{"kind": kind, **fields} for kind, fields in told[:2]]
    assert replica.num_new() == 1 and replica.hear()["key"] == "step/3" and replica.num_new() == 0
    for index in range(2):
        replica.announce("step/3", index)
    for end in (first, second):
        end.wait_for("step/3", "step 3")
    for end in (second, first):
        end.met()
    assert store.num_keys() == empty


def test_a_wait_ends_with_the_announcement_or_names_the_rank_that_is_late():
    _, first, _, replica = ends(limit_s=0.3)
    replica.announce("step/1", 1)
    with pytest.raises(
        RankIsLate, match=r"^rank 0 waited for step 1 of the rollout half, rank 2 \(run.timeouts.meeting_s = 0.3\)$"
    ):
        first.wait_for("step/1", "step 1")
    later = threading.Timer(0.1, lambda: replica.announce("step/1", 0))
    later.start()
    first.wait_for("step/1", "step 1")
    later.join()


def test_a_failure_of_either_half_reaches_the_other_with_rank_and_half():
    _, first, second, replica = ends()
    assert first.asked_to_stop() is None
    replica.ask_to_stop("SIGTERM")
    assert first.asked_to_stop() == "SIGTERM"
    second.fail("training", RuntimeError("out of memory\nmore"))
    first.fail("training", ValueError("follows from it"))
    said = "^rank 1 of the training half failed: RuntimeError: out of memory$"
    with pytest.raises(HalfFailed, match=said):
        replica.num_new()
    with pytest.raises(HalfFailed, match=said):
        first.wait_for("step/9", "step 9")
