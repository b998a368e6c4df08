"""Roles on some ranks of a world: the same numbers as on a world of their own, nobody else waits, and messages name world ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.runs import build_roles, recorded_batch, train
from tests.models.checkpoints import write_checkpoint
from tests.worlds import spawn_world

WORLD = 4
# name -> (ranks of the role in a world of 4, sizes of its layout)
PLACED: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("1-2", dict(tp=2)),
    "pp2": ("0,3", dict(pp=2)),
    "dp2": ("2-3", {}),
}
MEETING_S = 1.0
LONG_S, SHORT_S = 120.0, 1.0
"""Limits of a wait for what happens, and for what does not."""


def own_world(rank: int, path: str, folder: str) -> dict[str, Any]:
    """The layouts on all ranks of a world of 2."""
    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout

    cpu_patches.install()
    return {
        name: measured(path, build_groups(ParallelLayout(2, **sizes)), Path(folder, "own", name))
        for name, (_, sizes) in PLACED.items()
    }


def measured(path: str, groups: Any, export: Path) -> dict[str, Any]:
    """Losses, gradient norms and outputs of a few updates, and the exported weights after none."""
    found = train(path, groups, recorded_batch(), budget=64)
    policy, _ = build_roles(path, groups, budget=64)
    policy.engine.export(export, Path(path))
    found["export"] = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(export.glob("*.safetensors"))}
    return found


def shared_world(rank: int, path: str, folder: str) -> dict[str, Any]:
    from megappo.config.run_sections import TimeoutsConfig
    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout, placement_of

    cpu_patches.install()
    timeouts = TimeoutsConfig(meeting_s=60.0)
    built = {
        name: build_groups(ParallelLayout(2, **sizes), placement_of(ranks, WORLD), timeouts)
        for name, (ranks, sizes) in PLACED.items()
    }
    found: dict[str, Any] = {"hosted": [name for name, groups in built.items() if groups is not None]}
    for name, groups in built.items():
        if groups is not None:
            found[name] = measured(path, groups, Path(folder, "shared", name))
    own = {
        "policy": build_groups(ParallelLayout(2, tp=2), placement_of("0-1", WORLD), timeouts),
        "critic": build_groups(ParallelLayout(2, pp=2), placement_of("2-3", WORLD), timeouts),
    }
    found["apart"] = passes(path, own, shared_exchange=False)
    found["together"] = passes(path, own, shared_exchange=True)
    found["diverged"] = diverged(path, own)
    found["non-finite"] = non_finite(path, built["tp2"])
    found["drift"] = drift(path, built["dp2"], built["tp2"])
    found["late"] = late(rank, built["tp2"])  # at last: it breaks the group
    return found


def came(name: str, ranks: Sequence[int], limit_s: float) -> bool:
    """True once these ranks have told (`tell`) the name, False after the limit."""
    try:
        dist.distributed_c10d._get_default_store().wait([f"{name} {rank}" for rank in ranks], timedelta(seconds=limit_s))
    except dist.DistError:
        return False
    return True


def tell(name: str) -> None:
    dist.distributed_c10d._get_default_store().set(f"{name} {dist.get_rank()}", "")


def passes(path: str, own: dict[str, Any], *, shared_exchange: bool) -> tuple[str, bool]:
    """(role of this rank, True if the critic was through with two passes before the policy's first one ended, which waits for
    that). shared_exchange: all ranks meet after a pass.
    """
    role = "policy" if own["policy"] is not None else "critic"
    policy, critic = build_roles(path, own[role], budget=10**6)
    batch, name = recorded_batch(), f"through, {shared_exchange=}"
    report, seen = policy._report, []

    def late(*arguments: Any, **named: Any) -> Any:
        if not seen:
            seen.append(came(name, (2, 3), SHORT_S if shared_exchange else LONG_S))
        return report(*arguments, **named)

    policy._report = late  # type: ignore[method-assign]
    for _ in range(2):
        if role == "policy":
            policy.logprobs(batch)
        else:
            critic.values(batch)
        if shared_exchange:
            dist.barrier()
    tell(name)
    return role, seen == [True]


def diverged(path: str, own: dict[str, Any]) -> str:
    """Ranks 2 and 3 run different passes of the critic; the policy's ranks do nothing and see nothing."""
    from megappo.parallel.meeting import ScheduleDiverged

    if own["critic"] is None:
        return ""
    _, critic = build_roles(path, own["critic"], budget=64)
    critic.engine._engine._passes = dist.get_rank()
    with pytest.raises(ScheduleDiverged) as error:
        critic.values(recorded_batch())
    return str(error.value)


