"""Messages between the halves: order, announcements, limits that name the late rank, failures, and what the store keeps."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megappo.parallel.meeting import RankIsLate
from megappo.rollout.channel import Channel, HalfFailed
from megappo.rollout.half import RolloutHalf
from megappo.runtime.ending import StopRequest

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


def test_a_replica_that_comes_back_hears_from_its_join_on_and_its_next_loss_is_seen():
    store, first, second, replica = ends()
    first.tell("requests", step=1, rows=[0])
    first.give_up(1, "killed")
    assert first.sees_loss() and first.lost([0, 1]) == {1: "killed"}
    for end in (first, second):
        end.go_on_with([0])
    assert not first.sees_loss() and not first.is_ready(1) and replica.answer("a wish") is None
    replica.ask_to_join(1, "a wish")
    assert first.is_ready(1)
    first.welcome(1)
    first.tell("join", joins=1, live=[0, 1])
    new = Channel(store, 4, LEADERS, 5.0)
    about = new.answer("a wish")
    assert about and new.answer("another wish") is None
    new.enter(about)
    assert new.num_new() == 1 and new.hear() == {"kind": "join", "joins": 1, "live": [0, 1]}
    for end in (first, second, new):
        end.go_on_with([0, 1])
        assert end.generation == 2 and not end.sees_loss() and end.lost([1]) == {}
    second.give_up(1, "killed again")
    assert first.sees_loss() and new.lost([1]) == {1: "killed again"}
    first.end()
    assert new.answer("another wish") == {}, "the run is over"


def test_a_replay_loses_no_replica_at_a_save_behind_which_it_may_have_heard_messages():
    """The survivors would wait for requests that are told behind the save."""
    asked: list[tuple[str, bool]] = []

    class Meetings:
        channel, seats = ends()[1], None
        outside = nullcontext

        def drop_lost(self, rebuild: Any, *, by_log: bool = True) -> bool:
            asked.append(("lost", by_log))
            return False

        def hold(self, kind: str, action: Any, **fields: Any) -> tuple[bool, Any]:
            asked.append((kind, True))
            return True, {}

    half = RolloutHalf(Meetings(), SimpleNamespace(), Path(), StopRequest(), 1)  # type: ignore[arg-type]
    assert half.snapshots() == {} and half._held("push", dict) == {}
    assert asked == [("lost", False), ("snapshot", True), ("lost", True), ("push", True)]
