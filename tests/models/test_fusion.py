"""Fused kernels: which are asked for where, that Megatron-core's SwiGLU is the function that it replaces, and what it keeps.

Run here without compilation, in which its numbers are no better than those of separate operations; compiled, it rounds once.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megappo.models import build
from megappo.models.build import accumulate_into_main_grad, fusion_config
from tests.commands.plan.archs import MOE, llama
from tests.models.checkpoints import write_checkpoint
from tests.worlds import spawn_world

TOKENS, FFN = 257, 96


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("moe", [None, MOE])
def test_fusions_are_those_of_the_device_and_the_layers(implementation: str, moe: Any) -> None:
    arch = llama(moe=moe)
    assert fusion_config(arch, implementation, on_gpu=False) == {}
    config = fusion_config(arch, implementation, on_gpu=True)
    has_te = implementation == "transformer_engine"
    assert config == {
        "bias_activation_fusion": True,
        "moe_permute_fusion": has_te and moe is not None,
        "disable_parameter_transpose_cache": has_te,
    }


def swiglu(x: Tensor) -> Tensor:
    """As Megatron-core computes it without fusion."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * (up + 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_megatrons_fused_swiglu_is_as_exact_as_the_operations_that_it_replaces(dtype: torch.dtype, weighted: bool) -> None:
    """Against fp64 from the same rounded inputs, forward and both gradients: at most twice their error."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl

    generator = torch.Generator().manual_seed(0)
    x = (2 * torch.randn(TOKENS, 2 * FFN, generator=generator)).to(dtype)
    grad = torch.randn(TOKENS, FFN, generator=generator).to(dtype)
    weight = torch.rand(TOKENS, 1, generator=generator)

    def outcome(function: Any, dtype: torch.dtype) -> list[Tensor]:
        leaf = x.to(dtype, copy=True).requires_grad_()
        scale = weight.to(torch.float64 if dtype == torch.float64 else torch.float32, copy=True).requires_grad_()
        result = function(leaf, scale)
        result.backward(grad.to(dtype))
        return [result.detach(), leaf.grad, *([scale.grad] if weighted else [])]

    def unfused(leaf: Tensor, scale: Tensor) -> Tensor:
        return (swiglu(leaf) * scale).to(leaf.dtype) if weighted else swiglu(leaf)

    def fused(leaf: Tensor, scale: Tensor) -> Tensor:
        return weighted_bias_swiglu_impl(leaf, None, scale) if weighted else bias_swiglu_impl(leaf, None)

    with torch.compiler.set_stance("force_eager"):
        exact, apart, together = outcome(unfused, torch.float64), outcome(unfused, dtype), outcome(fused, dtype)
    for name, want, base, got in zip(("product", "gradient", "weight's gradient"), exact, apart, together):
        allowed = 2 * (base.double() - want).abs().max()
        assert 0 < (got.double() - want).abs().max() <= allowed, name
    if not weighted:
        assert torch.equal(together[0], apart[0]), "the product has the same bits"
    wrong = (exact[1] - torch.cat(exact[1].chunk(2, dim=-1)[::-1], dim=-1)).abs().max()
    assert wrong > 100 * (apart[1].double() - exact[1]).abs().max(), "negative control: gate and up the other way round"


def both_ways(rank: int, path: str) -> dict[str, Any]:
    """A model without and with fused activations: hidden states, gradients, bytes that its MLPs keep, marks of its linears."""
    from megappo.data.packing import pack
    from megappo.engine.megatron_optimizer import wrap_with_ddp
    from megappo.models.hf_config import read_arch
    from megappo.models.hf_import import load_pretrained
    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout

    cpu_patches.install()
    groups, arch = build_groups(ParallelLayout(1)), read_arch(path)
    batch = pack([list(range(3, 40)), list(range(5, 100))])
    found: dict[str, Any] = {"ffn": arch.ffn_size, "layers": arch.num_layers, "tokens": batch.num_tokens}
    for name, on_gpu in (("unfused", False), ("fused", True)):
        with mock.patch.object(build, "fusion_config", lambda *args, **_: fusion_config(*args, on_gpu=on_gpu)):
            (model,) = build.build_model(arch, groups, dtype=torch.float32)
        load_pretrained([model], arch, groups, path)
        kept: dict[int, tuple[int, Tensor]] = {}
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def pack_(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes(), tensor
            return tensor

        with torch.compiler.set_stance("force_eager"), torch.autograd.graph.saved_tensors_hooks(pack_, lambda tensor: tensor):
            hidden = model(batch.tokens, batch.cu_seqlens)
            hidden.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        found[name] = {"hidden": hidden.detach(), "gradients": gradients, "kept": sum(size for size, _ in kept.values())}
    linear = model.decoder.layers[0].mlp.linear_fc1
    linear.fuse_wgrad_accumulation = False  # as TransformerEngine's have it
    wrap_with_ddp([model], groups, distributed_optimizer=True)
    found["marked"] = linear.fuse_wgrad_accumulation
    return found


def test_a_model_with_fused_activations_is_the_same_and_keeps_two_tensors_of_an_mlp_less(tmp_path) -> None:
    write_checkpoint(tmp_path / "llama", "llama")
    (found,) = spawn_world(both_ways, 1, str(tmp_path / "llama"))
    apart, together = found["unfused"], found["fused"]
    assert torch.equal(apart["hidden"], together["hidden"])
    assert apart["gradients"].keys() == together["gradients"].keys() and len(apart["gradients"]) > 10
    for name, gradient in apart["gradients"].items():
        # fp32, a few additions of another order in one factor
        assert (together["gradients"][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
    per_mlp = 4 * found["tokens"] * found["ffn"]
    assert apart["kept"] - together["kept"] == pytest.approx(2 * per_mlp * found["layers"], rel=0.01)
    assert found["marked"], "what DDP gives a main_grad adds to it"


def test_only_what_has_the_switch_is_told_to_accumulate() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    model[2].requires_grad_(False)
    for switched in model[1:]:
        setattr(switched, "fuse_wgrad_accumulation", False)
    accumulate_into_main_grad(model)
    assert not hasattr(model[0], "fuse_wgrad_accumulation") and model[1].fuse_wgrad_accumulation is True
    assert model[2].fuse_wgrad_accumulation is False, "a frozen weight has no main_grad"
