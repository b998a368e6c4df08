"""The gated delta rule by chunks against its recurrence in fp64, and what a config says of delta nets."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megappo.commands.plan.memory import count_parameters
from megappo.config.role_sections import ParallelConfig, PolicyConfig
from megappo.models.arch import check_cp, check_tp
from megappo.models.delta import delta_rule
from megappo.models.flops import forward_flops
from megappo.models.hf_config import arch_for, arch_of
from megappo.models.hf_tensors import CheckpointReader, read_box
from megappo.models.pieces import Box
from megappo.models.weight_check import check_headers
from megappo.models.weight_map import hf_tensors
from megappo.parallel.layout import ParallelLayout
from megappo.trainer.prepare.layouts import fsdp2_problems
from tests.models.checkpoints import hf_config, write_checkpoint
from tests.trainer.public_models import facts_of

SEQUENCES, LENGTH, KEY_HEADS, SHARED, KEY_DIM, VALUE_DIM = 2, 150, 2, 3, 16, 12


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """arXiv:2412.06464, equation 10, token by token."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(SHARED, dim=2) for x in (query * KEY_DIM**-0.5, key))
    state, outputs = torch.zeros(SEQUENCES, KEY_HEADS * SHARED, VALUE_DIM, KEY_DIM, dtype=value.dtype), []
    for t in range(LENGTH):
        k, b = key[:, t, :, None, :], beta[:, t, :, None, None]
        erased = state @ (torch.eye(KEY_DIM, dtype=value.dtype) - b * k.mT @ k)
        state = decay[:, t, :, None, None].exp() * erased + b * value[:, t, :, :, None] @ k
        outputs.append((state @ query[:, t, :, :, None])[..., 0])
    return torch.stack(outputs, dim=1)


@pytest.fixture(scope="module")
def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, *channels: int) -> Tensor:
        return torch.randn(SEQUENCES, LENGTH, heads, *channels, generator=generator, dtype=torch.float64).requires_grad_()

    values = KEY_HEADS * SHARED
    decay, beta = (normal(values).detach().sigmoid() for _ in range(2))
    keys = [normal(KEY_HEADS, KEY_DIM) for _ in range(2)]
    return [*keys, normal(values, VALUE_DIM), decay.log().requires_grad_(), beta.requires_grad_()]


def results(rule, inputs: list[Tensor], **settings: int) -> list[Tensor]:
    """Outputs, and gradients of every input."""
    out = rule(*inputs, **settings)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("chunk", [64, 16, 1000])
def test_the_rule_by_chunks_is_the_recurrence(inputs, chunk):
    """The last chunk of 150 tokens is not full. In fp64 to its rounding, in fp32 to that of fp32."""
    wanted = results(recurrence, inputs)
    for found, expected in zip(results(delta_rule, inputs, chunk=chunk), wanted, strict=True):
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-13
    narrow = [x.detach().float().requires_grad_() for x in inputs]
    for found, expected in zip(results(delta_rule, narrow, chunk=chunk), wanted, strict=True):
        assert float((found - expected).abs().max() / expected.abs().max()) < 5e-6


def test_a_rule_that_forgets_nothing_is_noticed(inputs):
    """Negative control."""
    query, key, value, decay, beta = (x.detach() for x in inputs)
    wanted = recurrence(query, key, value, decay, beta)
    assert float((delta_rule(query, key, value, 0 * decay, beta) - wanted).abs().max()) > 0.01


def config(**changes: object) -> dict:
    settings = json.loads(hf_config("qwen3_next", num_hidden_layers=4).to_json_string())
    return {**settings, "architectures": ["Qwen3NextForCausalLM"], **changes}


def test_layers_with_delta_nets_are_every_one_but_some():
    arch = arch_of(config())
    assert arch.delta is not None and arch.delta.layers == (True, False, True, False) and arch.rope.channels == 6
    assert arch_of(config(layer_types=None, full_attention_interval=4)).delta.layers == (True, True, True, False)  # type: ignore[union-attr]
    assert arch_of(config(layer_types=["full_attention"] * 4)).delta is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has 3 entries for num_hidden_layers 4"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention', which is not supported"),
        ({"linear_num_value_heads": 6}, "linear_num_value_heads 6 is not a multiple of linear_num_key_heads 4"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim = 0; a positive integer is needed"),
        ({"attention_bias": True}, "attention_bias = true is not supported"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "leave no layer with experts"),
    ],
)
def test_delta_nets_that_cannot_be_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as refused:
        arch_of(config(**changes))
    assert "\n" not in str(refused.value)


