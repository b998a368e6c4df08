"""Saving and resuming on two ranks (policy tp=2, critic pp=2). The cases run in `cases.py`; here is what must come out."""

import errno
import os

import pytest

from tests.checkpoint.cases import DAMAGES, FILES, IO_ERRORS, VARIANTS

TRAINED = {f"{role} {part}" for role in ("policy", "critic") for part in ("model", "optimizer")}


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_and_three_steps_equal_six_bit_for_bit(world, variant):
    for rank in world:
        result = rank[f"resume {variant}"]
        assert result["step"] == 3
        assert result["after load"] == []
        assert result["after training"] == []
        # The comparison means something: a fresh run and three more steps change every part.
        assert TRAINED | {"python", "numpy", "torch", "components"} <= set(result["before load"])
        assert TRAINED | {"python", "numpy", "torch", "components"} <= set(result["moved"])


@pytest.mark.parametrize("part", ["optimizer", "rng"])
def test_the_comparison_notices_what_is_not_restored(world, part):
    for rank in world:
        assert TRAINED <= set(rank[f"resume without {part}"])


def test_resume_before_the_first_update(world):
    assert all(rank["resume before the first update"] == [] for rank in world)


def test_generators_continue_in_the_middle(world):
    for rank in world:
        drawn, again = rank["generators"]
        assert drawn == again
    assert world[0]["generators"] != world[1]["generators"]  # each rank has its own stream


def test_another_architecture_is_refused(world):
    assert all("does not fit the model" in rank["other architecture"] for rank in world)


def test_a_small_save_takes_less_than_a_second_of_processor_time(world):
    # Several tries: what is imported or started once costs the first one.
    assert min(world[0][f"resume {variant}"]["save seconds"] for variant in VARIANTS) < 1.0


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_before_anything_is_opened(world, file, damage):
    for number, rank in enumerate(world):
        result = rank["corruption"][file, damage]
        assert result["step"] == 1
        assert result["differs"] == []
        assert result["set aside"] and result["latest"] == "step-1\n"
        assert result["opened"] == ["step-1"]
        assert len(result["warnings"]) == (1 if number == 0 else 0)
        if number == 0:
            assert file in result["warnings"][0] and "bad-step-2" in result["warnings"][0]


def test_without_hashes_a_flipped_bit_is_loaded(world):
    """Negative control: sizes alone do not find it, and neither do Megatron and torch."""
    steps = {rank["corruption without hashes"][0] for rank in world}
    changed = {part for rank in world for part in rank["corruption without hashes"][1]}
    assert steps == {2} and changed


def test_damage_found_while_models_are_built_is_told_before_a_tensor_changes(world):
    for rank in world:
        found = rank["verified meanwhile"]
        for owner, is_set_aside in ((None, False), ("a1b2", True)):
            begun, told, changed, aside = found[owner]
            assert begun == 2 and told.startswith("models/policy/00001.safetensors does not match") and changed == []
            assert aside is is_set_aside, "only the run's owner renames"
        assert found["then"] == (1, [])


def test_no_valid_checkpoint_is_one_line(world):
    for rank in world:
        empty, damaged = rank["none valid"]
        assert empty.endswith(
            "does not exist on rank 0; mount its file system, or start anew without --resume, under another run.name"
        )
        assert damaged.endswith("holds 1 damaged checkpoints and no valid one; start anew without --resume, under another run.name")


def test_what_a_kill_left_behind_is_ignored_and_removed(world):
    for rank in world:
        assert rank["leftovers"] == {"latest": 1, "step": 1, "after load": False, "entries": ["LATEST", "step-1", "step-2"]}


@pytest.mark.parametrize(("name", "rank", "number"), IO_ERRORS)
def test_an_io_error_on_one_rank_refuses_on_all_and_touches_nothing(world, name, rank, number):
    """The verification of a file falls to one rank; the same file on the other rank is not looked at."""
    said = [here["I/O errors"][name, rank, number] for here in world]
    assert said[0] == said[1] and said[0][2]
    for text in said[0][:2]:
        if text is not None:
            assert name in text and f"rank {rank}" in text and "nothing was renamed" in text and "\n" not in text
            assert ("not visible on" if number == errno.ENOENT else os.strerror(number)) in text


def test_every_file_is_looked_at_by_some_rank(world):
    for name in {name for name, _, _ in IO_ERRORS}:
        found = [texts for key, texts in world[0]["I/O errors"].items() if key[0] == name]
        assert any(resumed is not None and read is not None for resumed, read, _ in found)


