"""Watching a loader: pure slices become pieces, anything else is refused with the tensor's name. No vLLM needed."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megappo.bridge.destination import Fill, Shape
from megappo.bridge.vllm_layout import record_destination
from megappo.models.pieces import Box, Piece

SHAPES = {"q": (4, 6), "k": (2, 6), "norm": (6,), "experts": (5, 6)}


class Model(nn.Module):
    """Parameters on meta, filled by `loader(parameters, weights)` as vLLM's models are."""

    def __init__(self, loader: Callable) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.qk = nn.Parameter(torch.empty(6, 6, device="meta"), requires_grad=False)
        self.layer.norm = nn.Parameter(torch.empty(6, device="meta"), requires_grad=False)
        self.layer.w = nn.Parameter(torch.empty(2, 3, 6, device="meta"), requires_grad=False)
        self.layer.register_buffer("table", torch.zeros(3))
        self._loader = loader

    def load_weights(self, weights: Iterator) -> None:
        self._loader(dict(self.named_parameters()), dict(weights))


def good(params: dict, weights: dict) -> None:
    params["layer.qk"][:4].copy_(weights["q"])
    params["layer.qk"].narrow(0, 4, 2).copy_(weights["k"])
    params["layer.norm"].data.copy_(weights["norm"])
    params["layer.w"][0].copy_(weights["experts"].narrow(0, 0, 3))
    params["layer.w"][1, :2].copy_(weights["experts"][3:])
    params["layer.w"][1, 2:].fill_(0)
    params["layer.w"][1, 3:].fill_(7)  # empty


def but(**changes: Callable) -> Callable:
    """The good loader with one parameter loaded differently."""

    def loader(params: dict, weights: dict) -> None:
        for change in changes.values():
            change(params, weights)
        good(params, weights)

    return loader


API = types.SimpleNamespace(
    initialize=lambda model: None,
    info=lambda layer: types.SimpleNamespace(can_load=lambda: False),
    layer_tensors=lambda layer: {**layer._parameters, **layer._buffers},
    original_loader=lambda tensor: None,
    is_deferred=lambda layer: False,
)


def baked(loader: Callable) -> Any:
    return record_destination(Model(loader), API, SHAPES, torch.float32)


def test_slices_become_pieces():
    destination = baked(good)
    assert set(destination.pieces) == {
        Piece("q", Box(0, 4, 0, 6), "layer.qk", 0, 0),
        Piece("k", Box(0, 2, 0, 6), "layer.qk", 4, 0),
        Piece("norm", Box(0, 6, 0, 1), "layer.norm", 0, 0),
        Piece("experts", Box(0, 3, 0, 6), "layer.w", 0, 0, 0),
        Piece("experts", Box(3, 5, 0, 6), "layer.w", 0, 0, 1),
    }
    assert destination.fills == (Fill("layer.w", 1, Box(2, 3, 0, 6), 0.0),)
    assert destination.shapes == {"layer.qk": Shape(1, 6, 6), "layer.norm": Shape(1, 6, 1), "layer.w": Shape(2, 3, 6)}


def test_experts_are_read_transposed_and_a_cleared_source_is_a_constant():
    """As vLLM's loader of gpt_oss: both experts of a layer at once, and a bias that another rank of the replica adds."""

    def loader(params, weights):
        good({**params, "layer.w": torch.empty(2, 3, 6, device="meta"), "layer.norm": torch.empty(6, device="meta")}, weights)
        params["layer.w"].copy_(weights["turned"][:, :, 2:5].permute(0, 2, 1).contiguous())
        params["layer.norm"].copy_(weights["norm"].zero_())

    found = record_destination(Model(loader), API, {**SHAPES, "turned": (2, 6, 5)}, torch.float32)
    assert [piece for piece in found.pieces if piece.local == "layer.w"] == [
        Piece("turned", Box(0, 6, 2, 5), "layer.w", 0, 0, 0, True),
        Piece("turned", Box(6, 12, 2, 5), "layer.w", 0, 0, 1, True),
    ]
    assert found.fills == (Fill("layer.norm", 0, Box(0, 6, 0, 1), 0.0),)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p, w: p["layer.norm"].copy_(w["norm"] + 1), "computed tensor into layer.norm"),
        (lambda p, w: p["layer.norm"].copy_(w["norm"][:1]), "broadcasts norm"),
        (lambda p, w: p["layer.qk"].copy_(w["q"].repeat(2, 1)[:6]), "computed tensor into layer.qk"),
        (lambda p, w: p["layer.qk"][:3, :4].copy_(w["q"].t()[::2]), "q: .* strided, not a rectangle"),
        (lambda p, w: p["layer.qk"][::2][:2].copy_(w["q"][:2]), "layer.qk: .* strided, not a rectangle"),
        (lambda p, w: w["norm"].mul_(2), "mul_.* on the checkpoint's norm"),
        (lambda p, w: p["layer.norm"].mul_(2), "mul_.* on it"),
        (lambda p, w: p["layer.norm"].view(2, 3).copy_(w["norm"].view(2, 3)), "norm"),
        (lambda p, w: p["layer.qk"][0].copy_(w["q"][0]), "layer.qk.* overlap"),
    ],
)
def test_anything_but_a_slice_is_refused_with_the_name(change, message):
    with pytest.raises(ValueError, match=message):
        baked(but(step=change))


def test_a_parameter_that_nothing_fills_is_refused():
    with pytest.raises(ValueError, match="layer.norm is filled by no tensor of the policy"):
        baked(lambda params, weights: good({**params, "layer.norm": torch.empty(6, device="meta")}, weights))


def test_a_gap_in_a_parameter_is_refused():
    def gap(params, weights):
        good({**params, "layer.w": torch.empty(2, 3, 6, device="meta")}, weights)
        params["layer.w"][0].copy_(weights["experts"].narrow(0, 0, 3))

    with pytest.raises(ValueError, match="engine parameter layer.w: 0 of 18 elements"):
        baked(gap)


def test_a_parameter_of_another_dtype_is_refused():
    model = Model(good)
    model.layer.norm = nn.Parameter(torch.empty(6, device="meta", dtype=torch.bfloat16), requires_grad=False)
    with pytest.raises(ValueError, match="layer.norm in torch.bfloat16"):
        record_destination(model, API, SHAPES, torch.float32)


@pytest.mark.parametrize("dtype, fits", [(torch.float32, True), (torch.float16, False)])
def test_a_parameter_that_holds_what_is_sent_is_taken_and_one_that_rounds_is_refused(dtype, fits):
    """vLLM's kernels for AMX make the biases of bf16 layers fp32."""
    model = Model(good).to(torch.bfloat16)
    model.layer.norm = nn.Parameter(torch.empty(6, device="meta", dtype=dtype), requires_grad=False)
    with nullcontext() if fits else pytest.raises(ValueError, match="layer.norm in torch.float16, which does not hold"):
        found = record_destination(model, API, SHAPES, torch.bfloat16)
        assert found.dtype == torch.bfloat16 and found.others == {"layer.norm": torch.float32}
