"""Floating-point operations of a model's passes, from its architecture and the lengths of the sequences.

Only matrix products count, 2 per multiply-add (Narayanan et al. 2021, appendix). A causal token meets only the keys that it sees,
as Megatron-LM counts since 2025. Padding, embeddings, norms, softmax and the optimizer count nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megappo.models.arch import Kind, ModelArch, VisionArch
from megappo.models.vision_families import tower_shape

Recompute = Literal["none", "selective", "full"]
MULTIPLY_ADD = 2
BACKWARD = 2  # a backward pass has two products for each of the forward's: gradients of the input and of the weight


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward pass over a batch, whole model."""

    layers: int  # products with the layers' weights
    attention: int  # products with keys and values, and of delta nets
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
        """`training` of a model whose weights have no gradients. Adapters, a percent or three, are not counted."""
        return self.training - self.layers - self.head

    def recomputed(self, recompute: Recompute) -> int:
        """FLOPs that recomputation adds to the backward pass, for HFU."""
        return {"none": 0, "selective": self.attention, "full": self.layers + self.attention}[recompute]


def layer_weights(arch: ModelArch, kind: Kind) -> tuple[int, int]:
    """Parameters of a layer: (matrices of attention or a delta net, router and shared experts, those of the MLP or the experts of
    one token)."""
    h, attention = arch.hidden_size, sum(rows * columns for rows, columns, _ in attention_matrices(arch, kind))
    if kind.delta:
        assert arch.delta is not None
        attention += arch.delta.width * (2 * arch.delta.keys + arch.delta.values)  # of the convolution
    if not kind.sparse:
        return attention, 3 * h * arch.ffn_size  # gate, up and down
    moe = arch.moe
    assert moe is not None
    return attention + h * (moe.num_experts + 3 * moe.shared_size + moe.shared_gate), 3 * h * moe.ffn_size * moe.top_k


def attention_matrices(arch: ModelArch, kind: Kind) -> list[tuple[int, int, bool]]:
    """(outputs, inputs, tp cuts it) of the matrices of attention or of a delta net; of those that are fused, of their whole."""
    heads, kv_heads, h = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim, arch.hidden_size
    if kind.delta:
        assert arch.delta is not None
        rows = 2 * (arch.delta.keys + arch.delta.values + arch.delta.value_heads)
        return [(rows, h, True), (h, arch.delta.values, True)]
    if arch.latent is None:
        return [(arch.num_heads * arch.query_rows + 2 * kv_heads, h, True), (h, heads, True)]
    q_rank, kv_rank, nope, rope, value = arch.latent
    queries = arch.num_heads * (nope + rope)
    of_queries = [(queries, h, True)] if q_rank is None else [(q_rank, h, False), (queries, q_rank, True)]
    return [*of_queries, (kv_rank + rope, h, False), (arch.num_heads * (nope + value), kv_rank, True), (h, heads, True)]


def attention_channels(arch: ModelArch) -> int:
    """Channels of all heads that a token multiplies for each key that it sees: with the key, and with the value."""
    return arch.num_heads * (arch.key_dim + arch.head_dim)


def delta_products(arch: ModelArch) -> int:
    """Multiply-adds of a token with the states of a gated delta net, as its recurrence has them: every head's is read with the key,
    written, and read with the query. Chunks take other products."""
    assert arch.delta is not None
    return 3 * arch.delta.values * arch.delta.key_dim


def _own_weights(arch: ModelArch) -> int:
    """Parameters of the layers that one token uses, from the shapes of transformers' parameters: top_k of the experts count."""
    weights = 0
    for parameter in arch.own:
        if "layers." in parameter.name and (len(parameter.shape) == 2 or parameter.shape[1:2] == (1,)):  # a convolution's
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


def attention_products(arch: ModelArch, layer: int, length: float) -> float:
    """Multiply-adds of a token in a layer's attention or delta net beside its projections, on average over a sequence."""
    return delta_products(arch) if arch.kind(layer).delta else attention_channels(arch) * keys_seen(arch, layer, length)


def forward_flops(
    arch: ModelArch, lengths: Tensor, *, value_head: bool, head_rows: int | None = None, causal: bool = True
) -> ForwardFlops:
    """Count the FLOPs of a forward pass over packed sequences. lengths: [B] int64 tokens of each, on the host.
    value_head: a Linear(hidden, arch.head_rows) in place of the output projection. head_rows: tokens with a head, all by default.
    causal=False: attention over whole squares, as `torch.utils.flop_counter` and Megatron-LM before 2025 count."""
    tokens = int(lengths.sum())
    kinds = [arch.kind(layer) for layer in range(arch.num_layers)]
    weights = (
        _own_weights(arch) if arch.own else sum(count * sum(layer_weights(arch, kind)) for kind, count in Counter(kinds).items())
    )
    windows = [window_of(arch, layer) for layer, kind in enumerate(kinds) if not kind.delta]
    num_deltas = arch.num_layers - len(windows)
    of_deltas = num_deltas * tokens * delta_products(arch) if num_deltas else 0
    keys = sum(windows.count(window) * _pairs(lengths, window, causal) for window in set(windows))
    columns = arch.head_rows if value_head else arch.vocab_size
    return ForwardFlops(
        layers=MULTIPLY_ADD * weights * tokens,
        attention=MULTIPLY_ADD * (attention_channels(arch) * keys + of_deltas),
        head=MULTIPLY_ADD * arch.hidden_size * columns * (tokens if head_rows is None else head_rows),
    )


# Beginnings of the names of a tower's tensors: of the product with the pixels, of blocks, and tables.
_OF_PATCHES = ("patch_embed", "vision_tower.embeddings.patch_embeddings")
_OF_BLOCKS = ("blocks", "vision_tower.encoder")
_TABLES = ("pos_embed", "vision_tower.embeddings")


class TowerFlops(NamedTuple):
    """FLOPs of one forward pass of a vision tower over an image. embedding: of the product with the pixels, which have no
    gradient."""

    total: int
    embedding: int


@cache
def tower_flops(vision: VisionArch, grid: tuple[int, int]) -> TowerFlops:
    """Count the FLOPs of a vision tower on an image. grid: rows and columns of its patches."""
    shape, patches = tower_shape(vision), grid[0] * grid[1]
    matrices = {name.partition(".")[2]: prod(size) for name, size in vision.tensors if len(size) > 1}
    of_patches, of_blocks = (sum(n for name, n in matrices.items() if name.startswith(part)) for part in (_OF_PATCHES, _OF_BLOCKS))
    # Those that are no table of positions make features, one of merge x merge patches.
    of_features = sum(n for name, n in matrices.items() if not name.startswith((*_OF_PATCHES, *_OF_BLOCKS, *_TABLES)))
    tokens, pairs = patches, shape.whole * patches**2
    if vision.tile:  # a tile has a token for its class too
        per_tile = (vision.tile // vision.patch) ** 2
        tokens, pairs = patches + patches // per_tile, shape.depth * patches // per_tile * (per_tile + 1) ** 2
    elif shape.window is not None:
        squares = [_squares(side // vision.merge, shape.window) for side in grid]
        pairs += (shape.depth - shape.whole) * prod(squares) * vision.merge**4
    products = of_blocks * tokens + of_features * patches // vision.merge**2 + 2 * shape.hidden * pairs
    embedding = MULTIPLY_ADD * of_patches * patches
    return TowerFlops(embedding + MULTIPLY_ADD * products, embedding)


def _squares(length: int, window: int) -> int:
    """Pairs on one side of an image that is cut into windows, whose last one may be smaller."""
    return length // window * window**2 + (length % window) ** 2


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
