"""Checkpoints of roles on different ranks of a world of four: saved by the ranks of each, resumed on any, agreed by all."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint import runs
from tests.checkpoint.resharding import train, whole_state
from tests.worlds import spawn_world

WORLD = 4
ROLES = ("policy", "critic")
# The files are the same, however they were written: another kind of save is read where it was saved and on one other placement.
HOW = {"waits": ("apart", "together", "exchanged", "overlapping", "one rank each"), "asynchronous": ("apart", "exchanged")}
# name -> role -> (its ranks, sizes of its layout)
PLACES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "apart": {"policy": ("0-1", {"tp": 2}), "critic": ("2-3", {"pp": 2})},
    "together": {"policy": ("all", {"tp": 2}), "critic": ("all", {"pp": 2})},
    "exchanged": {"policy": ("2-3", {"pp": 2}), "critic": ("0-1", {})},
    "overlapping": {"policy": ("1,3", {}), "critic": ("2-3", {"tp": 2})},
    "one rank each": {"policy": ("3", {}), "critic": ("0", {})},
}


class World:
    """Engines of all placements. engines(...): role -> engine, None where it does not live."""

    def __init__(self) -> None:
        from megappo.parallel import cpu_patches
        from megappo.parallel.groups import build_groups
        from megappo.parallel.layout import ParallelLayout, placement_of

        cpu_patches.install()
        self.groups: dict[tuple[str, str], Any] = {}
        for name, roles in PLACES.items():
            for role, (ranks, sizes) in roles.items():
                placement = placement_of(ranks, WORLD)
                self.groups[name, role] = build_groups(ParallelLayout(len(placement), **sizes), placement)

    def engines(self, place: str, seed: int = 0) -> dict[str, Any]:
        return {
            role: groups and runs.engine(groups, critic=role == "critic", seed=seed)
            for role in ROLES
            for groups in (self.groups[place, role],)
        }

    def digests(self, place: str, engines: dict[str, Any]) -> dict[str, dict[str, str]]:
        """Role -> tensor -> digest, on all ranks. Collective."""
        mine = {}
        for role, engine in engines.items():
            if engine is not None:
                state = whole_state(engine, self.groups[place, role])
                mine[role] = {name: hashlib.sha256(values.numpy().tobytes()).hexdigest() for name, values in state.items()}
        everywhere = runs.gathered(mine)
        found = {role: [theirs[role] for theirs in everywhere if role in theirs] for role in ROLES}
        assert all(one == copies[0] for copies in found.values() for one in copies), "its ranks see one state"
        return {role: copies[0] for role, copies in found.items()}


def world_main(rank: int, folder: str) -> dict[str, Any]:
    world = World()
    engines = world.engines("apart")
    for engine in filter(None, engines.values()):
        train(engine)
    wanted = world.digests("apart", engines)
    found: dict[str, Any] = {"fresh": world.digests("apart", world.engines("apart", seed=9)) == wanted, "wrong": {}}
    for how, places in HOW.items():
        kept = runs.store(Path(folder) / how)
        if how == "waits":
            kept.save(1, engines, {}, runs.FACTS)
        else:
            kept.begin_save(1, engines, {}, runs.FACTS)
            kept.drain()
        for place in places:
            loaded = world.engines(place, seed=9)
            assert kept.load(loaded, {}, runs.FACTS) == 1
            got = world.digests(place, loaded)
            wrong = [f"{role} {name}" for role in ROLES for name in wanted[role] if got[role].get(name) != wanted[role][name]]
            found["wrong"][how, place] = wrong
        kept.close()
    files = sorted(path.name for path in (Path(folder) / "waits" / "step-1" / "models" / "critic").glob("0*"))
    found["files"], found["tensors"] = files, len(wanted["policy"]) + len(wanted["critic"])
    found["resumed on another placement goes on alike"] = goes_on(world, Path(folder) / "waits")
    found["faults"] = {name: fault(world, Path(folder) / name.replace(" ", "-")) for name, fault in FAULTS.items()}
    return found


def goes_on(world: World, folder: Path) -> float:
    """Largest difference of a weight after one more step, between the placement of the save and another one."""
    ends = []
    for place in ("apart", "exchanged"):
        engines = world.engines(place, seed=9)
        runs.store(folder).load(engines, {}, runs.FACTS)
        mine = {}
        for role, engine in engines.items():
            if engine is not None:
                train(engine, steps=1)
                mine[role] = whole_state(engine, world.groups[place, role])
        theirs = runs.gathered(mine)
        ends.append({role: next(one[role] for one in theirs if role in one) for role in ROLES})
    return max(
        float((ends[0][role][name] - ends[1][role][name]).abs().max())
        for role in ROLES
        for name in ends[0][role]
        if name.startswith("weight ")
    )


def disk_full(world: World, folder: Path) -> str:
    """Rank 3 cannot describe the critic; the policy's ranks can."""
    engines = world.engines("apart")
    kept = runs.store(folder)
    kept.save(1, engines, {}, runs.FACTS)
    if dist.get_rank() == 3:
        spoil(engines["critic"])
    text = runs.message(Exception, lambda: kept.save(2, engines, {}, runs.FACTS))
    return f"{text} | kept {kept.steps()} | {sorted(path.name for path in folder.iterdir() if path.is_dir())}"