def test_layouts_that_delta_nets_do_not_have_are_refused_with_the_way_out(tmp_path):
    arch = arch_of(config())
    with pytest.raises(ValueError, match="tp 8 does not divide the 4 attention heads"):
        check_tp(arch, 8)
    with pytest.raises(ValueError, match="tp 4 does not divide the 2 key heads of the delta nets.*largest tp that works is 2"):
        check_tp(arch_of(config(linear_num_key_heads=2)), 4)
    for implementation in ("local", "transformer_engine"):  # attention of the latter alone needs no heads for each rank
        with pytest.raises(ValueError, match="cp 4 does not divide .* its delta nets 2 key heads; the sizes that work are 1, 2$"):
            check_cp(arch, 2, 4, implementation)
        check_cp(arch, 2, 2, implementation)
    section = PolicyConfig(model="m", engine="fsdp2", parallel=ParallelConfig(tp=2, cp=2, sequence_parallel=True))
    (tmp_path / "config.json").write_text(json.dumps(config()))
    own = arch_for(tmp_path, "fsdp2")
    tp, cp = fsdp2_problems("policy", section, own)
    assert "policy.parallel.tp = 2: no tensor parallel plan for qwen3_next under fsdp2; set tp to 1" in tp
    assert "policy.parallel.cp = 2: the delta nets" in cp and cp.endswith("set cp to 1, or policy.engine to megatron")
    lengths = torch.tensor([7, 40])
    assert forward_flops(own, lengths, value_head=False) == forward_flops(arch, lengths, value_head=False), "a class as its family"


def test_experts_that_a_checkpoint_holds_in_one_tensor_are_read_one_by_one(tmp_path):
    """As Qwen3.5's published files have them; a save of transformers has a tensor of each."""
    write_checkpoint(tmp_path, "qwen3_5_moe", head_dim=16)
    arch = arch_for(tmp_path, "megatron")
    whole = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    reader = CheckpointReader(tmp_path)
    each = {name: reader.slice(name, shape)[0][:] for name, shape in hf_tensors(arch).items()}
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    for layer in range(arch.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: torch.stack([whole.pop(f"{prefix}{n}.{part}_proj.weight") for n in range(8)]) for part in ("gate", "up", "down")
        }
        whole |= {f"{prefix}gate_up_proj": torch.cat([parts["gate"], parts["up"]], dim=1), f"{prefix}down_proj": parts["down"]}
    save_file(whole, tmp_path / "model.safetensors")
    assert check_headers(tmp_path, arch, None).others == ()
    reader = CheckpointReader(tmp_path)
    for name, shape in hf_tensors(arch).items():
        assert torch.equal(reader.slice(name, shape)[0][:], each[name]), name
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    part = read_box(reader.slice(name, hf_tensors(arch)[name])[0], Box(2, 5, 8, 24))
    assert torch.equal(part, each[name][2:5, 8:24])


# Parameters of all tensors of the published files, and of their towers alone (27 blocks; features are as wide as the model).
PUBLISHED = {"Qwen3.5-27B": (27_781_427_952, 460_730_096), "Qwen3.5-35B-A3B": (35_951_822_704, 446_571_248)}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_model_has_its_parameters(model: str):
    """The files' further layer is one with attention, behind a product of two hidden states and three norms."""
    arch, (total, tower) = arch_of(facts_of(model)), PUBLISHED[model]
    whole, fewer = (
        count_parameters(one, ParallelLayout(1), 0).total for one in (arch, replace(arch, num_layers=arch.num_layers - 1))
    )
    further = whole - fewer + 2 * arch.hidden_size**2 + 3 * arch.hidden_size
    assert arch.delta is not None and arch.delta.layers[-4:] == (True, True, True, False)
    assert whole + further + tower == total


def test_a_gate_that_a_config_takes_away_is_refused():
    settings = json.loads(hf_config("qwen3_5").to_json_string()) | {"architectures": ["Qwen3_5ForCausalLM"]}
    assert arch_of(settings).output_gate
    with pytest.raises(ValueError, match="attn_output_gate false is not supported"):
        arch_of(settings | {"attn_output_gate": False})


def test_the_language_model_of_a_composite_is_read_from_its_text_config():
    text = json.loads(hf_config("qwen3_5").to_json_string())
    rope = text["rope_parameters"] | {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text | {"rope_parameters": rope}}
    assert arch_of(config | {"tie_word_embeddings": True}).rope == arch_of(text | {"architectures": ["Qwen3_5ForCausalLM"]}).rope
