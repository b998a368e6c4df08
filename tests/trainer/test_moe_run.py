"""Complete PPO steps beyond a dense model and plain sampling, with vLLM in the loop: experts, sliding windows, top-k and top-p.

Every step compares the sampler's probabilities with the trainer's; from the second step on they are those of weights that were
trained and pushed. The last run leaves the pushes out, to show that the comparison would notice.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.trainer.small_run import SIZES, bare, run_many, small_config, write_small_task
from tests.worlds import spawn_world

STEPS = 2
AGREEMENT = 1e-5  # of probabilities, fp32
_CONFIG: dict[str, Any] = dict(
    **SIZES,
    head_dim=32,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    initializer_range=0.1,
)
EXPERTS: dict[str, Any] = dict(moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
LATENT: dict[str, Any] = dict(
    **(dict(moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, first_k_dense_replace=1)),
    **(dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, head_dim=8)),
)
DELTA: dict[str, Any] = dict(
    **EXPERTS, shared_expert_intermediate_size=24, full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=4
)
DELTA |= dict(linear_key_head_dim=16, linear_value_head_dim=12)
SIGMOIDS: dict[str, Any] = dict(
    **(dict(moe_intermediate_size=24, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1)),
    n_group=1,
    topk_group=1,
)
NO_PAD: dict[str, Any] = dict(pad_token_id=None)  # its embedding would be zero, which a norm widens a thousand times
OSS: dict[str, Any] = dict(num_local_experts=8, num_experts_per_tok=2, sliding_window=4)
MIXTRAL: dict[str, Any] = dict(num_local_experts=8, num_experts_per_tok=2)
WINDOW = 4
TP_SP_EP = {"tp": 2, "sequence_parallel": True, "ep": 2}


def write_experts(folder: Path) -> None:
    """moe/ below `folder`, which has the small task."""
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_CONFIG, **EXPERTS)).save_pretrained(folder / "moe")
    shutil.copy(folder / "model" / "tokenizer.model", folder / "moe")


def write_models(folder: Path) -> None:
    """Folders of the models below `folder`, each with the small task's tokenizer beside it."""
    write_small_task(folder)
    write_experts(folder)
    models = {
        "window": transformers.MistralForCausalLM(transformers.MistralConfig(**_CONFIG, sliding_window=WINDOW)),
        "oss": transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**_CONFIG, **OSS})),
        "gemma": transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**_CONFIG, sliding_window=WINDOW)),
        "delta": transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**{**_CONFIG, **DELTA, **NO_PAD})),
        "latent": transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**_CONFIG, **LATENT})),
        "glm": transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**{**_CONFIG, **SIGMOIDS})),
        "mixtral": transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**_CONFIG, **MIXTRAL})),
        "dense_delta": transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**{**_CONFIG, **DELTA, **NO_PAD})),
        "sparse_delta": transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**{**_CONFIG, **DELTA, **NO_PAD})),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        shutil.copy(folder / "model" / "tokenizer.model", folder / name)


def config_of(folder: Path, name: str, model: str, **overrides: Any) -> dict[str, Any]:
    changes = {"policy.model": str(folder / model), "policy.optimizer.lr": 5e-3, "critic.optimizer.lr": 5e-3, **overrides}
    return bare(small_config(folder, name, steps=STEPS, **changes))


def run_all(rank: int, runs: list[tuple[dict[str, Any], bool]], stale: list[tuple[dict[str, Any], bool]]) -> None:
    """The runs as they are, then those in `stale` with an engine that keeps the weights of its first push."""
    from megappo.bridge.sync import WeightSync

    run_many(rank, runs)
    real = WeightSync.push

    def push_once(self: Any, version: int, verify: bool = True) -> dict[str, float]:
        if self._engine._version is None:
            return real(self, version, verify)
        self._engine.weights_changed(version)
        return {"seconds": 0.0}

    WeightSync.push = push_once
    run_many(rank, stale)
    WeightSync.push = real


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    write_models(folder)

    def critic(model: str, **keys: Any) -> dict[str, Any]:
        return {"critic.model": str(folder / model), **{f"critic.{key}": value for key, value in keys.items()}}

    # Critics are of other families than their policies, so that each is run.
    moe = {"policy.parallel": {"ep": 2}, "policy.router_aux_coef": 0.01}
    moe |= critic("moe", parallel=TP_SP_EP, router_aux_coef=0.01)
    window = {"policy.parallel": {"cp": 2}, "critic.parallel": {"pp": 2}, "rollout.tp": 2}
    runs = [(config_of(folder, "moe", "mixtral", **moe), False), (config_of(folder, "window", "window", **window), False)]
    sparse = {"policy.parallel": TP_SP_EP}
    by_policy = {"rollout.engine": "megatron"}
    latent = {**sparse, "policy.router_bias_rate": 0.01, "rollout.engine": "megatron"}
    latent |= critic("glm", parallel={"ep": 2}, router_bias_rate=0.01)
    runs += [(config_of(folder, "latent", "latent", **latent), False)]
    runs += [(config_of(folder, "delta", "delta", **sparse, **by_policy, **critic("dense_delta", parallel={"pp": 2})), False)]
    own = {"policy.parallel": {"ep": 2}, "critic.parallel": {"tp": 2, "sequence_parallel": True}}
    runs += [(config_of(folder, "sparse_delta", "sparse_delta", **own, **by_policy), False)]
    runs += [(config_of(folder, "oss", "oss", **sparse, **critic("mixtral", parallel={"ep": 2})), False)]
    dense = {"policy.parallel": {"tp": 2, "sequence_parallel": True}, **critic("gemma", parallel={"pp": 2})}
    runs += [(config_of(folder, "dense_delta", "dense_delta", **dense, **by_policy), False)]
    # One update a step, so that every ratio is of the policy to itself.
    cut = {"rollout.sampling": {"temperature": 0.7, "top_p": 0.8, "top_k": 5}, "algorithm.mini_batch_size": 32}
    cut |= {"algorithm.entropy.coef": 0.01}
    by_vllm = {**window, **cut, "rollout.tp": 1, **critic("delta", parallel={"pp": 2})}
    by_trainer = {**cut, **by_policy, **critic("latent", parallel=TP_SP_EP)}
    whole = {**by_trainer, "trainer.steps": 1, "rollout.sampling": {**cut["rollout.sampling"], "replay_top_k_ids": False}}
    runs += [
        (config_of(folder, "truncated", "gemma", **by_vllm), False),
        (config_of(folder, "truncated_megatron", "glm", **{**moe, **by_trainer}), False),
        (config_of(folder, "not_replayed", "glm", **{**moe, **whole}), False),
    ]
    moe |= critic("oss", parallel=TP_SP_EP)
    stale = [(config_of(folder, "stale", "moe", **moe, **{"rollout.max_prob_diff": 1.0}), False)]
    spawn_world(run_all, 2, runs, stale)
    return folder


