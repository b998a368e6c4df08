"""`megappo plan` of models without a family, and what commands say of them that run Megatron's engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from megappo.commands.plan.fsdp2 import score_bytes
from megappo.commands.plan.report import report
from megappo.commands.plan.run import plan_run
from megappo.commands.verify.run import verify
from megappo.config.errors import ConfigError
from megappo.models.attention import group_by_length, plain_attention
from megappo.models.hf_config import arch_for
from tests.config.examples import train_config
from tests.models.any_families import write_any_checkpoint

ROLES = ("policy", "critic", "reference")
KINDS = ("olmo2", "gpt_oss", "deepseek_v3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("any")
    for kind in KINDS:
        write_any_checkpoint(path / kind, kind)
    return path


def config_for(tmp_path: Path, model: Path, *changes: str):
    lengths = ["data.max_prompt_tokens=64", "rollout.max_response_tokens=64", "rollout.engine=megatron"]
    return train_config(tmp_path, [f"policy.model={model}", *lengths, "algorithm.kl.coef=0.1", *changes])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_the_shards_of_transformers_own_parameters(folder, tmp_path, kind: str, ranks: int) -> None:
    changes = [*(f"{role}.engine=fsdp2" for role in ROLES), "policy.dtype=bf16", f"data.prompts_per_step={4 * ranks}"]
    changes.append(f"algorithm.mini_batch_size={4 * ranks}")
    config = config_for(tmp_path, folder / kind, *changes)
    planned = plan_run(config, ranks, "cpu", shapes_only=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder / kind))
    shards = sum(one.chunk(ranks)[0].numel() for one in model.parameters())
    policy = planned.plan.memory["policy"][0]
    assert (policy.parameters, policy.weights, policy.gradients, policy.optimizer) == (shards, 4 * shards, 4 * shards, 8 * shards)
    assert planned.plan.memory["reference"][0].weights == 2 * shards
    constants = [one for name, one in model.named_buffers() if name in model.state_dict()]
    total = sum(one.numel() for one in (*model.parameters(), *constants))
    assert [kind, f"{total:,}"] == report(planned.plan).split("policy", 1)[1].split()[:2]


def test_the_plan_says_that_layers_are_compiled(folder, tmp_path) -> None:
    roles = [f"{role}.engine=fsdp2" for role in ROLES]
    planned = plan_run(config_for(tmp_path, folder / "olmo2", *roles, "critic.compile=true"), 1, "cpu", shapes_only=True)
    assert report(planned.plan).count("layers are compiled") == 1 and "critic: layers are compiled" in report(planned.plan)


def test_the_plan_moves_inputs_of_recomputed_layers_to_the_host(folder, tmp_path) -> None:
    """All but one of the layers' inputs: 64 numbers in bf16 for each token of a full micro-batch. On the CPU nothing moves."""
    changes = [*(f"{role}.engine=fsdp2" for role in ROLES), "policy.dtype=bf16", "policy.recompute=full", "data.prompts_per_step=4"]
    changes += ["algorithm.mini_batch_size=4", "policy.micro_batch_tokens=256"]
    moved = {}
    for device in ("cuda", "cpu"):
        plain, away = (
            plan_run(config_for(tmp_path, folder / "olmo2", *changes, *more), 1, device, shapes_only=True).plan
            for more in ([], ["policy.recompute=offload"])
        )
        policies = [plan.memory["policy"][0] for plan in (plain, away)]
        moved[device] = policies[0].activations - policies[1].activations
        assert moved[device] == away.host_memory(0) - plain.host_memory(0)
    layers = arch_for(folder / "olmo2", "fsdp2").num_layers
    assert moved == {"cuda": 256 * (layers - 1) * 64 * 2, "cpu": 0} and layers > 1