def non_finite(path: str, groups: Any) -> str:
    """Gradients of rank 2 are NaN, its position is 1."""
    from megappo.engine.base import StepResult
    from megappo.engine.role_engine import MAX_SKIPPED_STEPS, NonFiniteGradient, SkippedSteps

    if groups is None:
        return ""
    policy, _ = build_roles(path, groups, budget=64)
    if dist.get_rank() == 2:
        next(iter(policy.engine.named_gradients().values())).fill_(torch.nan)
    skipped = SkippedSteps("policy", groups)
    with pytest.raises(NonFiniteGradient) as error:
        for _ in range(MAX_SKIPPED_STEPS):
            skipped.count(StepResult(math.nan, applied=False), policy.engine.named_gradients)
    return str(error.value)


def drift(path: str, groups: Any, later: Any) -> str:
    """A bit of rank 3's copy differs; a role after it lives on other ranks too."""
    from megappo.runtime.ending import ReplicaDrift
    from megappo.trainer.replicas import ReplicaCheck

    engines = {}
    for name, own in (("policy", groups), ("critic", later)):
        if own is not None:
            engines[name] = build_roles(path, own, budget=64)[0].engine
    check = ReplicaCheck(engines)
    check()  # equal copies
    if dist.get_rank() == 3:
        parameter = next(iter(engines["policy"].named_parameters().values()))
        parameter.data.view(-1)[0] += 1.0
    with pytest.raises(ReplicaDrift) as error:
        check()
    return str(error.value)


def late(rank: int, groups: Any) -> str:
    """Rank 2 does not come to a meeting of the role on ranks 1 and 2."""
    from megappo.parallel.meeting import Limit, Point, RankIsLate, meet

    if rank != 1:
        return ""
    with pytest.raises(RankIsLate) as error:
        meet(Point("the next pass"), Limit("run.timeouts.meeting_s", MEETING_S), groups.host)
    return str(error.value)


def _alone(rank: int, path: str, folder: str) -> dict[str, Any]:
    """A broken group breaks the barrier at the end of a test world: leave with a world of its own for that."""
    found = shared_world(rank, path, folder)
    tell("all is over")
    assert came("all is over", range(WORLD), LONG_S)  # a rank that leaves would be another reason for its peers
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(results of the world of 2, results of the world of 4), rank by rank."""
    folder = tmp_path_factory.mktemp("placed")
    path = str(folder / "model")
    write_checkpoint(folder / "model", "llama")
    return spawn_world(own_world, 2, path, str(folder)), spawn_world(_alone, WORLD, path, str(folder))


def ranks_of(name: str) -> list[int]:
    return [int(PLACED[name][0][0]), int(PLACED[name][0][-1])]


def test_a_role_is_absent_on_ranks_that_it_does_not_live_on(found: Any) -> None:
    for rank, results in enumerate(found[1]):
        assert results["hosted"] == [name for name in PLACED if rank in ranks_of(name)]


@pytest.mark.parametrize("name", PLACED)
def test_a_role_on_two_of_four_ranks_computes_what_a_world_of_two_does(found: Any, name: str) -> None:
    own, shared = found
    for position, rank in enumerate(ranks_of(name)):
        assert shared[rank][name] == own[position][name], "to the bit, the exported files too"
    assert own[0][name]["rows"][0]["policy_grad_norm"] > 0.0 and own[0][name]["export"]


def test_roles_on_different_ranks_do_not_wait_for_each_other(found: Any) -> None:
    roles, through = zip(*(results["apart"] for results in found[1]))
    assert roles == ("policy", "policy", "critic", "critic")
    assert through[:2] == (True, True), "the critic was through while the policy waited for it"


def test_an_exchange_over_the_world_would_make_them_wait(found: Any) -> None:
    """Negative control."""
    assert not any(through for _, through in (results["together"] for results in found[1]))


def test_a_diverged_schedule_is_named_on_the_roles_ranks_by_world_rank(found: Any) -> None:
    for rank in (2, 3):
        text = found[1][rank]["diverged"]
        assert "rank 2 is before a forward pass of the critic (pass 3)" in text and "rank 3 is" in text, text


def test_a_late_rank_is_named_by_world_rank(found: Any) -> None:
    start = "rank 1 waited for rank 2 before the next pass (run.timeouts.meeting_s = 1): "
    assert found[1][1]["late"].startswith(start), found[1][1]["late"]


def test_non_finite_gradients_are_named_by_world_rank(found: Any) -> None:
    for rank in (1, 2):
        text = found[1][rank]["non-finite"]
        assert " in a row; rank 2 (stage 0, tp 1): " in text and text.endswith("; rank 1: none of their own tensors"), text


def test_a_drifted_copy_ends_all_ranks_with_the_same_message(found: Any) -> None:
    texts = {results["drift"] for results in found[1]}
    assert len(texts) == 1, texts
    assert "copies of the policy's weights differ" in (text := texts.pop()) and "differs between rank 2 and rank 3" in text, text
