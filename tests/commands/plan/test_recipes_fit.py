"""The GSM8K recipes with the published shapes of their models: parameter counts, and whether they fit on 80 GiB GPUs."""

from pathlib import Path

import pytest

from megappo.commands.plan.estimate import make_plan
from megappo.commands.plan.memory import GIB, count_parameters
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.models.hf_config import arch_of
from megappo.parallel.layout import ParallelLayout
from megappo.trainer.prepare.layouts import check_layouts

CONFIGS = Path(__file__).parents[3] / "configs"


def facts(architecture, layers, hidden, heads, kv_heads, ffn, vocab, tied, **more):
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 4096,
        **more,
    }


# recipe, shape by the model's config.json, number of parameters by its weight files
RECIPES = [
    ("gsm8k_qwen2.5_0.5b", facts("Qwen2ForCausalLM", 24, 896, 14, 2, 4864, 151936, True), 494_032_768),
    ("gsm8k_qwen2.5_1.5b_megatron", facts("Qwen2ForCausalLM", 28, 1536, 12, 2, 8960, 151936, True), 1_543_714_304),
    ("gsm8k_qwen2.5_1.5b_fsdp2", facts("Qwen2ForCausalLM", 28, 1536, 12, 2, 8960, 151936, True), 1_543_714_304),
    ("gsm8k_llama3.2_1b", facts("LlamaForCausalLM", 16, 2048, 32, 8, 8192, 128256, True, head_dim=64), 1_235_814_400),
    ("gsm8k_llama3.2_1b_multi", facts("LlamaForCausalLM", 16, 2048, 32, 8, 8192, 128256, True, head_dim=64), 1_235_814_400),
    ("gsm8k_deepseek_7b_chat", facts("LlamaForCausalLM", 30, 4096, 32, 32, 11008, 102400, False), 6_910_365_696),
    ("gsm8k_deepseek_7b_verl", facts("LlamaForCausalLM", 30, 4096, 32, 32, 11008, 102400, False), 6_910_365_696),
]


@pytest.mark.parametrize("name, shape, parameters", RECIPES, ids=[recipe[0] for recipe in RECIPES])
def test_a_recipe_fits_on_its_gpus_and_not_on_a_tenth_of_them(name, shape, parameters):
    config = load_config(CONFIGS / f"{name}.yaml")
    arch = arch_of(shape)
    assert count_parameters(arch, ParallelLayout(1), 0).total == parameters
    archs = dict.fromkeys(("policy", "critic", "reference"), arch)
    world = config.run.num_ranks
    layouts = check_layouts(config, archs, world)
    plan = make_plan(config, archs, layouts, world, "cuda", 80 * GIB)
    assert not plan.warnings
    assert plan.rollout.kv_cache // plan.rollout.kv_bytes_per_token >= plan.step.max_sequence_tokens
    small = make_plan_on(config, archs, layouts, world, plan.certain(plan.fullest_rank()) // 10)
    assert small is None, "negative control"


def make_plan_on(config, archs, layouts, world, memory):
    """The plan, None if it is refused."""
    try:
        return make_plan(config, archs, layouts, world, "cuda", memory)
    except ConfigError:
        return None
