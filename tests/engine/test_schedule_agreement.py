"""Ranks whose control flow differs are named before a pass, on all of them at once, instead of an abort or a hang inside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.runs import build_roles, recorded_batch
from tests.models.checkpoints import write_checkpoint
from tests.worlds import spawn_world

# Per data-parallel rank: on three ranks there is a majority.
LAYOUTS: dict[str, tuple[int, dict]] = {"tp2": (2, dict(tp=2)), "pp2": (2, dict(pp=2)), "dp3": (3, {})}
REFUSED_S = 1.0


def cases(rank: int, path: str, sizes: dict) -> dict[str, tuple[str, float]]:
    """Case -> (message of ScheduleDiverged, or "", seconds until then). Rank 1 is the one that differs."""
    import torch.distributed as dist

    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout
    from megappo.parallel.meeting import ScheduleDiverged
    from megappo.platform import cpu

    cpu.install()
    groups = build_groups(ParallelLayout(dist.get_world_size(), **sizes))
    found = {}

    def record(name: str, body: Callable[[Any, Any, Any], Any]) -> None:
        policy, critic = build_roles(path, groups, budget=16)
        batch = recorded_batch()
        logprob, _ = policy.logprobs(batch)
        batch = batch.with_fields({"logprob": logprob, "value": logprob})
        dist.barrier()
        start = time.monotonic()
        try:
            body(policy, critic, batch)
        except ScheduleDiverged as error:
            found[name] = str(error), time.monotonic() - start
        else:
            found[name] = "", time.monotonic() - start

    def fewer(policy: Any, critic: Any, batch: Any) -> None:
        whole = policy.engine._my_sequences
        if rank == 1:
            policy.engine._my_sequences = lambda batch: whole(batch)[:-1]
        with policy.engine.train_mode():
            policy.update(batch, 10.0)

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
        chosen = range(batch.num_sequences) if rank != 1 else reversed(range(batch.num_sequences))
        policy.logprobs(batch.select(list(chosen)))

    record("one micro-batch fewer", fewer)
    record("an update skipped", skipped)
    record("one mini-batch fewer", mini_batch_less)
    record("other sequences", other_lengths)
    record("alike", lambda policy, critic, batch: policy.logprobs(batch))
    return found


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request, tmp_path_factory) -> list[dict[str, tuple[str, float]]]:
    path = str(tmp_path_factory.mktemp("agreement") / "llama")
    write_checkpoint(path, "llama", num_hidden_layers=2)
    world, sizes = LAYOUTS[request.param]
    return spawn_world(cases, world, path, sizes, timeout_s=60)


# Case -> (point of rank 1, point of the others)
DIFFERENCES = {
    "one micro-batch fewer": ("forward and backward of the policy (pass 2) with",) * 2,
    "an update skipped": ("training the policy", "training the critic"),
    "one mini-batch fewer": ("training the policy", "forward and backward of the critic (pass 2) with"),
    "other sequences": ("a forward pass of the policy (pass 2) with",) * 2,
}


def points(message: str) -> dict[str, str]:
    """`rank 1 is` -> its point."""
    start, rest = message.split(": ", 1)
    assert start == "the ranks are at different points of the schedule"
    return dict(part.split(" before ", 1) for part in rest.split("; "))  # type: ignore[misc]


@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_rank_at_another_point_is_named_at_once_on_all_ranks(found, case: str) -> None:
    (message,) = {of_rank[case][0] for of_rank in found}
    theirs, others = DIFFERENCES[case]
    parts = points(message)
    assert parts["rank 1 is"].startswith(theirs) and parts["rank 0 is" if len(found) == 2 else "ranks 0, 2 are"].startswith(others)
    assert len(set(parts.values())) == 2
    # The mini-batches before the one that is missing are computed first.
    assert all(of_rank[case][1] < (5 if case == "one mini-batch fewer" else REFUSED_S) for of_rank in found)


def test_ranks_that_agree_pass(found) -> None:
    """Negative control: also after the refusals above, the world still works."""
    assert all(of_rank["alike"][0] == "" for of_rank in found)


def test_the_number_of_micro_batches_is_told(found) -> None:
    counts = [int(point.split(" with ")[1].split()[0]) for point in points(found[0]["one micro-batch fewer"][0]).values()]
    assert abs(counts[0] - counts[1]) == 1
