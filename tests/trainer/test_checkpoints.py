"""Checkpoints of a run whose disk is full, whose reward fails or whose weights are NaN. The runs are in `checkpoint_runs.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from megappo.checkpoint.shards import StoredTensors
from tests.trainer.checkpoint_runs import FULL_AT, PHASES, STEPS, files, rows, run_all
from tests.trainer.small_run import write_small_task
from tests.worlds import spawn_world


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_small_task(folder)
    return folder


@pytest.fixture(scope="module")
def world(folder: Path) -> list[dict[str, Any]]:
    return spawn_world(run_all, 2, folder)


def place(folder: Path, name: str) -> Path:
    return folder / "runs" / name / "checkpoints"


def entries(folder: Path, name: str) -> list[str]:
    return sorted(path.name for path in place(folder, name).iterdir() if path.name != "LATEST")


def manifest(folder: Path, name: str, step: int) -> dict[str, Any]:
    return json.loads((place(folder, name) / f"step-{step}" / "manifest.json").read_text())


def differing(folder: Path, name: str) -> list[str]:
    """Files of a run's last checkpoint that are not the clean one's, bit for bit: weights, optimizer, generators, cursor, KL."""
    mine, clean = (files(place(folder, one) / f"step-{STEPS}") for one in (name, "clean"))
    assert mine.keys() == clean.keys()
    # The manifest holds the configuration.
    return sorted(file for file in mine if mine[file] != clean[file] and file != "manifest.json")


# --------------------------------------------------------------------------------------------------------- emergency checkpoints


def test_a_reward_that_fails_leaves_a_checkpoint_of_the_step_before(folder: Path, world: list[dict[str, Any]]) -> None:
    for rank in world:
        first, *notes = rank["reward"].splitlines()
        assert first == "RewardError: rank 1: the verifier is gone"
        assert notes[-1] == "emergency checkpoint: the state after step 2 is saved; --resume goes on from there"
    assert manifest(folder, "reward", 2)["facts"]["emergency"] == "RewardError: rank 1: the verifier is gone"
    assert "emergency" not in manifest(folder, "reward", STEPS)["facts"]


def test_the_run_that_goes_on_from_it_ends_with_the_bits_of_one_that_never_failed(
    folder: Path, world: list[dict[str, Any]]
) -> None:
    assert [rank["repaired"] for rank in world] == ["", ""]
    assert differing(folder, "reward") == []
    assert rows(folder, "reward") == rows(folder, "clean")


def test_a_step_that_is_saved_is_not_saved_again(world: list[dict[str, Any]]) -> None:
    assert all("no emergency checkpoint is needed; the newest checkpoint is step-2" in rank["reward again"] for rank in world)


def test_an_emergency_checkpoint_of_weights_does_not_promise_a_resume(world: list[dict[str, Any]]) -> None:
    for rank in world:
        (note,), events = rank["emergency_of_weights_only"]
        assert events == ["save 2"] and "the state after step 2 is saved; it holds weights only" in note


def test_a_nan_in_a_reward_names_rule_and_sample_on_all_ranks(world: list[dict[str, Any]]) -> None:
    """RELIABILITY.md F9."""
    for rank in world:
        assert rank["reward again"].startswith(
            "RewardError: rank 1: reward rule exact_match returned nan, not a finite number; sample "
        )


def test_a_nan_of_a_model_names_tensor_role_rank_and_stage(folder: Path, world: list[dict[str, Any]]) -> None:
    """RELIABILITY.md F9: before anything is computed from it, and the next start goes on from the step before."""
    for number, rank in enumerate(world):
        line, *notes = rank["nan logprob"].splitlines()
        assert line.startswith(
            "NonFiniteOutput: step 2: logprob of the policy is NaN or infinite at a sampled token, the first of "
        )
        assert line.endswith(", computed by ranks 0-1 (stage 0); no update is made of it")
        assert f"in stage logprobs, on rank {number}" in notes
        assert notes[-1] == "emergency checkpoint: the state after step 1 is saved; --resume goes on from there"
        line = rank["nan value"].splitlines()[0]
        assert line.startswith("NonFiniteOutput: step 3: value of the critic is NaN or infinite at a sampled token, the first of ")
        assert line.endswith(", computed by rank 1 (stage 1); no update is made of it")
    assert entries(folder, "nan") == ["step-1", "step-2"]


def test_nothing_is_saved_between_the_updates_of_a_step(folder: Path, world: list[dict[str, Any]]) -> None:
    for rank in world:
        said = "no emergency checkpoint: the error came between the updates of step 2; the newest checkpoint is step-1"
        assert said in rank["updates"]
        assert "no emergency checkpoint is made of such a state; this run has no checkpoint" in rank["diverged"]
    assert entries(folder, "updates") == ["step-1"]
    assert entries(folder, "diverged") == []


def test_the_first_step_after_a_resume_has_the_ratios_and_the_kl_of_the_run_that_was_not_stopped(
    folder: Path, world: list[dict[str, Any]]
) -> None:
    """RELIABILITY.md R6 and R7; the step has one update, so its figures are those of the weights that were restored."""
    (resumed,) = [row for row in rows(folder, "reward") if row["step"] == 3]
    assert abs(resumed["policy/ratio_max"] - 1) <= 1e-6 and resumed["policy/approx_kl"] <= 1e-8
    assert resumed["kl/per_response"] != 0
    references = [manifest(folder, "reward", step)["facts"]["reference"]["sha256"] for step in (2, STEPS)]
    assert references[0] == references[1]


# -------------------------------------------------------------------------------------------------------------- stop requests


def test_requests_in_every_phase_of_a_step_stop_all_ranks_at_its_end(folder: Path, world: list[dict[str, Any]]) -> None:
    """RELIABILITY.md F10: SIGTERM to rank 1 only, and the second one and those that follow change nothing."""
    assert [rank["asked phases"] for rank in world] == [[], [name for _, name in PHASES]]
    for rank in world:
        assert rank["asked"] == "" and (rank["asked end"].outcome, rank["asked end"].step) == ("stopped", 2)
        assert rank["asked rest"] == ""
    assert differing(folder, "asked") == []
    assert rows(folder, "asked") == rows(folder, "clean")


# ----------------------------------------------------------------------------------------------------------------- failed saves


def test_training_goes_on_while_a_disk_is_full(folder: Path, world: list[dict[str, Any]]) -> None:
    """RELIABILITY.md F7."""
    for rank in world:
        assert rank["full"] == ""
        assert len(rank["full seconds"]) == len(FULL_AT) and max(rank["full seconds"]) < 10
        assert rank["full untouched"] == [True, True], "earlier checkpoints byte for byte, and no leftovers"
    assert entries(folder, "full") == ["step-1", f"step-{STEPS}"]
    assert differing(folder, "full") == []
    lines = (folder / "runs" / "full" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["checkpoint/failed_saves"] for line in lines] == [0, 0, 1, 2]


def test_training_goes_on_while_the_disk_of_a_process_that_writes_is_full(folder: Path, world: list[dict[str, Any]]) -> None:
    for rank in world:
        assert rank["writer"] == ""
        assert len(rank["writer seconds"]) == 1 and rank["writer seconds"][0] < 10
        assert rank["writer untouched"] == [True]
    assert entries(folder, "writer") == ["step-1", f"step-{STEPS}"]
    assert differing(folder, "writer") == []
    lines = (folder / "runs" / "writer" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["checkpoint/failed_saves"] for line in lines] == [0, 0, 0, 1]


def test_a_third_failure_in_a_row_ends_the_run_everywhere(world: list[dict[str, Any]]) -> None:
    for rank in world:
        error, events, failed = rank["three_failures_in_a_row"]
        assert error.startswith("3 saves in a row failed, the last one so: checkpoint of step 4 was not saved")
        assert (events, failed) == (["save 2", "save 3", "save 4"], 3)


def test_a_save_that_succeeds_ends_the_count(world: list[dict[str, Any]]) -> None:
    for rank in world:
        assert rank["two_failures"] == ("", ["save 2", "save 3", "save 4", "save 6"], 2)


def test_the_last_checkpoint_is_tried_twice(world: list[dict[str, Any]]) -> None:
    for rank in world:
        assert rank["last_fails_once"] == ("", ["save 2", "save 2"])
        error, events = rank["last_fails_twice"]
        assert "No space left on device" in error and events == ["save 2", "save 2"]


def test_a_stop_on_one_rank_stops_all_with_a_checkpoint(world: list[dict[str, Any]]) -> None:
    assert [rank["stop_on_one_rank"] for rank in world] == [("", ["save 3", "stopped 3"])] * 2


def test_save_every_says_after_what_there_is_a_checkpoint(world: list[dict[str, Any]]) -> None:
    """never leaves the one of a stop: a user who asks a run to end does not want to lose it."""
    for rank in world:
        assert rank["epochs"] == ("", ["save 3", "save 5", "save 7"])
        assert rank["no_checkpoints"] == ("", [], "", ["save 3", "stopped 3"])


# --------------------------------------------------------------------------------------------------------------- finite weights


@pytest.mark.parametrize(
    "name, tensor, steps",
    [
        ("weight", "decoder.layers.1.mlp.linear_fc2.weight of the critic", ["step-1"]),
        ("moment", "optimizer.state.exp_avg_sq.", []),
    ],
)
def test_what_is_not_finite_is_not_saved(
    folder: Path, world: list[dict[str, Any]], name: str, tensor: str, steps: list[str]
) -> None:
    """RELIABILITY.md F9."""
    for rank in world:
        text = rank[name]
        assert text.startswith("NonFiniteWeights: the state after step ") and tensor in text
        assert "of the critic is NaN or infinite on rank 1 (stage 1, tp 0)" in text
    assert entries(folder, name) == steps


def test_a_resume_falls_back_to_a_checkpoint_that_is_finite(folder: Path, world: list[dict[str, Any]]) -> None:
    """RELIABILITY.md F12. The newest checkpoint was written by a version without the check."""
    for rank in world:
        assert rank["fallen back"] == ""
        assert rank["spoiled"].startswith("RewardError")
    (warning,) = world[0]["fallen back warnings"]
    assert "step-2 is no state to go on from" in warning and "trying the next older checkpoint" in warning
    assert world[1]["fallen back warnings"] == []
    assert "abandoned-step-2" in entries(folder, "spoiled")
    assert differing(folder, "spoiled") == []
    assert rows(folder, "spoiled") == rows(folder, "clean")


def test_without_a_finite_checkpoint_there_is_no_resume(folder: Path, world: list[dict[str, Any]]) -> None:
    for rank in world:
        assert rank["hopeless"].startswith("NonFiniteWeights: no checkpoint to go on from: ")
        assert rank["hopeless end"].outcome == "stopped", "the record of how the run ended stays"
    assert entries(folder, "hopeless") == ["step-1"], "and nothing is renamed"


# --------------------------------------------------------------------------------------------------------------------- intervals


def test_a_checkpoint_holds_the_inventory(folder: Path, world: list[dict[str, Any]]) -> None:
    """RELIABILITY.md, section 1. What has no row there has none here: state that a resume needs is added to both."""
    saved = place(folder, "clean") / f"step-{STEPS}"
    state = json.loads((saved / "state.json").read_text())
    assert {name: sorted(values) for name, values in state.items()} == {
        "trainer": [
            *("best", "critic_skipped", "critic_updates", "entropy_coef", "episodes", "policy_skipped", "policy_updates"),
            *("step", "tokens", "unfinished", "warmup_ended"),
        ],
        "loader": ["epoch", "index", "num_prompts", "seed", "shuffle"],
        "kl_controller": ["coef"],  # kind, target and horizon are the configuration's
    }
    # Seeds of samples come from run.seed and the step; rewards and advantages have no running moments.
    for rank in range(2):
        with safe_open(saved / f"rng-{rank:05}.safetensors", framework="pt") as file:
            assert {"python", "numpy", "torch", "megatron.model-parallel-rng"} <= set(file.keys())
    facts = manifest(folder, "clean", STEPS)["facts"]
    assert {"config", "data", "layouts", "reference", "reward", "tokenizer", "versions"} <= set(facts)
    assert set(facts["versions"]) == {"megappo", "torch", "megatron-core"}
    for role, head in (("policy", "lm_head.weight"), ("critic", "score.weight")):
        stored = StoredTensors(saved / "models" / role)
        weights = {name for name in stored.shapes if not name.startswith("optimizer.")}
        moments = {f"optimizer.state.{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in weights}
        assert {head, "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"} <= weights
        assert moments <= stored.shapes.keys(), "of fp32 weights, which are their own main parameters"
        assert stored.position == {"updates": STEPS, "schedule_steps": STEPS}


def test_a_copy_elsewhere_is_the_checkpoint_to_the_byte(folder: Path, world: list[dict[str, Any]]) -> None:
    copies = sorted(path.name for path in (folder / "elsewhere" / "clean").iterdir())
    assert copies[-1] == f"step-{STEPS}"
    for name in entries(folder, "clean"):
        here, there = place(folder, "clean") / name, folder / "elsewhere" / "clean" / name
        if name in copies:  # one that a newer one overtook is not copied
            assert files(here) == files(there)


def test_a_run_that_cannot_start_leaves_its_name_free(folder: Path, world: list[dict[str, Any]]) -> None:
    assert all(rank["other data"] == "ValueError: data.train: rank 1 reads another" for rank in world)
    assert not (folder / "runs" / "other").exists()


def test_by_default_the_first_step_and_the_last_are_saved(folder: Path, world: list[dict[str, Any]]) -> None:
    assert world[0]["clean"] == ""
    assert entries(folder, "clean") == ["step-1", f"step-{STEPS}"]  # the next one would be due after a minute or more


# ---------------------------------------------------------------------------------------------------------------- in the background


def test_a_save_in_the_background_is_committed_when_all_ranks_have_written(world: list[dict[str, Any]]) -> None:
    for rank in world:  # rank 1 is done at the third boundary after the begin
        assert rank["in_the_background"] == ("", ["begin 4", "commit 4 at 7", "begin 8", "commit 8 at 9", "save 9"])


def test_it_is_drained_before_the_next_and_before_the_end(world: list[dict[str, Any]]) -> None:
    for rank in world:
        assert rank["drained_before_the_next"] == ("", ["begin 1", "commit 1 at 2", "begin 2", "commit 2 at 3", "save 3"])
        notes, events = rank["emergency_in_the_background"]
        assert events == ["begin 3", "commit 3 at 3"] and notes == [
            "no emergency checkpoint is needed; the newest checkpoint is step-3"
        ]


def test_a_save_that_failed_in_the_background_costs_no_emergency_checkpoint(world: list[dict[str, Any]]) -> None:
    for rank in world:
        (note,), events = rank["emergency_after_a_failure_in_the_background"]
        assert events == ["begin 2", "commit 2 at 0", "save 3"] and note.startswith("emergency checkpoint: the state after step 3")


def test_a_run_that_diverges_keeps_the_save_that_is_being_written(world: list[dict[str, Any]]) -> None:
    for rank in world:
        (notes, events), (failed_notes, _) = rank["divergence_in_the_background"]
        assert events == ["begin 3", "commit 3 at 3"]
        assert notes == ["no emergency checkpoint is made of such a state; the newest checkpoint is step-3"]
        assert failed_notes == [
            "no emergency checkpoint is made of such a state; No space left on device; the newest checkpoint is step-3"
        ]


def test_a_failure_in_the_background_is_counted(world: list[dict[str, Any]]) -> None:
    for rank in world:
        error, events, failed = rank["background_fails"]
        assert (error, failed) == ("", 1)
        assert events == ["begin 4", "commit 4 at 7", "begin 8", "commit 8 at 9", "save 9"]
