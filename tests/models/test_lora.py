"""Facts of adapters: the modules, PEFT's start, and a weight that is read with its adapter added."""

from __future__ import annotations

import math
import types
from typing import Any

import peft
import pytest
import torch

from megappo.config.role_sections import LoraConfig
from megappo.models.arch import MoeArch
from megappo.models.lora import (
    Adapted,
    AdaptedExperts,
    adapted_modules,
    adapter_shapes,
    expert_of,
    initial_a,
    is_adapter,
    of_expert,
    part_of,
    products_per_token,
    scaling,
    tensors_to_adapt,
)
from megappo.models.lora_experts import ExpertAdapters, grouped_change
from megappo.models.lora_shards import AdaptedLinear
from megappo.models.peft_files import adapter_config
from megappo.models.pieces import Box
from tests.commands.plan.archs import oss

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
    "model.layers.0.mlp.experts.1.up_proj.weight": (4, 6),
    "model.layers.0.self_attn.q_proj.weight": (8, 6),
}
BOTH = ["model.layers.0.mlp.experts.0.up_proj", "model.layers.0.mlp.experts.1.up_proj"]
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
        (EXPERTS, ("gate",), "mlp.gate chooses or weighs experts, which stays as it is; name others: q_proj"),
        (EXPERTS, ("experts.1.up_proj",), "of model.layers.0.mlp.experts.up_proj 1 of 2 experts are named; name up_proj, which"),
        (
            JOINED,
            "all-linear",
            "mlp is a layer of experts, which have no adapters if one tensor holds them all; name others: q_proj",
        ),
        (JOINED, ("up_proj",), "up_proj matches no linear layer"),
        (EXPERTS | SHARED, ("shared_experts.up_proj",), "is called as the layers of experts, for which PEFT would take it"),
        ({"model.layers.0.norm.weight": (6,)}, "all-linear", "no linear layer that could have an adapter; train all weights"),
    ],
)
def test_targets_that_match_nothing_or_a_part_of_the_experts_are_refused(tensors, targets, words) -> None:
    with pytest.raises(ValueError) as caught:
        adapted_modules(tensors, targets)
    assert words in str(caught.value)


def test_experts_have_adapters_and_attention_may_have_them_alone() -> None:
    assert list(adapted_modules(EXPERTS, ("q_proj",))) == Q[:1]
    assert list(adapted_modules(JOINED, ("q_proj",))) == Q[:1]
    assert list(adapted_modules(EXPERTS, ("up_proj",))) == BOTH
    assert list(adapted_modules(EXPERTS, "all-linear")) == [*BOTH, Q[0]], "but not the router"
    named = [*BOTH, "model.layers.0.mlp.shared_experts.up_proj"]
    assert set(adapted_modules(EXPERTS | SHARED, ("up_proj",))) == {*named}, "as PEFT would"


def test_a_layers_experts_are_one_name_and_a_number() -> None:
    assert expert_of(BOTH[1]) == ("model.layers.0.mlp.experts.up_proj", 1) and expert_of(Q[0]) is None
    assert of_expert("model.layers.0.mlp.experts.up_proj", 1) == BOTH[1]
    assert expert_of("model.layers.0.mlp.shared_experts.up_proj") is None and expert_of(next(iter(JOINED))) is None
    moe = MoeArch(2, 2, 4, norm_topk_prob=True)
    assert products_per_token([*BOTH, Q[0]], moe) == {BOTH[0]: 2, Q[0]: 1}, "of the chosen experts"


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
        model: Any = peft.get_peft_model(torch.nn.ModuleDict({"linear": torch.nn.Linear(2, 2)}), settings)
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