def steps_of(folder: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "policy/loss" in row]


@pytest.mark.parametrize("name", ["moe", "window", "latent", "oss", "dense_delta", "delta", "sparse_delta"])
def test_the_sampler_follows_the_trained_policy(runs: Path, name: str) -> None:
    rows = steps_of(runs, name)
    assert len(rows) == STEPS
    for row in rows:
        assert row["rollout/prob_diff_max"] < AGREEMENT
        assert row["policy/grad_norm"] > 0 and row["critic/grad_norm"] > 0 and row["policy/skipped_updates"] == 0


def test_weights_that_are_not_pushed_would_show(runs: Path) -> None:
    first, *later = steps_of(runs, "stale")
    assert first["rollout/prob_diff_max"] < AGREEMENT
    assert all(row["rollout/prob_diff_max"] > 100 * AGREEMENT for row in later)
    assert all(row["critic/grad_norm"] > 0 == row["critic/skipped_updates"] for row in (first, *later)), "the critic trains on"


def test_the_load_of_the_experts_is_logged(runs: Path) -> None:
    for row in steps_of(runs, "moe"):
        for role in ("policy", "critic"):
            assert 0 < row[f"{role}/expert_max_violation"] <= EXPERTS["num_experts"] / EXPERTS["num_experts_per_tok"] - 1
            assert 0 <= row[f"{role}/experts_idle"] < 1
            # One for each of the two layers when the experts of every sequence are used evenly.
            assert row[f"{role}/balance_loss"] > 1.5
    assert not [name for row in steps_of(runs, "window") for name in row if "expert" in name]


def test_a_window_hides_part_of_every_prompt(runs: Path) -> None:
    """Otherwise the run would say nothing about windows."""
    assert min(row["lengths/prompt_mean"] for row in steps_of(runs, "window")) > WINDOW


@pytest.mark.parametrize("name", ["truncated", "truncated_megatron"])
def test_the_trainer_computes_the_probabilities_of_truncated_sampling(runs: Path, name: str) -> None:
    rows = steps_of(runs, name)
    assert len(rows) == STEPS
    for row in rows:
        assert row["rollout/prob_diff_max"] < AGREEMENT and row["rollout/top_k_overflow"] == 0.0
        assert 1.0 < row["rollout/top_k_ids"] < 5.0
        assert row["policy/ratio_max"] == pytest.approx(1.0, abs=1e-6), "the updates are over the same ids"
        assert row["policy/entropy"] < torch.log(torch.tensor(5.0)), "of at most five ids"
        assert row["policy/grad_norm"] > 0 and row["critic/grad_norm"] > 0 and row["policy/skipped_updates"] == 0
    # The reference starts as the policy and is held against it over the same ids.
    assert abs(rows[0]["kl/per_token"]) < AGREEMENT < abs(rows[1]["kl/per_token"])


def test_without_replay_the_probabilities_are_of_the_whole_vocabulary(runs: Path) -> None:
    """Half of the comparison is all that there is then, and the responses are the same."""
    for row, replayed in zip(steps_of(runs, "not_replayed")[:1], steps_of(runs, "truncated_megatron")):
        assert row["rollout/prob_diff_max"] < AGREEMENT and "rollout/top_k_ids" not in row
        assert row["reward/score_mean"] == replayed["reward/score_mean"]
        assert row["policy/entropy"] > 1.5 * replayed["policy/entropy"]
        assert row["policy/ratio_max"] == pytest.approx(1.0, abs=1e-6)