def test_the_plan_counts_adapters(folder, tmp_path) -> None:
    """Of olmo2: A and B of rank 16 on every linear layer; q 64 x 64, k and v 32 x 64, o 64 x 64, gate, up and down 96 x 64."""
    changes = ["policy.engine=fsdp2", "critic.engine=fsdp2", "policy.lora.rank=16", "policy.dtype=bf16"]
    config = config_for(tmp_path, folder / "olmo2", *changes)
    planned = plan_run(config, 1, "cpu", shapes_only=True)
    adapters = 16 * 2 * (2 * (64 + 64) + 2 * (32 + 64) + 3 * (96 + 64))
    policy = planned.plan.memory["policy"][0]
    assert (policy.gradients, policy.optimizer) == (4 * adapters, 8 * adapters)
    assert policy.weights == 2 * (policy.parameters - adapters) + 4 * adapters
    assert f"policy: trains {adapters:,} parameters beside a frozen model (lora.rank 16)" in report(planned.plan)


LORA_REFUSED = [
    (
        "olmo2",
        ["policy.lora.targets=[q_porj]"],
        'targets = ["q_porj"]: q_porj matches no linear layer; did you mean',
    ),
    (
        "gpt_oss",
        ["policy.lora.targets=[experts.1.down_proj]"],
        "of model.layers.0.mlp.experts.down_proj 1 of 5 experts are named; name down_proj, which is of all of them",
    ),
    (
        "gpt_oss",
        ["policy.lora.targets=[router]"],
        "router matches no linear layer; name some of down_proj, gate_up_proj, k_proj, o_proj",
    ),
    (
        "deepseek_v3",
        ["policy.lora.targets=[shared_experts.down_proj]"],
        "shared_experts.down_proj is called as the layers of experts, for which PEFT would take it",
    ),
    (
        "olmo2",
        ["policy.lora.rank=16", "rollout.engine=vllm", "rollout.adapter=separate"],
        'rollout.adapter = "separate": vLLM\'s names of the layers of this olmo2 model are not known; set it to merged',
    ),
]


@pytest.mark.parametrize("kind, changes, words", LORA_REFUSED)
def test_adapters_that_a_model_cannot_have_are_refused(folder, tmp_path, kind: str, changes: list[str], words: str) -> None:
    roles = [f"{role}.engine=fsdp2" for role in ROLES if role != "reference"]
    with pytest.raises(ConfigError) as refused:
        plan_run(config_for(tmp_path, folder / kind, *roles, *changes), 1, "cpu", shapes_only=True)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("softcap, with_sinks", [(2.0, False), (None, True)])
def test_scores_in_memory_are_counted(folder, softcap: float | None, with_sinks: bool) -> None:
    """Bytes that autograd keeps for one layer: at least the softmax in fp32, at most what the plan says."""
    arch, length = arch_for(folder / "gpt_oss", "fsdp2"), 96
    assert arch.keeps_scores and not arch_for(folder / "olmo2", "fsdp2").keeps_scores
    q, k, v = (torch.randn(2 * length, arch.num_heads, 16, requires_grad=True) for _ in range(3))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    sinks = torch.randn(arch.num_heads) if with_sinks else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        plain_attention(q, k, v, group_by_length([0, length, 2 * length]), 0.25, softcap=softcap, sinks=sinks)
    softmax = 4 * arch.num_heads * 2 * length * length
    _, most = score_bytes(arch, 2 * length, length, 4, "full")
    assert softmax <= sum(kept.values()) <= most
    assert score_bytes(arch, 2 * length, length, 4, "none")[1] > most
    assert score_bytes(arch_for(folder / "olmo2", "fsdp2"), 2 * length, length, 4, "none") == (0, 0)


def test_engine_megatron_says_that_fsdp2_runs_the_model(folder, tmp_path) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_run(config_for(tmp_path, folder / "olmo2"), 1, "cpu", shapes_only=True)
    text = str(refused.value)
    assert text.startswith("policy.model = ") and "Olmo2ForCausalLM is not supported" in text and "\n" not in text
    assert text.endswith("engine fsdp2 runs any causal language model of transformers")


def test_verify_refuses_a_model_that_one_megatron_rank_cannot_run(folder, tmp_path) -> None:
    config = config_for(tmp_path, folder / "olmo2", *(f"{role}.engine=fsdp2" for role in ROLES))
    with pytest.raises(ConfigError, match="policy.model = .*verify compares with one rank of engine megatron, which cannot run it"):
        verify(config, "cpu", max_ranks=2)