def test_a_checkpoint_that_could_not_be_read_is_resumed_once_it_can(world):
    assert all(rank["I/O errors"]["afterwards"] == 2 for rank in world)


def test_readers_pass_over_damage_and_leave_everything_as_it_is(world):
    for rank in world:
        result = rank["readers"]
        assert result["newest"] == 1 and result["unchanged"]
        assert "state.json" in result["damaged"] and "steps there: [2, 1]" in result["damaged"]
        assert "step-7 does not exist; steps there: [2, 1]" in result["absent"]


def test_a_resume_from_an_older_checkpoint_makes_room_for_the_steps_after_it(world):
    for rank in world:
        result = rank["going on from an older one"]
        refused, kept = result["refused"]
        assert "tokenizer" in refused and kept and result["chosen"]
        assert "besides those passed over (step-3, step-2, step-1)" in result["none left"]
        assert result["step"] == 1
        assert result["resumed"] == ["LATEST", "abandoned-step-2", "abandoned-step-3", "step-1"]
        assert result["latest"] == "step-1\n"
        assert set(result["entries"]) == {*result["resumed"], "step-2", "step-3"}


def test_what_cannot_be_removed_ends_neither_saves_nor_a_resume(world):
    for number, rank in enumerate(world):
        result = rank["undeletable"]
        assert result["step"] == 3
        assert len([name for name in result["entries"] if name.startswith(".tmp-removed-step-")]) == 2
        assert result["afterwards"] == ["LATEST", "step-4"]
        if number == 0:
            assert result["stuck"] > 0 and all("position.json: Operation not permitted" in text for text in result["warnings"])


def test_a_signed_checkpoint_is_refused_with_another_key_and_stays(world):
    for rank in world:
        result = rank["signed"]
        assert result["same key"] == 1 and result["no key"] is None
        assert "was not signed with the key in MEGAPPO_CHECKPOINT_KEY" in result["another key"]
        assert result["another key entries"] == result["no key entries"] == ["LATEST", "step-1"]


@pytest.mark.parametrize("kind", ["shard", "position", "header"])
def test_a_hostile_file_is_refused_and_runs_nothing(world, kind):
    for rank in world:
        refusal, was_run = rank["hostile"][kind]
        assert not was_run
        assert "not from megappo" in refusal and "\n" not in refusal


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("shard on rank 1", "rank 1: OSError"),
        ("all of rank 0", "rank 0: "),
        ("state is not plain", "trainer is not plain data"),
        ("state is not finite", "trainer is not plain data"),
        ("state has tuples", "tuples"),
        ("state differs by rank", "ranks [1] differs"),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(world, fault, text):
    for rank in world:
        message, entries, untouched = rank["failed saves"][fault]
        assert message.startswith("checkpoint of step 2 was not saved") and text in message
        assert entries == ["LATEST", "step-1"]
        assert untouched


def test_saving_goes_on_after_a_failure(world):
    assert all(rank["failed saves"]["afterwards"] == 3 for rank in world)


def test_an_existing_step_is_not_overwritten(world):
    assert all("exists already" in rank["failed saves"]["exists"] for rank in world)


def test_weights_only_are_smaller_and_cannot_be_resumed(world):
    for rank in world:
        result = rank["only model"]
        weights, everything = result["bytes"]
        assert weights < 0.4 * everything  # fp32: one of three tensors
        assert not any("rng" in name or "state" in name for name in result["files"])
        assert "weights only" in result["message"] and "\n" not in result["message"]
        assert result["latest"] == 1


def test_only_what_must_match_is_compared(world):
    for rank in world:
        result = rank["facts"]
        assert result["moved"] == 1
        assert "reference" in result["reference"] and "xyz" in result["reference"]
        assert "tokenizer" in result["tokenizer"] and "xyz" in result["tokenizer"]
        assert "holds the state of ['trainer']" in result["components"]
        assert result["saved"]["config"] == "run: {name: test}"


def test_the_newest_are_kept_in_numeric_order(world):
    for rank in world:
        seen, latest = rank["retention"]
        assert [set(entries) - {"LATEST"} for entries in seen] == [
            {"step-8"},
            {"step-8", "step-9"},
            {"step-9", "step-10"},
            {"step-10", "step-11"},
        ]
        assert latest == "step-11\n"
