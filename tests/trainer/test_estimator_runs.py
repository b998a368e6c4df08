"""Complete PPO steps, one short run for each estimator: what is built, logged, saved and resumed without a critic; and what
estimators with one train it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.reliability.compare import compare
from tests.trainer.small_run import bare, branch_off, run_many, set_keys, small_config, taught, write_small_task, write_teacher
from tests.worlds import spawn_world

STEPS, UPDATES = 2, 2
SINGLE = {"rollout.samples_per_prompt": 1, "algorithm.mini_batch_size": 16, "algorithm.ppo_epochs": UPDATES}
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm.estimator": "grpo", "checkpoint.save_every": 2, "rollout.engine": "vllm", "rollout.kv_cache_gib": 0.03},
    "dr_grpo": {
        "algorithm.estimator": {"type": "grpo", "divide_by_group_std": False},
        "algorithm.loss_aggregation": "fixed-length",
        "algorithm.kl": {"placement": "none"},
    },
    "rloo": {"algorithm.estimator": "rloo"},
    "reinforce_plus_plus": {"algorithm.estimator": "reinforce_plus_plus", "algorithm.gamma": 0.99},
    "remax": {"algorithm.estimator": "remax", "policy.parallel": {}},
    # One response to a prompt, and as many updates.
    "remax_single": {"algorithm.estimator": "remax", **SINGLE},
    "single": {"algorithm.estimator": "reinforce_plus_plus", **SINGLE},
    # Everything else that the policy's loss can be, without a critic.
    "gspo": {
        "algorithm.estimator": "grpo",
        "algorithm.loss.type": "gspo",
        "algorithm.loss_aggregation": "seq-mean-token-mean",
        "algorithm.loss.clip_low": 0.01,
        "algorithm.loss.clip_high": 0.01,
        "algorithm.mask_truncated": True,
        "algorithm.importance_sampling": {"type": "icepop", "low": 0.5, "high": 2.0, "count_rejected": False},
    },
    "cispo": {"algorithm.estimator": "rloo", "algorithm.loss.type": "cispo", "algorithm.high_entropy_token_ratio": 0.3},
    # From a teacher alone.
    "taught": {
        "algorithm.estimator": "reinforce_plus_plus",
        "algorithm.kl": {"placement": "none"},
        "reward.parts": [],
        "trainer.steps": STEPS + 1,
    },
}


WITH_CRITIC: dict[str, dict[str, Any]] = {
    "turns": {"algorithm.estimator.level": "turn", "algorithm.bootstrap_truncated": False},
    "vtrace": {
        "algorithm.estimator": {"type": "vtrace", "rho_bar": 2.0, "c_bar": 1.0},
        "algorithm.bootstrap_truncated": "last",
    },
    "taught critic": {"teacher.parallel": {"tp": 2}, "checkpoint.save_every": 1},
}
USUAL = {"rollout.engine": "megatron", "rollout.samples_per_prompt": 4, "algorithm.mini_batch_size": 32}


def config_of(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """The small run without the keys of the critic."""
    config = bare(small_config(folder, name, steps=STEPS))
    config["checkpoint"]["export_at_end"] = True
    del config["critic"], config["algorithm"]["bootstrap_truncated"]
    if name in ("dr_grpo", "taught"):
        del config["reference"]
    own = taught(folder, placement="advantage", coef=0.5) if name == "taught" else {}
    return set_keys(config, {**USUAL, **own, **RUNS[name], **changes})


def with_critic(folder: Path, name: str, keys: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    own = taught(folder, placement="reward", coef=0.5) if "taught" in name else {}
    return set_keys(bare(small_config(folder, name.replace(" ", "_"), steps=steps)), {**USUAL, **own, **keys})


def run_all(rank: int, folder: Path) -> str:
    """All runs; grpo is resumed to one step more than it had. Returns the message of a resume with a critic."""
    run_many(rank, [(config_of(folder, name), False) for name in RUNS])
    run_many(rank, [(with_critic(folder, name, keys), False) for name, keys in WITH_CRITIC.items()])
    branch_off(folder, "taught_critic", "taught_half", 1)
    run_many(rank, [(with_critic(folder, "taught_half", WITH_CRITIC["taught critic"]), True)])
    run_many(rank, [(config_of(folder, "grpo", **{"trainer.steps": STEPS + 1}), True)])
    try:
        run_many(rank, [(small_config(folder, "grpo", steps=STEPS + 2), True)])
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("estimators")
    write_small_task(folder)
    write_teacher(folder)
    return folder, spawn_world(run_all, 2, folder)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "policy/loss" in row]


@pytest.mark.parametrize("name", RUNS)
def test_it_trains_the_policy_and_knows_of_no_critic(task, name: str) -> None:
    folder, _ = task
    found = rows(folder, name)
    assert len(found) == STEPS + (name in ("grpo", "taught"))
    for row in found:
        assert row["policy/updates"] == UPDATES and row["policy/skipped_updates"] == 0 and row["policy/grad_norm"] > 0
        assert row["rollout/prob_diff_mean"] < 1e-4, "the sampler has the policy's weights"
        assert not [key for key in row if "critic" in key or "value" in key or "return" in key]
    before, after = (load_file(place / "model.safetensors") for place in (folder / "model", folder / "runs" / name / "export"))
    assert max(float((after[key] - tensor).abs().max()) for key, tensor in before.items()) > 1e-4


def test_figures_of_the_estimators(task) -> None:
    folder, _ = task
    for name in ("grpo", "dr_grpo", "rloo"):
        assert all(0 <= row["reward/equal_groups"] < 1 for row in rows(folder, name))
    # Group advantages are centred: over responses, not over tokens.
    assert all(abs(row["policy/advantage_mean"]) < 0.5 and row["policy/advantage_max"] < 1.51 for row in rows(folder, "grpo"))
    greedy = [row["reward/greedy_score"] for row in rows(folder, "remax")]
    assert all(0 <= score <= 1.5 for score in greedy)
    # Without the KL, rewards are the scores: the reward of a response is that of remax's sampled ones less the greedy one.
    assert "kl/per_token" not in rows(folder, "dr_grpo")[0]


def test_a_checkpoint_holds_no_critic_and_resumes(task) -> None:
    folder, _ = task
    (newest,) = sorted((folder / "runs" / "grpo" / "checkpoints").glob(f"step-{STEPS + 1}"))
    names = {path.name for path in newest.rglob("*")}
    assert any("policy" in name for name in names) and not any("critic" in name for name in names), names


def test_a_resume_with_a_critic_is_refused_in_one_line(task) -> None:
    _, messages = task
    for message in messages:
        assert 'critics of algorithm.estimator and the section critics = [], this run has ["critic"]; restore' in message
        assert "\n" not in message


def test_the_plan_has_no_critic(task) -> None:
    from megappo.commands.plan.report import report
    from megappo.commands.plan.run import plan_run
    from megappo.config.loading import load_config

    folder, _ = task
    path = folder / "plan.yaml"
    path.write_text(json.dumps(config_of(folder, "rloo", **{"run.name": "new"})))
    planned = plan_run(load_config(str(path), []), 2, "cpu")
    text = report(planned.plan, planned.data)
    assert "policy" in text and "reference" in text and "critic" not in text


@pytest.mark.parametrize("name", WITH_CRITIC)
def test_estimators_with_a_critic_train_it(task, name: str) -> None:
    folder, _ = task
    found = rows(folder, name.replace(" ", "_"))
    assert len(found) == 2
    for row in found:
        assert row["critic/updates"] == row["policy/updates"] > 0 and row["critic/grad_norm"] > 0 and row["policy/grad_norm"] > 0
    if name == "vtrace":
        # The sampler has the policy's weights: ratios are 1 but for rounding.
        assert all(abs(row["policy/correction_max"] - 1) < 1e-3 and row["policy/correction_cut"] == 0 for row in found)
    elif name == "taught critic":
        for row in found:
            penalty = row["kl/coef"] * row["kl/per_response"] + 0.5 * row["kl/teacher_per_response"]
            assert row["reward/shaped_mean"] == pytest.approx(row["reward/score_mean"] - penalty, abs=1e-5) and penalty > 0.1
    else:
        # One turn for a response: its return is its reward, and none follows it with another.
        assert all(row["critic/return_max"] == pytest.approx(row["reward/shaped_max"], abs=1e-5) for row in found)


def test_a_teacher_alone_is_the_advantage(task) -> None:
    folder, _ = task
    found = rows(folder, "taught")
    for row in found:
        assert row["policy/advantage_mean"] == pytest.approx(-0.5 * row["kl/teacher_per_token"], abs=1e-6)
        assert row["reward/score_mean"] == row["reward/score_std"] == 0 and "kl/per_token" not in row
    assert found[-1]["kl/teacher_per_token"] < found[0]["kl/teacher_per_token"] - 0.05, "it comes nearer to the teacher"


def test_a_resume_with_a_teacher_is_the_run_bit_for_bit(task) -> None:
    """And it is the same teacher's: another one, or none, is refused (tests/checkpoint/test_identity.py)."""
    folder, _ = task
    found = compare(folder / "runs" / "taught_critic", folder / "runs" / "taught_half")
    assert found.tensors > 40 and found.values > 100 and found.differing == ()


def test_remax_draws_the_greedy_responses_of_the_weights_at_hand(task) -> None:
    """The greedy score moves with the policy, and is not a sampled one."""
    torch.manual_seed(0)
    folder, _ = task
    found = rows(folder, "remax")
    assert any(row["reward/greedy_score"] != row["reward/score_mean"] for row in found)