def first_of_two_fails(world: World, folder: Path) -> str:
    """The policy fails on its ranks 1 and 3; rank 3 must not leave rank 2 alone with the critic."""
    engines = world.engines("overlapping")
    if dist.get_rank() == 1:
        spoil(engines["policy"])
    return str(runs.message(Exception, lambda: runs.store(folder).save(1, engines, {}, runs.FACTS)))


def spoil(engine: Any) -> None:
    """Its tensors cannot be read, as a disk cannot be written."""
    save_state = engine.save_state

    def broken(**how: Any) -> Any:
        state = save_state(**how)
        return replace(state, boxes=[box._replace(values=box.values.to("meta")) for box in state.boxes])

    engine.save_state = broken


def does_not_fit(world: World, folder: Path) -> str:
    """A critic with an expert model's tensors on ranks 2 and 3."""
    kept = runs.store(folder)
    kept.save(1, world.engines("apart"), {}, runs.FACTS)
    engines = world.engines("apart")
    if engines["critic"] is not None:
        engines["critic"] = runs.engine(world.groups["apart", "critic"], critic=True, experts=True)
    return str(runs.message(ValueError, lambda: kept.load(engines, {}, runs.FACTS)))


def not_finite(world: World, folder: Path) -> str:
    """A NaN in a weight of the critic on rank 3, whose position is 1."""
    from megappo.trainer.checkpoints import Checkpoints

    engines = world.engines("apart")
    checkpoints = object.__new__(Checkpoints)
    checkpoints._models, checkpoints._with_optimizer = engines, True
    own = {role: world.groups["apart", role] for role in ROLES}
    checkpoints._layouts = {role: groups.layout for role, groups in own.items() if groups is not None}
    assert checkpoints._non_finite() == ""
    if dist.get_rank() == 3:
        next(iter(engines["critic"].named_parameters().values())).data.view(-1)[0] = torch.nan
    return checkpoints._non_finite()


FAULTS = {
    "disk full": disk_full,
    "first of two fails": first_of_two_fails,
    "does not fit": does_not_fit,
    "not finite": not_finite,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn_world(world_main, WORLD, str(tmp_path_factory.mktemp("placed")))


@pytest.mark.parametrize("how, place", [(how, place) for how, places in HOW.items() for place in places])
def test_state_resumes_to_the_bit_on_any_placement(found: Any, how: str, place: str) -> None:
    assert [results["wrong"][how, place] for results in found] == [[]] * WORLD
    assert found[0]["tensors"] > 100


def test_engines_that_were_not_loaded_have_another_state(found: Any) -> None:
    """Negative control."""
    assert not any(results["fresh"] for results in found)


def test_each_rank_writes_the_roles_that_live_on_it(found: Any) -> None:
    assert found[0]["files"] == ["00002.safetensors", "00003.safetensors"]


def test_training_goes_on_alike_on_another_placement(found: Any) -> None:
    assert found[0]["resumed on another placement goes on alike"] < 1e-5


def texts(found: Any, fault: str) -> str:
    """The message, which all ranks share."""
    (text,) = {results["faults"][fault] for results in found}
    return text


def test_a_save_that_fails_on_one_roles_ranks_fails_on_all(found: Any) -> None:
    text = texts(found, "disk full")
    assert "checkpoint of step 2 was not saved: " in text and "rank 3" in text, text
    assert text.endswith("| kept [1] | ['step-1']"), text


def test_a_rank_of_two_roles_does_not_leave_the_second_after_a_fault_of_the_first(found: Any) -> None:
    text = texts(found, "first of two fails")
    assert "checkpoint of step 1 was not saved: " in text and "rank 1" in text, text


def test_a_checkpoint_that_does_not_fit_one_role_is_refused_on_all_ranks(found: Any) -> None:
    assert "critic does not fit the model: only the model has" in texts(found, "does not fit")


def test_a_value_that_is_not_finite_is_named_by_world_rank_on_all_ranks(found: Any) -> None:
    text = texts(found, "not finite")
    assert text.endswith("of the critic is NaN or infinite on rank 3 (stage 1, tp 0)"), text
