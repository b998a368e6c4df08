"""Ranks whose control flow differs are named before a pass, on all of them at once, instead of an abort or a hang inside it.

They cannot differ in the number of micro-batches, which is agreed on; a rank that comes late is in tests/parallel/test_groups.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.runs import build_roles, recorded_batch
from tests.models.checkpoints import write_checkpoint
from tests.worlds import spawn_world

# One replica, and three, of which two are a majority. More layouts are in tests/parallel/test_groups.py.
LAYOUTS: dict[str, tuple[int, dict]] = {"pp2": (2, dict(pp=2)), "dp3": (3, {})}
OTHERS = {2: "rank 0 is", 3: "ranks 0, 2 are"}


def cases(rank: int, path: str, sizes: dict) -> dict[str, str]:
    """Case -> message of ScheduleDiverged, or "". Rank 1 is the one that differs. A wait for it would end in another error."""
    import torch.distributed as dist

    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout
    from megappo.parallel.meeting import ScheduleDiverged

    cpu_patches.install()
    groups = build_groups(ParallelLayout(dist.get_world_size(), **sizes))
    found = {}

    def record(name: str, body: Callable[[Any, Any, Any], Any]) -> None:
        policy, critic = build_roles(path, groups, budget=16)
        batch = recorded_batch()
        logprob, _ = policy.logprobs(batch)
        batch = batch.with_fields({"logprob": logprob, "value": logprob})
        dist.barrier()
        found[name] = ""
        try:
            body(policy, critic, batch)
        except ScheduleDiverged as error:
            found[name] = str(error)

    def another_kind(policy: Any, critic: Any, batch: Any) -> None:
        with policy.engine.train_mode():
            if rank == 1:
                policy.engine.forward_backward(batch, no_loss, forward_only=True)
            else:
                policy.update(batch, 10.0)

    def pass_more(policy: Any, critic: Any, batch: Any) -> None:
        if rank == 1:
            policy.engine._engine._passes += 1
        policy.logprobs(batch)

    def skipped(policy: Any, critic: Any, batch: Any) -> None:
        for role in (critic, policy) if rank != 1 else (policy,):
            with role.engine.train_mode():
                role.update(batch, 10.0)

    def mini_batch_less(policy: Any, critic: Any, batch: Any) -> None:
        for role in (critic, policy):
            with role.engine.train_mode():
                for _ in range(1 if rank == 1 and role is critic else 2):
                    role.update(batch, 10.0)

    def other_lengths(policy: Any, critic: Any, batch: Any) -> None:
        engine = policy.engine._engine  # every rank passes its share
        shares, order = engine.shares, list(range(batch.num_sequences))
        share = batch.select(order[shares.index_of(rank) :: shares.count])
        if rank == 1:
            share = share.select(list(reversed(range(share.num_sequences))))
        with engine.eval_mode():
            engine.forward_backward(share, no_loss, forward_only=True)

    record("another kind of pass", another_kind)
    record("one pass more", pass_more)
    record("an update skipped", skipped)
    record("one mini-batch fewer", mini_batch_less)
    record("other sequences", other_lengths)
    record("alike", lambda policy, critic, batch: policy.logprobs(batch))
    return found


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request, tmp_path_factory) -> list[dict[str, str]]:
    path = str(tmp_path_factory.mktemp("agreement") / "llama")
    write_checkpoint(path, "llama", num_hidden_layers=2)
    world, sizes = LAYOUTS[request.param]
    return spawn_world(cases, world, path, sizes)


def no_loss(output: Any, micro: Any) -> Any:
    from megappo.engine.losses import LossOutput

    return LossOutput()


# Case -> (point of rank 1, point of the others)
DIFFERENCES = {
    "another kind of pass": ("a forward pass of the policy (pass 2)", "forward and backward of the policy (pass 2)"),
    "one pass more": ("a forward pass of the policy (pass 3)", "a forward pass of the policy (pass 2)"),
    "an update skipped": ("training the policy", "training the critic"),
    "one mini-batch fewer": ("training the policy", "forward and backward of the critic (pass 2)"),
}


def points(message: str) -> dict[str, str]:
    """`rank 1 is` -> its point."""
    start, rest = message.split(": ", 1)
    assert start == "the ranks are at different points of the schedule"
    return dict(part.split(" before ", 1) for part in rest.split("; "))  # type: ignore[misc]


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_rank_at_another_point_is_named_on_all_ranks(found, case: str) -> None:
    (message,) = {of_rank[case] for of_rank in found}
    theirs, others = DIFFERENCES[case]
    assert points(message) == {"rank 1 is": theirs, OTHERS[len(found)]: others}, "however the lengths of replicas differ"


def test_ranks_that_agree_pass(found) -> None:
    """Negative control: also after the refusals above, the world still works."""
    assert all(of_rank["alike"] == "" for of_rank in found)


def test_a_rank_with_other_sequences_than_its_replica_is_named_on_all_ranks(found) -> None:
    """With the rank that it differs from; ranks of other replicas have other sequences anyway, and are right."""
    (message,) = {of_rank["other sequences"] for of_rank in found}
    if len(found) == 3:
        assert message == "", "each replica is one rank"
        return
    parts = points(message)
    assert parts.keys() == {"rank 0 is", "rank 1 is"} and len(set(parts.values())) == 2
    for point in parts.values():
        assert re.fullmatch(r"a forward pass of the policy \(pass 2\) with lengths [0-9a-f]{8} of share 0", point)
