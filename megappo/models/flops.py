"""Floating-point operations of a model's passes, from its architecture and the lengths of the sequences.

Only matrix products count, 2 per multiply-add (Narayanan et al. 2021, appendix). A causal token meets only the keys that it sees,
as Megatron-LM counts since 2025. Padding, embeddings, norms, softmax and the optimizer count nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from megappo.models.arch import ModelArch

Recompute = Literal["none", "selective", "full"]
MULTIPLY_ADD = 2
BACKWARD = 2  # a backward pass has two products for each of the forward's: gradients of the input and of the weight
SCORES_AND_VALUES = 2  # products of attention per key and channel of a head: with the keys, and with the values


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward pass over a batch, whole model."""

    layers: int  # products with the layers' weights
    attention: int  # products with keys and values
    head: int  # output projection or value head

    @property
    def total(self) -> int:
        return self.layers + self.attention + self.head

    @property
    def training(self) -> int:
        # The model FLOPs of MFU: recomputed work is not among them.
        return (1 + BACKWARD) * self.total

    @property
    def training_frozen(self) -> int:
        """`training` of a model whose weights have no gradients. Adapters, a percent at most, are not counted."""
        return self.training - self.layers - self.head

    def recomputed(self, recompute: Recompute) -> int:
        """FLOPs that recomputation adds to the backward pass, for HFU."""
        return {"none": 0, "selective": self.attention, "full": self.layers + self.attention}[recompute]


def layer_weights(arch: ModelArch, sparse: bool) -> tuple[int, int]:
    """Parameters of a layer: (matrices of attention and router, those of the MLP that one token uses)."""
    heads, kv_heads, h = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim, arch.hidden_size
    attention = h * (heads + 2 * kv_heads) + heads * h
    if not sparse:
        return attention, 3 * h * arch.ffn_size  # gate, up and down
    assert arch.moe is not None
    return attention + h * arch.moe.num_experts, 3 * h * arch.moe.ffn_size * arch.moe.top_k


def _family_weights(arch: ModelArch) -> int:
    num_sparse = sum(arch.is_sparse(layer) for layer in range(arch.num_layers))
    weights = num_sparse * sum(layer_weights(arch, True)) if num_sparse else 0
    return weights + (arch.num_layers - num_sparse) * sum(layer_weights(arch, False))


def _own_weights(arch: ModelArch) -> int:
    """Parameters of the layers that one token uses, from the shapes of transformers' parameters: top_k of the experts count."""
    weights = 0
    for parameter in arch.own:
        if "layers." in parameter.name and len(parameter.shape) == 2:
            weights += prod(parameter.shape)
        elif len(parameter.shape) == 3 and arch.moe is not None:
            weights += prod(parameter.shape[1:]) * arch.moe.top_k
    return weights


def window_of(arch: ModelArch, layer: int) -> int | None:
    """Tokens that a token of this layer sees, itself included; None if it sees all before it."""
    return arch.sliding_window if arch.sliding_window is not None and arch.sliding_layers[layer] else None


def keys_seen(arch: ModelArch, layer: int, length: float) -> float:
    """Keys that a token attends to, on average over a sequence of this length."""
    window = window_of(arch, layer)
    if window is None or length <= window:
        return (length + 1) / 2
    return (window * (window + 1) / 2 + (length - window) * window) / length


def forward_flops(
    arch: ModelArch, lengths: Tensor, *, value_head: bool, head_rows: int | None = None, causal: bool = True
) -> ForwardFlops:
    """Count the FLOPs of a forward pass over packed sequences. lengths: [B] int64 tokens of each, on the host.
    value_head: a Linear(hidden, arch.head_rows) in place of the output projection. head_rows: tokens with a head, all by default.
    causal=False: attention over whole squares, as `torch.utils.flop_counter` and Megatron-LM before 2025 count."""
    tokens = int(lengths.sum())
    weights = _own_weights(arch) if arch.own else _family_weights(arch)
    windows = [window_of(arch, layer) for layer in range(arch.num_layers)]
    keys = sum(windows.count(window) * _pairs(lengths, window, causal) for window in set(windows))
    columns = arch.head_rows if value_head else arch.vocab_size
    return ForwardFlops(
        layers=MULTIPLY_ADD * weights * tokens,
        attention=MULTIPLY_ADD * SCORES_AND_VALUES * arch.num_heads * arch.head_dim * keys,
        head=MULTIPLY_ADD * arch.hidden_size * columns * (tokens if head_rows is None else head_rows),
    )


def generation_flops(arch: ModelArch, prompts: Tensor, responses: Tensor) -> ForwardFlops:
    """Count the FLOPs of sampling with a KV cache. prompts, responses: [B] int64 tokens.
    Every token but a response's last passes the layers once. A prompt shared between samples counts for each of them."""
    return forward_flops(arch, (prompts + responses - 1).clamp(min=0), value_head=False, head_rows=int(responses.sum()))


def _pairs(lengths: Tensor, window: int | None, causal: bool) -> int:
    if not causal:
        return int(lengths.square().sum())
    ramp = lengths if window is None else torch.clamp(lengths, max=window)  # tokens whose window is not full yet
    pairs = ramp * (ramp + 1) // 2
    if window is not None:
        pairs = pairs + (lengths - ramp) * window
    return int(pairs.sum())
