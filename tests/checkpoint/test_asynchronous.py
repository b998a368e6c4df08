"""Asynchronous saves on two ranks (F15): the cases run in `asynchronous.py`; here is what must come out."""

from __future__ import annotations

import time

import pytest

from tests.checkpoint.asynchronous import CASES, MOMENTS, killed_main, survivors_main, world_main
from tests.checkpoint.test_background import is_running
from tests.worlds import WorldError, spawn_world

EVERYTHING = {"policy model", "policy optimizer", "critic model", "critic optimizer", "torch", "numpy", "python", "components"}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return spawn_world(world_main, 2, str(tmp_path_factory.mktemp("two")))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("overlapping")])
def test_a_snapshot_is_the_state_at_the_call(two, name):
    for rank in two:
        result = rank[name]
        assert result["steps"] == [1, 3, 5] and result["wrong"] == []
        assert all(EVERYTHING == set(moved) for moved in result["moved"]), "the state did change before anything was written"


def test_training_waits_for_a_copy_that_is_not_made_yet(two):
    for rank in two:
        assert rank["late copy"][True] == (False, [])
        at_once, wrong = rank["late copy"][False]
        assert not at_once and wrong, "the negative control: engines that do not wait"


def test_both_kinds_of_save_write_the_same_bytes(two):
    for rank in two:
        result = rank["same files"]
        assert result["files"] and result["number"] >= 9
        assert result["resumed"] == [[], []]


def test_weights_only(two):
    for rank in two:
        step, files = rank["weights only"]
        assert step == 0 and files and not any("rng" in name or "state" in name for name in files)


def test_a_save_needs_one_agreement(two):
    for rank in two:
        (first, synchronous, later, another), wrong = rank["exchanges"]
        assert first == later == another == 1 < synchronous and wrong == []


def test_whatever_changes_in_a_state_is_in_its_checkpoint(two):
    for rank in two:
        found = rank["changed state"]
        assert len(found) == 12 and found == dict.fromkeys(found, ([], True, 1))


def test_later_saves_take_no_more_memory_and_all_is_a_share_of_the_checkpoint(two):
    for rank in two:
        seen, excess, rounding = rank["buffers stay"]
        assert seen[0] == seen[1] == seen[2]
        assert 0 <= excess <= rounding


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("killed", "rank 1: OSError: the writer process was ended by SIGKILL"),
        ("full disk", "rank 1: OSError: [Errno 27] File too large: "),
        ("no memory", "rank 0: OSError: [Errno 27]"),
        ("no copy", "rank 1: RuntimeError: CUDA error: an illegal memory access was encountered"),
        (
            "shorter",
            "committing the checkpoint failed on 1 of 2 ranks; rank 0: ValueError: models/policy/00001.safetensors has 10 bytes",
        ),
    ],
)
def test_a_fault_in_the_background_fails_the_save_on_all_ranks_and_leaves_nothing(two, fault, text):
    for rank in two:
        told, seconds, entries, untouched, drained = rank["failed"][fault]
        assert told.startswith("checkpoint of step ") and "was not saved" in told and text in told
        assert entries == ["LATEST", "step-1"] and untouched and drained is None
        assert seconds < 120, "no rank waits until a limit of the meetings, which is an hour"


def test_saving_goes_on_after_the_faults(two):
    for rank in two:
        name, wrong = rank["failed"]["afterwards"]
        assert name.startswith("step-") and name != "step-1" and wrong == []


def test_old_checkpoints_that_cannot_be_removed_fail_no_save(two):
    for rank in two:
        before, after = rank["failed"]["old ones stay"]
        assert int(after.removeprefix("step-")) > int(before.removeprefix("step-"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    writers = []
    for number, moment in enumerate(MOMENTS):
        place = folder / str(number)
        with pytest.raises(WorldError, match="died without a traceback"):
            spawn_world(killed_main, 2, str(place), moment)
        writers += [int((folder / f"{number}.writer{rank}").read_text()) for rank in (0, 1)]
    deadline = time.monotonic() + 60
    while any(is_running(writer) for writer in writers):
        assert time.monotonic() < deadline, "a writer outlives its rank"
        time.sleep(0.01)
    (found, _) = spawn_world(survivors_main, 2, [str(folder / str(number)) for number in range(len(MOMENTS))])
    return {moment: found[str(folder / str(number))] for number, moment in enumerate(MOMENTS)}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_of_all_ranks_costs_at_most_the_save_in_flight(killed, moment):
    step, intact, steps, entries = killed[moment]
    assert step == (2 if moment == "after the rename" else 1) and intact
    assert steps == ([1, 2, 3] if moment == "after the rename" else [1, 3])
    assert entries == sorted(["LATEST", *(f"step-{step}" for step in steps)])
