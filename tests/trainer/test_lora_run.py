"""PPO with adapters for policy and critic on two ranks, under both engines: the reference in the policy, small checkpoints that
resume to the bit, of a base in 8 bits too, the push into vLLM, exports, and a critic that starts from another run's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers

from megappo.config.schema import RolloutConfig
from tests.trainer.small_run import bare, branch_off, run_many, small_config, write_small_task
from tests.worlds import spawn_world

STEPS, MINI_BATCH = 2, 16
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.1}
FSDP2 = {"policy.engine": "fsdp2", "critic.engine": "fsdp2", "policy.parallel": {}, "critic.parallel": {}}
IN_8_BITS = {**LORA, "base_bits": 8}
BOTH = {**FSDP2, "policy.lora": IN_8_BITS, "critic.lora": IN_8_BITS}
# Without dropout the same numbers come from a reference of its own, and from vLLM.
PLAIN = {**BOTH, "policy.lora": {**LORA, "dropout": 0.0}, "critic.lora": {**LORA, "dropout": 0.0}}
MEGATRON = {name: keys for name, keys in PLAIN.items() if name not in FSDP2}  # policy tp 2, critic pp 2
VLLM = {"rollout.engine": "vllm", "rollout.kv_cache_gib": 0.03}
RUNS: dict[str, dict[str, Any]] = {
    "lora": BOTH,
    "shared": PLAIN,
    "copied": PLAIN | {"reference.engine": "fsdp2", "reference.model": "{model}"},
    "full": FSDP2,
    "megatron": MEGATRON,
    # Both ends of a push of weights in 8 bits, and both engines with them, cut over tp.
    "vllm": MEGATRON
    | VLLM
    | {"policy.parallel": {"tp": 2, "sequence_parallel": True}, "policy.recompute": "full"}
    | {"policy.lora": {**IN_8_BITS, "dropout": 0.0}}
    | {"critic.engine": "fsdp2", "critic.lora": IN_8_BITS, "critic.parallel": {"tp": 2}},
    "separate": PLAIN | VLLM | {"rollout.adapter": "separate", "policy.parallel": {"tp": 2, "sequence_parallel": True}},
    # Rank 0 has the policy, rank 1 the engine: neither has both ends.
    "apart": MEGATRON
    | VLLM
    | {"rollout.adapter": "separate", "policy.ranks": "0", "critic.ranks": "0", "rollout.ranks": "1"}
    | {"policy.parallel": {}, "critic.parallel": {}},
    "unmerged": MEGATRON | VLLM | {"rollout.max_prob_diff": 1.0},
    "critic": PLAIN | {"critic.checkpoint": "{runs}/shared", "critic.optimizer": {"lr": 1e-12}, "trainer.steps": 1},
}
SAVES = ("lora", "shared", "full", "megatron")
EXPORTS = ("lora", "shared", "megatron", "interrupted", "interrupted_megatron")


def unmerged_push() -> Any:
    from megappo.engine.megatron import MegatronEngine

    return mock.patch.object(MegatronEngine, "merged_parameters", MegatronEngine.named_parameters)


FAULTS: dict[str, Callable[[], Any]] = {"unmerged": unmerged_push}


def config_of(folder: Path, name: str, kind: str) -> dict[str, Any]:
    optimizer = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.01}
    changes = {"rollout.engine": "megatron", "policy.optimizer": optimizer, "critic.optimizer": optimizer}
    changes |= {"algorithm.mini_batch_size": MINI_BATCH, **RUNS[kind]}
    places = {"{model}": str(folder / "model"), "{runs}": str(folder / "runs")}
    for key, value in changes.items():
        for place, path in places.items() if isinstance(value, str) else ():
            changes[key] = str(changes[key]).replace(place, path)
    config = bare(small_config(folder, name, steps=STEPS, **changes), saves=name in SAVES)
    config["checkpoint"]["export_at_end"] = name in EXPORTS
    if "lora" in config["policy"] and "model" not in config["reference"]:
        del config["reference"]
    return config


def run(folder: Path, name: str, kind: str, *, resume: bool = False) -> None:
    run_many(torch.distributed.get_rank(), [(config_of(folder, name, kind), resume)])


def run_all(rank: int, folder: Path) -> dict[str, str]:
    """Messages of refused runs."""
    for name in RUNS:
        with FAULTS.get(name, contextlib.nullcontext)():
            run(folder, name, name)
    branch_off(folder, "lora", "interrupted", 1)
    found = {"resumed without adapters": message(lambda: run(folder, "interrupted", "full", resume=True))}
    RUNS["other_rank"] = {**BOTH, "policy.lora": {**IN_8_BITS, "rank": 3}}
    RUNS["other_base"] = {**BOTH, "policy.lora": LORA}
    found["resumed with another rank"] = message(lambda: run(folder, "interrupted", "other_rank", resume=True))
    found["resumed on another base"] = message(lambda: run(folder, "interrupted", "other_base", resume=True))
    run(folder, "interrupted", "lora", resume=True)
    branch_off(folder, "megatron", "interrupted_megatron", 1)
    run(folder, "interrupted_megatron", "megatron", resume=True)
    RUNS["from_full"] = {**BOTH, "critic.checkpoint": f"{folder}/runs/full"}
    found["critic from a full one"] = message(lambda: run(folder, "from_full", "from_full"))
    # Each role on one rank of the two: the checkpoint is of two.
    RUNS["placed"] = {**PLAIN, "policy.ranks": "0", "rollout.ranks": "0", "critic.ranks": "1"}
    branch_off(folder, "shared", "placed", 1)
    run(folder, "placed", "placed", resume=True)
    with mock.patch("megappo.engine.fsdp2_lora.Adapters.off", lambda self: mock.MagicMock()):
        run(folder, "reference_on", "shared")
    return found


def message(action: Any) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("lora")
    write_small_task(folder)
    return folder, spawn_world(run_all, 2, folder)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "policy/loss" in row]


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "runs" / name / "export").state_dict()


def checkpoint_bytes(folder: Path, name: str, role: str) -> int:
    return sum(file.stat().st_size for file in (folder / "runs" / name / "checkpoints" / f"step-{STEPS}").rglob(f"{role}/*"))


NUMBERS = (
    "policy/loss",
    "policy/grad_norm",
    "policy/entropy",
    "critic/loss",
    "critic/grad_norm",
    "critic/value_mean",
    "kl/per_token",
)


def test_the_reference_in_the_policy_gives_the_numbers_of_one_of_its_own(task) -> None:
    folder, _ = task
    for ours, theirs in zip(rows(folder, "shared"), rows(folder, "copied"), strict=True):
        assert {k: ours[k] for k in NUMBERS} == {k: theirs[k] for k in NUMBERS}
        assert ours["perf/work_tflop/logprobs/reference"] == theirs["perf/work_tflop/logprobs/reference"] > 0
    last = rows(folder, "shared")[-1]
    assert abs(last["kl/per_token"]) > 1e-4, "the policy has moved"


def test_a_reference_with_the_adapters_on_would_be_noticed(task) -> None:
    """Negative control: its KL is 0 to the last step."""
    folder, _ = task
    assert all(abs(row["kl/per_token"]) < 1e-7 for row in rows(folder, "reference_on"))


def test_a_checkpoint_loads_on_other_ranks_and_gives_the_same_run(task) -> None:
    """Of roles on ranks of their own."""
    folder, _ = task
    found, wanted = rows(folder, "placed"), rows(folder, "shared")
    assert [row["step"] for row in found] == [1, 2]
    for ours, theirs in zip(found, wanted, strict=True):
        assert {k: ours[k] for k in NUMBERS} == pytest.approx({k: theirs[k] for k in NUMBERS}, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("names", [("lora", "interrupted"), ("megatron", "interrupted_megatron")])
def test_a_checkpoint_resumes_to_the_same_bits(task, names: tuple[str, str]) -> None:
    folder, _ = task
    whole, resumed = (weights(folder, name) for name in names)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    last, again = (rows(folder, name)[-1] for name in names)
    assert all(last[name] == again[name] for name in NUMBERS)


def test_both_engines_give_the_same_run(task) -> None:
    folder, _ = task
    ours, theirs = rows(folder, "megatron"), rows(folder, "shared")
    assert len(ours) == len(theirs) == STEPS
    for found, wanted in zip(ours, theirs):
        assert {k: found[k] for k in NUMBERS} == pytest.approx({k: wanted[k] for k in NUMBERS}, rel=1e-4, abs=1e-5)
    assert min(abs(theirs[-1][k]) for k in ("policy/grad_norm", "critic/loss", "kl/per_token")) > 1e-4, "something is compared"
    ours, theirs = weights(folder, "megatron"), weights(folder, "shared")
    before = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert all(torch.allclose(ours[name], theirs[name], atol=2e-4) for name in before)
    assert max(float((ours[name] - tensor).abs().max()) for name, tensor in before.items()) > 1e-3


def test_checkpoints_hold_adapters_only_and_say_so(task) -> None:
    folder, _ = task
    for role in ("policy", "critic"):
        assert checkpoint_bytes(folder, "lora", role) < checkpoint_bytes(folder, "full", role) / 2  # the format takes 0.3 MB
    manifest = json.loads((folder / "runs" / "lora" / "checkpoints" / f"step-{STEPS}" / "manifest.json").read_text())
    facts = manifest["facts"]["lora"]["policy"]
    assert (
        (facts["rank"], facts["base_bits"]) == (4, 8)
        and facts["base"]["path"] == str(folder / "model")
        and len(facts["base"]["sha256"]) == 64
    )
    assert manifest["facts"]["reference"] == facts["base"]


REFUSALS = {
    "resumed without adapters": "was written with critic.lora.rank = 4, this run has null",
    "resumed with another rank": "was written with policy.lora.rank = 4, this run has 3",
    "resumed on another base": "was written with policy.lora.base_bits = 8, this run has null",
    "critic from a full one": "its critic trained all weights, and critic.lora is set: remove it, or export that critic",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused_in_one_line(task, name: str) -> None:
    _, messages = task
    for found in messages:
        assert REFUSALS[name] in found[name] and "\n" not in found[name]


def test_a_critic_starts_from_the_adapters_of_another_run(task) -> None:
    folder, _ = task
    fresh, started = rows(folder, "shared")[0]["critic/value_mean"], rows(folder, "critic")[0]["critic/value_mean"]
    assert fresh == 0.0 and abs(started) > 1e-3


@pytest.mark.parametrize("name", ["vllm", "separate", "apart"])
def test_vllm_samples_with_the_policy(task, name: str) -> None:
    folder, _ = task
    for row in rows(folder, name):
        assert row["rollout/push_verified"] == 1.0
        assert row["rollout/prob_diff_mean"] < 1e-4, "vLLM's probabilities are the policy's"
    assert abs(rows(folder, name)[-1]["kl/per_token"]) > 1e-4, "which are not those of the base"


def test_a_push_without_the_adapters_would_be_noticed(task) -> None:
    """Negative control: before the first update the adapters change nothing, after it the run would stop by itself."""
    first, last = rows(task[0], "unmerged")
    limit = RolloutConfig.model_fields["max_prob_diff"].default
    assert first["rollout/prob_diff_mean"] < 1e-4 and last["rollout/prob_diff_mean"] > limit


def test_a_separate_adapter_is_all_that_travels_after_the_first_push(task) -> None:
    folder, _ = task
    merged, separate = (rows(folder, name)[-1] for name in ("vllm", "separate"))
    # Two layers, 64 wide, of 96 columns: A and B of rank 4 in fp32, in whole rows of the buffer.
    adapter = -(-4 * 4 * 2 * (4 * (64 + 64) + 3 * (64 + 96)) // 4096) * 4096
    assert separate["rollout/push_bytes_received"] == adapter < merged["rollout/push_bytes_received"]


def test_the_export_is_the_merged_model_with_its_adapter(task) -> None:
    folder, _ = task
    export, ids = folder / "runs" / "shared" / "export", torch.arange(3, 20)[None]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        before = base(input_ids=ids).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(export)(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(base, export / "adapter")(input_ids=ids).logits
    assert float((merged - adapted).abs().max()) < 1e-4 < 1e-3 < float((merged - before).abs().max())
