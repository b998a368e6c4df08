import dataclasses
import json
import math

import pytest
import torch
import transformers

from megappo.models.arch import Rope
from megappo.models.hf_config import arch_of, read_arch
from megappo.models.weight_map import hf_tensors
from megappo.rollout.vllm_limits import check_vllm
from tests.models.cases import LLAMA
from tests.models.checkpoints import CASES, write_checkpoint

MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3_MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
MINISTRAL = {**LLAMA, "architectures": ["Ministral3ForCausalLM"]}
QWEN2_WINDOW = {**QWEN2, "use_sliding_window": True, "sliding_window": 32}
MIXED = ["full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("case", CASES)
def test_facts_equal_those_of_the_transformers_model(case, tmp_path):
    """Oracle: the modules that transformers builds from the same config, not its config."""
    stem, config = CASES[case]
    model = write_checkpoint(tmp_path, case)
    arch = read_arch(tmp_path)
    layer = next(layer for layer in model.model.layers if hasattr(layer, "self_attn"))  # others have delta nets
    assert arch.architecture == f"{stem}ForCausalLM" and arch.num_layers == len(model.model.layers)
    assert (arch.vocab_size, arch.hidden_size) == tuple(model.model.embed_tokens.weight.shape)
    assert arch.num_heads * arch.query_rows == layer.self_attn.q_proj.out_features
    assert arch.num_kv_heads * arch.head_dim == layer.self_attn.k_proj.out_features
    assert arch.head_dim == layer.self_attn.head_dim and arch.ffn_size == layer.mlp.gate_proj.out_features
    assert arch.qkv_bias == (layer.self_attn.q_proj.bias is not None) and arch.qk_norm == hasattr(layer.self_attn, "q_norm")
    assert arch.tied_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert arch.norm_eps == getattr(layer.input_layernorm, "variance_epsilon", None) or layer.input_layernorm.eps
    assert arch.rope.llama4_beta == model.config.rope_parameters.get("llama_4_scaling_beta")


@pytest.mark.parametrize("stem", ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral"))
def test_keys_that_are_left_out_are_what_transformers_takes(stem):
    """Oracle: the modules that transformers builds from the same keys: head size, key-value heads and epsilon are left out."""
    sizes = dict(hidden_size=1024, num_attention_heads=64, num_hidden_layers=1, intermediate_size=64, vocab_size=64)
    text = {**sizes, "max_position_embeddings": 64}
    if stem == "Qwen3Moe":
        text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    config = getattr(transformers, f"{stem}Config")(**text)
    with torch.device("meta"):
        layer = getattr(transformers, f"{stem}ForCausalLM")(config).model.layers[0]
    arch = arch_of({**text, "architectures": [f"{stem}ForCausalLM"]})
    assert arch.num_heads * arch.head_dim == layer.self_attn.q_proj.out_features
    assert arch.num_kv_heads * arch.head_dim == layer.self_attn.k_proj.out_features
    assert arch.norm_eps == layer.input_layernorm.variance_epsilon


_LINEAR = {"rope_type": "linear", "factor": 8.0}
# Gemma 3's published files, which leave out what transformers has as a default; parameters without and with the embedding, and
# layers without the window.
GEMMA3 = {
    "1b": (
        dict(
            architectures=["Gemma3ForCausalLM"],
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            hidden_size=1152,
            intermediate_size=6912,
            max_position_embeddings=32768,
            num_attention_heads=4,
            num_hidden_layers=26,
            num_key_value_heads=1,
            query_pre_attn_scalar=256,
            rope_local_base_freq=10000,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=512,
            sliding_window_pattern=6,
            vocab_size=262144,
        ),
        (697_896_064, 999_885_952, 4),
    ),
    "4b": (
        dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, rope_scaling=_LINEAR, sliding_window=1024),
        (3_209_010_688, 3_880_263_168, 5),
    ),
    "12b": (
        dict(
            hidden_size=3840,
            intermediate_size=15360,
            num_attention_heads=16,
            num_hidden_layers=48,
            num_key_value_heads=8,
            rope_scaling=_LINEAR,
            sliding_window=1024,
        ),
        (10_759_155_456, 11_766_034_176, 8),
    ),
    "27b": (
        dict(
            head_dim=128,
            hidden_size=5376,
            intermediate_size=21504,
            num_attention_heads=32,
            num_hidden_layers=62,
            num_key_value_heads=16,
            query_pre_attn_scalar=168,
            rope_scaling=_LINEAR,
            sliding_window=1024,
        ),
        (25_599_716_096, 27_009_346_304, 10),
    ),
}


@pytest.mark.parametrize("size", GEMMA3)
def test_gemma3_is_read_as_published(size):
    """Parameters as in the "Gemma 3 Technical Report" (2025), table 1; the rest as transformers reads the same file."""
    text, facts = GEMMA3[size]
    composite = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**text, "model_type": "gemma3_text"}}
    arch = arch_of(text if "architectures" in text else composite)
    parameters = sum(math.prod(shape) for shape in hf_tensors(arch).values())
    outside = parameters - arch.vocab_size * arch.hidden_size
    assert (outside, parameters, arch.sliding_layers.count(False)) == facts
    theirs = transformers.Gemma3TextConfig(**{key: value for key, value in text.items() if key != "architectures"})
    assert list(arch.sliding_layers) == [kind == "sliding_attention" for kind in theirs.layer_types]
    assert (arch.sliding_window, arch.max_positions) == (theirs.sliding_window, theirs.max_position_embeddings)
    assert arch.softmax_scale == theirs.query_pre_attn_scalar**-0.5 and arch.activation == theirs.hidden_activation
    for rope, kind in ((arch.rope, "full_attention"), (arch.sliding_rope, "sliding_attention")):
        given = theirs.rope_parameters[kind]
        assert (rope.type, rope.theta, rope.factor) == (given["rope_type"], given["rope_theta"], given.get("factor"))
    # What transformers writes, with the keys of both kinds of layers apart, reads the same.
    again = arch_of({**theirs.to_dict(), "architectures": ["Gemma3ForCausalLM"]})
    assert again == dataclasses.replace(arch, architecture="Gemma3ForCausalLM")
    assert check_vllm(arch, 4096, "cuda") is None


