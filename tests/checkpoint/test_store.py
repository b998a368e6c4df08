"""Saving and resuming on two ranks (policy tp=2, critic pp=2). The cases run in `cases.py`; here is what must come out."""

import pytest

from .cases import DAMAGES, FILES, VARIANTS

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


def test_megatron_reads_the_checkpoint(world):
    assert all(rank["read by Megatron"] == [] for rank in world)


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
        assert result["set aside"]
        assert result["opened"] == ["step-1"]
        assert len(result["warnings"]) == (1 if number == 0 else 0)
        if number == 0:
            assert file in result["warnings"][0] and "bad-step-2" in result["warnings"][0]


def test_without_hashes_a_flipped_bit_is_loaded(world):
    """Negative control: sizes alone do not find it, and neither do Megatron and torch."""
    steps = {rank["corruption without hashes"][0] for rank in world}
    changed = {part for rank in world for part in rank["corruption without hashes"][1]}
    assert steps == {2} and changed


def test_no_valid_checkpoint_is_one_line(world):
    for rank in world:
        empty, damaged = rank["none valid"]
        assert empty.endswith("holds no checkpoint; start without --resume")
        assert damaged.endswith("holds 1 damaged checkpoints and no valid one; start without --resume")


def test_what_a_kill_left_behind_is_ignored_and_removed(world):
    for rank in world:
        assert rank["leftovers"] == {"latest": 1, "step": 1, "after load": False, "entries": ["LATEST", "step-1", "step-2"]}


@pytest.mark.parametrize("kind", ["index", "common", "object"])
def test_a_hostile_file_is_refused_and_runs_nothing(world, kind):
    for rank in world:
        refusal, was_run = rank["hostile"][kind]
        assert not was_run
        assert "not from megappo" in refusal and "\n" not in refusal


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("shard on rank 1", "rank 1: OSError"),
        ("common.pt on rank 0", "rank 0: "),
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
        assert weights < 0.4 * everything  # fp32: one of three tensors, and the archive's overhead
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
