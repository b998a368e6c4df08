"""Complete steps with two critics: on one rank, and with each critic on a rank of its own; saved, resumed, and taken over."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megappo.commands.plan.report import report
from megappo.commands.plan.run import plan_run
from megappo.config.loading import load_config
from tests.trainer.small_run import (
    NUMBERS,
    TOLERANCE,
    bare,
    branch_off,
    check_same_numbers,
    run_many,
    set_keys,
    small_config,
    write_small_task,
)
from tests.worlds import spawn_world

STEPS, SAVED = 3, 2
ALONE = {f"{role}.parallel": {} for role in ("policy", "critic")}
ASKED = {
    **ALONE,
    "critics.b.dtype": "fp32",
    "critics.b.optimizer.lr": 5e-4,
    "critics.b.value_head": "normal",
    "algorithm.entropy.coef": 0.01,
    "algorithm.disagreement_mask_ratio": 0.2,
    "algorithm.disagreement_entropy_ratio": 0.2,
    "rollout.engine": "megatron",
    "checkpoint.save_every": SAVED,
    "checkpoint.keep_last": 3,
}
APART = {"policy.ranks": "0", "rollout.ranks": "0", "reference.ranks": "0", "critic.ranks": "0", "critics.b.ranks": "1"}
OF_BOTH = [name for name in NUMBERS if name.startswith("critic/")] + ["critic/explained_variance", "critic/return_mean"]
SECTIONS = ("critic", "critics.b")
STARTS = {"straight": ("critic", "critic_b"), "crossed": ("critic_b", "critic")}


def config_of(folder: Path, name: str, steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    return set_keys(bare(small_config(folder, name, steps=steps)), {**ASKED, **changes})


def run_apart(rank: int, folder: Path) -> dict[str, str]:
    """A run with the critics on different ranks, the same with a stop and a resume, and what a resume with one critic says. Then
    two that start from the critics of a checkpoint, straight and crossed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_many(rank, [(config_of(folder, "apart", **APART), False)])
    branch_off(folder, "apart", "resumed", SAVED)
    run_many(rank, [(config_of(folder, "resumed", **APART), True)])
    said = ""
    try:
        alone = {**APART, "critic.ranks": "1", "critics": {}}
        shares = {f"algorithm.disagreement_{kind}_ratio": None for kind in ("mask", "entropy")}
        run_many(rank, [(config_of(folder, "resumed", STEPS + 1, **alone, **shares), True)])
    except ValueError as error:
        said = str(error)
    for name, roles in STARTS.items():
        source = {f"{role}.checkpoint": str(folder / "runs" / "apart") for role in SECTIONS}
        chosen = {f"{role}.checkpoint_role": of for role, of in zip(SECTIONS, roles)}
        changes = {**source, **chosen, "checkpoint.save_every": 0, "checkpoint.keep_last": None}
        config = config_of(folder, name, 1, **changes)
        del config["critics"]["b"]["value_head"], config["checkpoint"]["keep_last"]
        run_many(rank, [(config, False)])
    return {"printed": printed.getvalue(), "said": said}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("critics")
    write_small_task(folder)
    found = spawn_world(run_apart, 2, folder)
    spawn_world(run_many, 1, [(config_of(folder, "together", **{"run.num_ranks": 1}), False)])
    return folder, found


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "policy/loss" in row]


def of_critic_b(row: dict[str, Any]) -> dict[str, float]:
    return {name: row[name.replace("critic/", "critic_b/")] for name in OF_BOTH}


def test_critics_on_ranks_of_their_own_have_the_numbers_of_one_rank(task: tuple[Path, list]) -> None:
    folder, _ = task
    ours, theirs = rows(folder, "apart"), rows(folder, "together")
    assert len(ours) == len(theirs) == STEPS
    check_same_numbers(ours, theirs)
    for one, other in zip(ours, theirs):
        assert of_critic_b(one) == pytest.approx(of_critic_b(other), rel=1e-4, abs=TOLERANCE)
        shared = ("critics/disagreement", "critics/masked_advantages", "critics/filtered_entropy")
        assert {name: one[name] for name in shared} == pytest.approx({name: other[name] for name in shared}, abs=TOLERANCE)
    for name in OF_BOTH:
        assert ours[-1][name] != pytest.approx(of_critic_b(ours[-1])[name], rel=1e-3), "the critics are two"


def test_both_critics_learn_and_say_where_they_disagree(task: tuple[Path, list]) -> None:
    folder, _ = task
    for row in rows(folder, "apart"):
        # 32 samples of a step, mini-batches of 16: two updates of the policy, and two of 8 of each critic's 16.
        assert row["critic/updates"] == row["critic_b/updates"] == row["policy/updates"] == 2
        assert row["critic/grad_norm"] > 1e-3 and row["critic_b/grad_norm"] > 1e-3 and row["critics/disagreement"] > 1e-3
        assert 0.15 < row["critics/masked_advantages"] <= 0.2 and 0.15 < row["critics/filtered_entropy"] <= 0.2
        assert {"perf/work_tflop/update_critic/critic_b", "perf/work_tflop/logprobs/critic_b"} <= row.keys()


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(task: tuple[Path, list]) -> None:
    folder, _ = task
    whole, resumed = rows(folder, "apart"), rows(folder, "resumed")
    assert [row["step"] for row in resumed] == [1, 2, 3]
    exact = ("critic/", "critic_b/", "critics/", "policy/", "reward/")
    for one, other in zip(whole, resumed, strict=True):
        assert {k: v for k, v in one.items() if k.startswith(exact)} == {k: v for k, v in other.items() if k.startswith(exact)}


def test_a_resume_with_fewer_critics_is_refused_in_one_line(task: tuple[Path, list]) -> None:
    _, ranks = task
    for rank in ranks:
        assert 'the section critics = ["critic", "critic_b"], this run has ["critic"]; restore it' in rank["said"]
        assert "\n" not in rank["said"]


def test_each_critic_starts_from_the_one_that_its_section_names(task: tuple[Path, list]) -> None:
    """Crossed, each has the values of the other: what a value head of the wrong critic would look like."""
    folder, _ = task
    (straight,), (crossed,) = rows(folder, "straight"), rows(folder, "crossed")
    names = ("value_mean", "value_std", "return_mean")
    own, other = ([[row[f"{role}/{name}"] for name in names] for row in (straight, crossed)] for role in STARTS["straight"])
    assert own[0] == pytest.approx(other[1], rel=1e-5, abs=1e-6) and own[1] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    assert own[0] != pytest.approx(own[1], rel=1e-3), "the negative control: the critics differ"
    assert straight["critics/disagreement"] == pytest.approx(crossed["critics/disagreement"], rel=1e-5)
    assert straight["policy/advantage_std"] == pytest.approx(crossed["policy/advantage_std"], rel=1e-5)


def test_plan_and_log_show_both_critics(task: tuple[Path, list]) -> None:
    folder, ranks = task
    path = folder / "apart.0.yaml"  # of `run_many`
    text = report(plan_run(load_config(str(path), []), 2, "cpu", resume=True).plan)
    assert re.search(r"updates of critic: 2 mini-batches of 8 x 1 epoch = 2 optimizer steps, of 16 samples of its own", text), text
    assert re.search(r"updates of critic_b: 2 mini-batches of 8", text) and "updates of policy: 2 mini-batches of 16" in text
    assert re.search(r"critic_b update|critic_b values|critic_b optimizer", text), text
    printed = ranks[0]["printed"]
    assert re.search(r"critic_b 1 +", printed) and "critic_b" in printed.split("---")[1], "timeline and statistics"