def test_older_rope_spelling_reads_the_same():
    old = arch_of({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = arch_of({**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}})
    assert old == new and old.rope == Rope("linear", 5e5, 2.0)


def test_linear_rope_stretches_the_positions_and_the_others_state_them_stretched():
    """As vLLM has it; transformers has no limit."""
    for rope, positions in [
        ({"rope_type": "linear", "factor": 2.5}, 320),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 128),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 128),
        ({"rope_type": "default"}, 128),
    ]:
        arch = arch_of({**LLAMA, "rope_scaling": rope})
        assert (arch.max_positions, check_vllm(arch, positions, "cuda")) == (positions, None)
        with pytest.raises(ValueError, match=f"{positions + 1} tokens, but the model has {positions} positions"):
            check_vllm(arch, positions + 1, "cuda")


def test_a_composite_checkpoint_gives_its_language_model():
    rope = {**YARN, "llama_4_scaling_beta": 0.1, "type": "yarn"}
    text = {**MINISTRAL, "model_type": "ministral3", "tie_word_embeddings": True, "rope_parameters": rope}
    del text["architectures"]
    arch = arch_of({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "vision_config": {}})
    assert arch.family == "ministral3" and arch.tied_embeddings and arch.head_dim == 128
    assert arch == dataclasses.replace(arch_of({**MINISTRAL, **text}), architecture="Mistral3ForConditionalGeneration")