def test_a_part_of_an_experts_weight_has_its_part_of_every_adapter_in_it() -> None:
    """Rows 0 to 3 are of a module without an adapter, 4 to 7 of one, 8 to 11 of another."""
    torch.manual_seed(1)
    base = torch.randn(2, 12, 6)
    blocks = tuple((first, torch.randn(2, 3, 6), torch.randn(2, 4, 3)) for first in (4, 8))
    merged = base.double()
    for first, a, b in blocks:
        merged[:, first : first + 4] += 0.5 * b.double() @ a.double()
    part = part_of(AdaptedExperts(base, blocks, 0.5), 1, 2, 1, 8, 4)
    assert part.dtype == torch.float32
    torch.testing.assert_close(part.double(), merged[1, 2:10, 1:5], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(part_of(AdaptedExperts(base, blocks, 0.5), 0, 0, 0, 4, 6), base[0, :4])


def test_experts_of_a_stack_have_a_linear_layer_each_whose_weight_is_held_transposed() -> None:
    """[experts, in, out] with biases, as in gpt-oss: A reads `in`; a part of the merged tensor lies as the tensor does."""
    found = adapted_modules(tensors_to_adapt(oss(1)), "all-linear")
    assert found["model.layers.0.mlp.experts.7.gate_up_proj"] == (2 * 96, 128) and "model.layers.0.mlp.router" not in found
    assert found["model.layers.0.mlp.experts.0.down_proj"] == (128, 96) and len(found) == 4 + 2 * 8
    torch.manual_seed(1)
    base, a, b = torch.randn(2, 6, 12), torch.randn(2, 3, 6), torch.randn(2, 12, 3)
    merged = base.double() + 0.5 * (b.double() @ a.double()).mT
    part = part_of(AdaptedExperts(base, ((0, a, b),), 0.5, turned=True), 1, 2, 1, 4, 8)
    torch.testing.assert_close(part.double(), merged[1, 2:6, 1:9], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rank", [3, 8])
def test_the_grouped_change_is_the_sum_of_every_groups_product(rank: int) -> None:
    """The second group has no rows: its gradients are 0."""
    torch.manual_seed(1)
    x, a, b = (torch.randn(shape, requires_grad=True) for shape in ((10, 8), (3, rank, 8), (3, 12, rank)))
    ends, groups = torch.tensor([4, 4, 10], dtype=torch.int32), ((0, 4), (4, 4), (4, 10))
    found = grouped_change(x, a, b, ends)
    wanted = torch.cat([x[start:end] @ a[i].T @ b[i].T for i, (start, end) in enumerate(groups)])
    torch.testing.assert_close(found, wanted)
    weight = torch.randn_like(wanted)
    for ours, theirs in zip(*(torch.autograd.grad((out * weight).sum(), (x, a, b)) for out in (found, wanted))):
        torch.testing.assert_close(ours, theirs)
        assert ours.size(0) == 10 or not ours[1].any()


class GroupedExperts(torch.nn.Module):
    """The interface of TransformerEngine's grouped linears, which need a GPU: weight0, ... and (tokens, tokens of each)."""

    class Linear(torch.nn.Module):
        def __init__(self, weights: list[torch.Tensor]) -> None:
            super().__init__()
            for number, weight in enumerate(weights):
                self.register_parameter(f"weight{number}", torch.nn.Parameter(weight.clone(), requires_grad=False))

        def forward(self, x: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, None]:
            weights = (getattr(self, f"weight{number}") for number in range(len(sizes)))
            return torch.cat([rows @ weight.T for rows, weight in zip(x.split(sizes), weights)]), None

    def __init__(self, linears: dict[str, list[torch.Tensor]]) -> None:
        super().__init__()
        for name, weights in linears.items():
            self.add_module(name, self.Linear(weights))


def test_grouped_experts_get_the_adapters_of_their_expert() -> None:
    """What is added to the outputs of both linears is what `merged` adds to the weights."""
    torch.manual_seed(1)
    kinds = {"linear_fc1": [("gate_proj", 8), ("up_proj", 8)], "linear_fc2": [("down_proj", 16)]}
    sizes = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}
    prefix = "model.layers.0.mlp.experts.0."
    linears = [
        AdaptedLinear(
            f"mlp.experts.local_experts.0.{name}.weight",
            tuple((prefix + kind, rows) for kind, rows in held),
            {prefix + kind: (Box(0, sizes[kind][0], 0, sizes[kind][1]),) for kind, _ in held if kind != "gate_proj"},
            None,
        )
        for name, held in kinds.items()
    ]
    groups: Any = types.SimpleNamespace(coordinates=types.SimpleNamespace(etp=0), layout=types.SimpleNamespace(etp=1))
    modules = {prefix + kind: size for kind, size in sizes.items()}
    adapters = ExpertAdapters(linears, range(2, 5), modules, LoraConfig(rank=3, alpha=6), groups, dropped="none")
    experts = GroupedExperts({"linear_fc1": list(torch.randn(3, 16, 16)), "linear_fc2": list(torch.randn(3, 16, 8))})
    adapters.attach(experts, seed=5)
    x, tokens = {"linear_fc1": torch.randn(9, 16), "linear_fc2": torch.randn(9, 8)}, [4, 0, 5]
    plain = {name: experts.get_submodule(name)(x[name], tokens)[0] for name in kinds}
    started = initial_a("model.layers.0.mlp.experts.3.up_proj", 16, 3, seed=5)
    assert torch.equal(adapters.get_parameter("adapters.up_proj.lora_A")[1], started)
    with torch.no_grad():
        for adapter in adapters.each():
            adapter.lora_B.normal_()
    merged = {id(weight): adapted for weight, adapted in adapters.merged(experts)}
    for name in kinds:
        weights = [merged[id(experts.get_parameter(f"{name}.weight{number}"))] for number in range(3)]
        rows, columns = weights[0].shape[1:]
        wanted = [rows_of @ one.rectangle(0, 0, 0, rows, columns).T for rows_of, one in zip(x[name].split(tokens), weights)]
        torch.testing.assert_close(experts.get_submodule(name)(x[name], tokens)[0], torch.cat(wanted), rtol=1e-4, atol=1e-4)
        adapters.enabled = False
        assert torch.equal(experts.get_submodule(name)(x[name], tokens)[0], plain[name]), "started without a change, and off"
        adapters.enabled = True
