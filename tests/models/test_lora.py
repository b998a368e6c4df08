"""Facts of adapters: the modules, PEFT's start, and a weight that is read with its adapter added."""

from __future__ import annotations

import math

import peft
import pytest
import torch

from megappo.config.role_sections import LoraConfig
from megappo.models.lora import Adapted, adapted_modules, adapter_shapes, initial_a, is_adapter, part_of, scaling
from megappo.models.peft_files import adapter_config

LAYER = "model.layers.{}."
SHAPES = {"self_attn.q_proj.weight": (8, 6), "self_attn.q_proj.bias": (8,), "mlp.down_proj.weight": (6, 12), "norm.weight": (6,)}
DENSE = {
    "model.embed_tokens.weight": (31, 6),
    **{LAYER.format(layer) + name: shape for layer in range(2) for name, shape in SHAPES.items()},
    "lm_head.weight": (31, 6),
}
EXPERTS = {
    "model.layers.0.mlp.gate.weight": (2, 6),
    "model.layers.0.mlp.experts.0.up_proj.weight": (4, 6),
    "model.layers.0.self_attn.q_proj.weight": (8, 6),
}
SHARED = {"model.layers.0.mlp.shared_experts.up_proj.weight": (4, 6)}
# All experts in one tensor, and a router that is no linear layer (`tensors_to_adapt` leaves it out).
JOINED = {"model.layers.0.mlp.experts.up_proj": (2, 6, 4), "model.layers.0.self_attn.q_proj.weight": (8, 6)}
Q = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]


@pytest.mark.parametrize(
    "targets, wanted",
    [
        (("q_proj",), Q),
        (("self_attn.q_proj",), Q),
        (("layers.1.self_attn.q_proj",), Q[1:]),
        ("all-linear", [Q[0], "model.layers.0.mlp.down_proj", Q[1], "model.layers.1.mlp.down_proj"]),
        (("down_proj", "q_proj"), [Q[0], "model.layers.0.mlp.down_proj", Q[1], "model.layers.1.mlp.down_proj"]),
    ],
)
def test_targets_are_endings_of_names_of_linear_layers(targets, wanted) -> None:
    found = adapted_modules(DENSE, targets)
    assert list(found) == wanted
    assert found[wanted[0]] == ((8, 6) if wanted[0].endswith("q_proj") else (6, 12))


@pytest.mark.parametrize(
    "tensors, targets, words",
    [
        (DENSE, ("q_porj",), "q_porj matches no linear layer; did you mean q_proj or down_proj?"),
        (DENSE, ("q_proj", "proj"), "proj matches no linear layer"),  # an ending of a part is no ending of a name
        (DENSE, ("lm_head",), "lm_head matches no linear layer; name some of down_proj, q_proj, or all-linear"),
        (DENSE, ("norm",), "norm matches no linear layer"),
        (EXPERTS, "all-linear", "which have no adapters; name others: q_proj"),
        (EXPERTS, ("q_proj", "up_proj"), "mlp.experts.0.up_proj is of a layer of experts"),
        (EXPERTS, ("gate",), "mlp.gate is of a layer of experts"),
        (JOINED, "all-linear", "model.layers.0.mlp is a layer of experts, which have no adapters; name others: q_proj"),
        (EXPERTS | SHARED, ("shared_experts.up_proj",), "is called as the layers of experts, for which PEFT would take it"),
        ({"model.layers.0.norm.weight": (6,)}, "all-linear", "no linear layer that could have an adapter; train all weights"),
    ],
)
def test_targets_that_match_nothing_or_experts_are_refused(tensors, targets, words) -> None:
    with pytest.raises(ValueError) as caught:
        adapted_modules(tensors, targets)
    assert words in str(caught.value)


def test_attention_beside_experts_may_be_adapted() -> None:
    assert list(adapted_modules(EXPERTS, ("q_proj",))) == Q[:1]


def test_names_and_shapes_of_adapters() -> None:
    shapes = adapter_shapes(adapted_modules(DENSE, ("q_proj",)), 3)
    assert shapes[Q[1] + ".lora_A.weight"] == (3, 6) and shapes[Q[1] + ".lora_B.weight"] == (8, 3) and len(shapes) == 4
    assert all(map(is_adapter, shapes)) and not any(map(is_adapter, DENSE))


def test_scaling() -> None:
    assert scaling(LoraConfig(rank=16, alpha=24)) == 1.5


def test_alpha_can_say_the_scale_of_rslora(tmp_path) -> None:
    """A PEFT layer with use_rslora scales by alpha / sqrt(rank); ours, and what we write, by alpha * sqrt(rank) / rank."""
    lora, targets = LoraConfig(rank=16, alpha=24 * math.sqrt(16), targets=("linear",)), ["linear"]
    written = {key: adapter_config(lora, [], tmp_path)[key] for key in ("r", "lora_alpha", "use_rslora", "target_modules")}
    scales = []
    for settings in (peft.LoraConfig(r=16, lora_alpha=24, use_rslora=True, target_modules=targets), peft.LoraConfig(**written)):
        model = peft.get_peft_model(torch.nn.ModuleDict({"linear": torch.nn.Linear(2, 2)}), settings)
        scales.append(model.base_model.model["linear"].scaling["default"])
    assert scales == [6.0, scaling(lora)]


def test_a_starts_as_in_peft_from_seed_and_module_alone() -> None:
    a = initial_a(Q[0], 256, 64, seed=5)
    assert a.shape == (64, 256) and a.dtype == torch.float32
    bound = math.sqrt(6 / ((1 + 5) * 256))  # kaiming_uniform_(a=sqrt(5))
    assert a.abs().max() <= bound and abs(float(a.std()) / (bound / math.sqrt(3)) - 1) < 0.02
    torch.manual_seed(0)
    assert torch.equal(a, initial_a(Q[0], 256, 64, seed=5))
    assert not torch.equal(a, initial_a(Q[1], 256, 64, seed=5)) and not torch.equal(a, initial_a(Q[0], 256, 64, seed=6))


def test_a_part_of_a_weight_has_its_part_of_the_adapter() -> None:
    torch.manual_seed(1)
    base, a, b = torch.randn(8, 6).bfloat16(), torch.randn(3, 6), torch.randn(8, 3)
    merged = base.double() + 0.5 * b.double() @ a.double()
    part = part_of(Adapted(base, a, b, 0.5), 0, 2, 1, 4, 3)
    assert part.dtype == torch.float32
    torch.testing.assert_close(part.double(), merged[2:6, 1:4], rtol=1e-6, atol=1e-6)
    assert torch.equal(part_of(base, 0, 2, 1, 4, 3), base[2:6, 1:4])