# config, pieces of the message
REFUSED = [
    ({**LLAMA, "architectures": ["GPT2LMHeadModel"]}, ("GPT2LMHeadModel is not supported", "Qwen3ForCausalLM")),
    ({**LLAMA, "architectures": []}, ("no architectures",)),
    ({**LLAMA, "auto_map": {"AutoModel": "x.py"}}, ("auto_map", "never run")),
    ({**LLAMA, "rope_scaling": {"auto_map": {"AutoModel": "x.py"}}}, ("auto_map", "never run")),
    ({**LLAMA, "_attn_implementation_internal": "someone/kernels"}, ("_attn_implementation_internal", "never run")),
    ({**LLAMA, "hidden_act": "gelu"}, ("hidden_act 'gelu'",)),
    ({**LLAMA, "attention_bias": True}, ("attention_bias = true",)),
    ({**LLAMA, "mlp_bias": True}, ("mlp_bias = true",)),
    ({**LLAMA, "attention_dropout": 0.1}, ("attention_dropout 0.1",)),
    ({**LLAMA, "pretraining_tp": 2}, ("pretraining_tp 2",)),
    ({**LLAMA, "hidden_size": "64"}, ("hidden_size = '64'", "positive integer")),
    ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, ("vocab_size = None",)),
    ({**LLAMA, "num_key_value_heads": 3}, ("num_attention_heads 4", "num_key_value_heads 3")),
    ({**LLAMA, "num_key_value_heads": 0}, ("num_key_value_heads = 0", "positive integer")),
    ({**LLAMA, "num_key_value_heads": -2}, ("num_key_value_heads = -2", "positive integer")),
    ({**LLAMA, "rms_norm_eps": None}, ("rms_norm_eps = None", "a number is needed")),
    ({**LLAMA, "head_dim": 0}, ("head_dim = 0", "positive integer")),
    ({**LLAMA, "head_dim": 15}, ("head_dim 15 is odd",)),
    ({**LLAMA, "quantization_config": {"quant_method": "awq"}}, ("quantised (awq)",)),
    ({**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}, ("quantised (mxfp4)", "needs its bf16")),  # gpt-oss alone
    ({**MISTRAL, "sliding_window": 0}, ("sliding_window 0", "positive integer")),
    ({**MISTRAL, "sliding_window": 64, "layer_types": MIXED}, ("sliding_window 64 with layer_types", "set one of them to null")),
    ({**MISTRAL, "sliding_window": 64, "layer_types": ["full_attention"] * 2}, ("sliding_window 64 with layer_types",)),
    ({**QWEN2, "sliding_window": 32, "layer_types": MIXED}, ("use_sliding_window is false",)),
    ({**QWEN2_WINDOW, "layer_types": ["chunked_attention"] * 2}, ("'chunked_attention'", "full_attention")),
    ({**QWEN2_WINDOW, "layer_types": [*MIXED, "full_attention"]}, ("3 entries", "num_hidden_layers 2")),
    ({**LLAMA, "sliding_window": 64}, ("sliding_window 64", "llama", "null")),
    ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("rope type 'dynamic'", "linear, llama3, yarn")),
    ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, ("'linear' needs the key 'factor'",)),
    ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, ("'high_freq_factor'",)),
    ({**LLAMA, "rope_scaling": {**YARN, "surprise": 1}}, ("rope key 'surprise'", "'yarn'")),
    ({**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, ("per layer type",)),
    ({**LLAMA, "partial_rotary_factor": 0.5}, ("partial_rotary_factor 0.5",)),
    ({**LLAMA, "rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}, ("llama_4_scaling_beta is 0.1",)),
    ({**MINISTRAL, "rope_parameters": YARN}, ("llama_4_scaling_beta is None",)),
    ({**GEMMA3["1b"][0], "hidden_activation": "gelu"}, ("hidden_activation 'gelu'", "only gelu_pytorch_tanh is")),
    ({**GEMMA3["1b"][0], "final_logit_softcapping": 30.0}, ("final_logit_softcapping 30.0", "gemma3_text")),
    ({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "gemma"}}, ("'gemma'", "ministral3")),
]


@pytest.mark.parametrize("config, expected", REFUSED, ids=[r[1][0].replace(" ", "_") for r in REFUSED])
def test_what_is_not_implemented_is_refused_in_one_line(config, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as error:
        read_arch(tmp_path)
    assert "\n" not in str(error.value) and all(part in str(error.value) for part in (*expected, str(tmp_path)))


@pytest.mark.parametrize(
    "config, kv_heads",
    [
        (LLAMA, 2),
        ({**LLAMA, "num_key_value_heads": None}, 4),
        ({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, 4),
        ({k: v for k, v in {**MISTRAL, "num_attention_heads": 8}.items() if k != "num_key_value_heads"}, 8),
        ({**MISTRAL, "num_attention_heads": 4, "num_key_value_heads": None}, 4),
    ],
)
def test_kv_heads_that_are_not_written_are_the_familys(config, kv_heads):
    assert arch_of(config).num_kv_heads == kv_heads


@pytest.mark.parametrize(
    "config",
    [
        {**MISTRAL, "sliding_window": 128},
        {**QWEN2, "use_sliding_window": False, "sliding_window": 32},
        {**QWEN2_WINDOW, "layer_types": ["full_attention"] * 2},
        QWEN2_WINDOW,
        {**MISTRAL, "layer_types": MIXED},
        {**LLAMA, "pretraining_tp": 1, "attention_bias": False, "rope_scaling": None},
    ],
)
def test_inactive_features_are_accepted(config):
    arch = arch_of(config)
    assert arch.num_layers == 2 and (arch.sliding_window, arch.sliding_layers) == (None, ())


# config, window, layers that have it
WINDOWS = [
    ({**MISTRAL, "sliding_window": 64}, 64, (True, True)),
    ({k: v for k, v in {**MISTRAL, "max_position_embeddings": 32768}.items() if k != "sliding_window"}, 4096, (True, True)),
    ({**MISTRAL, "sliding_window": 64, "layer_types": ["sliding_attention"] * 2}, 64, (True, True)),
    ({**MINISTRAL, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}, "sliding_window": 9}, 9, (True, True)),
    ({**QWEN2_WINDOW, "max_window_layers": 1}, 32, (False, True)),
    ({**QWEN2_WINDOW, "layer_types": MIXED[::-1]}, 32, (True, False)),
    ({**QWEN2, "use_sliding_window": True, "max_window_layers": 0, "max_position_embeddings": 8192}, 4096, (True, True)),
    ({**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}, 32, (True, True)),
]


@pytest.mark.parametrize("config, window, layers", WINDOWS)
def test_the_window_and_its_layers_are_read(config, window, layers):
    arch = arch_of(config)
    assert (arch.sliding_window, arch.sliding_layers) == (window, layers)


@pytest.mark.parametrize("max_window_layers", [0, 1, 3, 4, None])
def test_qwen_windows_are_in_the_layers_that_transformers_gives_them(max_window_layers):
    given = {} if max_window_layers is None else {"max_window_layers": max_window_layers}
    config = {**QWEN2, "num_hidden_layers": 30, "use_sliding_window": True, "sliding_window": 8, **given}
    expected = [kind == "sliding_attention" for kind in transformers.Qwen2Config(**config).layer_types]
    assert list(arch_of(config).sliding_layers) == expected


@pytest.mark.parametrize(
    "content, expected", [(None, "has no config.json"), ("{", "not valid JSON"), ("[]", "JSON list, not an object")]
)
def test_a_bad_config_file_is_named(content, expected, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=expected):
        read_arch(tmp_path)
    with pytest.raises(ValueError, match="is not a directory; `hf download OWNER/NAME --local-dir"):
        read_arch(tmp_path / "absent")
