"""Activations of transformers' classes of families under FSDP2: what autograd keeps of a layer, and the fullest moment of a pass.

Gathered layers, whole gradients and logits exist at different times, so moments are compared, not summed. A test holds the result
to 2 % of the bytes alive in real dense models, and to 10 % in those with experts or delta nets. Models without a family use
`activations.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megappo.commands.plan.activations import CHUNK, DENSE, FP32, Recompute, logit_bytes, sequence_shards
from megappo.models.arch import Delta, Kind, ModelArch, MoeArch
from megappo.parallel.layout import ParallelLayout

_INT64 = 8


@dataclass(frozen=True)
class Gathered:
    """Bytes of whole weights that FSDP2 has gathered on one tp rank, and of their whole gradients."""

    root: int
    """Embedding, last norm and output projection, in the type of computation or in 8 bits."""
    layer: int
    """The largest layer, in the type of computation or in 8 bits."""
    root_gradient: int
    """Gradients of the weights of the root that train, in the type of computation."""
    projection_gradient: int
    """Gradient of the output projection if it trains, in the type of computation."""
    matrix: int
    """The largest weight of a layer that trains, in the type of computation."""
    layer_gradient: int
    """Gradients of the weights of a layer that train, in the type of computation."""
    root_reduced: int
    layer_reduced: int
    """`root_reduced`, `layer_reduced`: gradients in fp32 on their way to the shards."""
    shards: int
    """Number of ranks that each weight is cut over."""

    @property
    def in_flight(self) -> int:
        """Bytes of the buffer that receives the next layer's weights while a layer works."""
        return self.layer if self.shards > 1 else 0


@dataclass(frozen=True)
class OwnPasses:
    """Sizes of the passes of a role on one rank."""

    tokens: int
    forward_tokens: int
    """`tokens`, `forward_tokens`: of a micro-batch on this rank, in a training pass and in one without gradients."""
    recompute: Recompute
    device: Literal["cpu", "cuda"]
    batch: int
    forward_batch: int
    """`batch`, `forward_batch`: bytes of the micro-batches in these passes."""
    value_head: bool
    longest: int
    """Tokens of the longest sequence."""
    adapted: frozenset[str] | None = None
    """Last names of modules with adapters of `rank`; None if all weights train."""
    rank: int = 0

    def reads(self, *modules: str) -> bool:
        """True if the gradient of one of these modules needs the input that they share."""
        return self.adapted is None or not self.adapted.isdisjoint(modules)


def forward_peak(arch: ModelArch, layout: ParallelLayout, itemsize: int, passes: OwnPasses, gathered: Gathered) -> int:
    """Most bytes alive in a pass without gradients: in attention, in an MLP, or at the output."""
    tokens, hidden = passes.forward_tokens, arch.hidden_size
    heads, kv_heads = _heads(arch, layout)
    # Copies of query, key and value, rotated and in packed order; context parallel has them before and after its exchange.
    if passes.device == "cpu":  # twice in order of length, and the output four times
        attention = 7 * heads + 6 * kv_heads
    else:
        attention = 3 * heads + 4 * kv_heads
    attention += heads + 2 * kv_heads if layout.cp > 1 else 0
    attention *= arch.key_dim
    if arch.delta is not None:
        attention = max(attention, _delta_at_once(arch.delta, FP32 // itemsize, passes.longest))
    # silu(gate), up, their product, and what an adapter adds to up; `layer` below also has the residual with attention's output.
    mlp = (4 if passes.reads("gate_proj", "up_proj") and passes.adapted is not None else 3) * arch.ffn_size // layout.tp
    if arch.moe is not None:  # rows of tokens before the experts, inside, and on their way back, weighted and in order
        back = (1 + 2 * _route_width(arch, itemsize)) * hidden
        inside = (4 if arch.moe.clamp is None else 7) * arch.moe.ffn_size
        mlp = max(mlp * arch.has_dense_mlp, arch.moe.top_k * (hidden + max(back, inside)))
    # The embedding, whole on every tp rank; the residual and its norm, which sequence parallel also gathers.
    stream = hidden + 2 * hidden // sequence_shards(layout) + (hidden if layout.sequence_parallel else 0)
    layer = stream + max(attention, hidden // sequence_shards(layout) + mlp) + 2 * arch.key_dim
    working = gathered.layer + gathered.in_flight + tokens * layer * itemsize
    output = tokens * (stream + hidden) * itemsize
    if not passes.value_head:
        output += logit_bytes(arch, layout, tokens, itemsize, passes.device, trained=False)
    return passes.forward_batch + gathered.root + max(working, output)


def training_peak(arch: ModelArch, layout: ParallelLayout, itemsize: int, passes: OwnPasses, gathered: Gathered) -> int:
    """Most bytes alive in the training pass of one micro-batch."""
    tokens, wide = passes.tokens, FP32 // itemsize
    stream = arch.hidden_size // sequence_shards(layout)
    counts = arch.count_kinds(range(arch.num_layers))
    each = {kind: layer_bytes(arch, layout, itemsize, passes, kind) * tokens for kind in counts}
    kept, all_kept = max(each.values()), sum(each[kind] * count for kind, count in counts.items())
    inside = 0  # recomputed activations of the layer whose backward runs
    # In fp32 a norm keeps the stream itself. The first one's is the embedding, which needs no gradient below adapters.
    shared, first = stream * itemsize * tokens * (wide == 1), stream * FP32 * tokens * (passes.adapted is not None)
    if passes.recompute == "full":
        kept, inside, first = stream * itemsize * tokens, kept - shared, 0
        all_kept = arch.num_layers * kept
    # What all layers keep, the tables of rotations, and the root, which stays gathered.
    base = passes.batch + all_kept - first + 2 * tokens * arch.key_dim * itemsize + gathered.root
    output = arch.hidden_size if layout.sequence_parallel else 0
    # The last norm's input in fp32, its rounded quotient (for a weight that trains), the output, and the output's gradient.
    last_norm = tokens * (stream * (wide + 2 + (passes.adapted is None) * _quotient(arch, itemsize)) + output) * itemsize
    if passes.value_head:  # the fp32 copy of the output, and the gradients of both
        loss = start = tokens * 3 * wide * stream * itemsize
    else:
        rows = -(-arch.vocab_size // layout.tp)
        weight = 0 if passes.adapted is not None else rows * arch.hidden_size * FP32  # the projection's gradient, in fp32
        loss = logit_bytes(arch, layout, tokens, itemsize, passes.device, trained=True) + weight
        # The projection's gradient times the loss's own, in the type of computation, and the gradient of the output.
        start = weight + (gathered.projection_gradient if itemsize != FP32 else weight) + tokens * stream * itemsize
    # A norm's backward: five tensors in fp32 beside its input and the output.
    given = 0 if passes.value_head else stream + output  # the loss still holds its hidden states
    norm = tokens * ((stream * wide + given) * itemsize + 5 * stream * FP32) + gathered.in_flight + gathered.projection_gradient
    # An MLP's backward: gradients of the product, its factors and the residual; the product itself is freed if it was kept.
    factors = (3 - passes.reads("down_proj")) * arch.ffn_size // layout.tp if arch.has_dense_mlp else 0
    weights = gathered.matrix
    if arch.moe is not None:  # rows whose product is freed, and the gradients of both weights of all experts
        rows = arch.moe.top_k * (arch.moe.ffn_size + (_route_width(arch, itemsize) - 1) * arch.hidden_size)
        factors, weights = max(factors, rows), gathered.layer_gradient
    mlp = tokens * (factors + stream + given) * itemsize + inside
    mlp += gathered.layer + weights + gathered.projection_gradient
    moments = [base + last_norm + loss, base + last_norm + start, base + norm]
    moments.append(base + mlp + gathered.in_flight * (arch.num_layers > 1))  # the first layer's backward fetches none ahead
    reducing = gathered.shards > 1
    if arch.num_layers > 1 and reducing:  # one layer on: the gradients of the last one are on their way
        moments.append(base + mlp + gathered.in_flight * (arch.num_layers > 2) - kept + gathered.layer_reduced)
    # The pass ends with the root's gradients.
    end = gathered.root + gathered.root_gradient + gathered.root_reduced * reducing + tokens * 2 * stream * itemsize
    return max(*moments, passes.batch + end)


def layer_bytes(arch: ModelArch, layout: ParallelLayout, itemsize: int, passes: OwnPasses, kind: Kind = DENSE) -> int:
    """Bytes per token of the rank that autograd keeps of one layer, without recomputing the whole layer."""
    adapted, reads, wide = passes.adapted, passes.reads, FP32 // itemsize
    heads, kv_heads = _heads(arch, layout)
    stream = arch.hidden_size // sequence_shards(layout)
    trains = adapted is None  # norms train
    of_norm = wide + trains * _quotient(arch, itemsize)
    # Norms: the input in fp32, the quotient if norms train, and the output gathered from all tp ranks, but of those behind blocks.
    elements = (4 if arch.sandwich else 2) * stream * of_norm
    elements += arch.hidden_size * (reads("q_proj", "k_proj", "v_proj") + reads("gate_proj", "up_proj"))
    # Query, key and value as the kernel reads them, its output, which the CPU copies to packed order; under selective
    # recomputation the rotated ones and the copy alone.
    outputs = 1 if passes.device == "cuda" or passes.recompute == "selective" else 1 + reads("o_proj")
    attention = ((1 + outputs) * heads + 2 * kv_heads) * arch.key_dim
    if arch.qk_norm:
        attention += of_norm * (heads + kv_heads) * arch.key_dim
    if arch.latent is not None:  # norms of latents, and their outputs
        attention += (of_norm + 1) * (arch.latent.kv_rank + (arch.latent.q_rank or 0))
    if arch.output_gate:  # the gate's sigmoid and the product; in fp32 the norm of queries keeps the gate that lies beside them
        attention += (2 + (wide == 1)) * heads * arch.key_dim
    elements += _delta_elements(arch.delta, wide) if kind.delta and arch.delta is not None else attention
    small = FP32 * (heads + 2 + arch.qk_norm * (heads + kv_heads)) + (2 * _INT64 if passes.device == "cpu" else 0)
    if kind.sparse and arch.moe is not None:
        elements += _expert_elements(arch.moe, arch.hidden_size, wide)
        small += FP32 * arch.moe.num_experts + 8 * _INT64 * arch.moe.top_k  # the router's softmax, and places of rows
    else:
        elements += (3 + reads("down_proj")) * arch.ffn_size // layout.tp  # gate, silu(gate), up; and their product
    elements += passes.rank * len(adapted or ())
    # fp32: the softmax's sum for each head, the inverse root of each norm. Places of tokens in packed order, on the CPU.
    return elements * itemsize + small


def _expert_elements(moe: MoeArch, hidden_size: int, wide: int) -> int:
    """Elements per token that grouped experts, their router and shared experts keep."""
    # A row: its input; gate and up, silu(gate), product; the output before its weight. Clamped: gate and up in one, gate clamped,
    # its sigmoid and product with it, up with its offset, product.
    elements = moe.top_k * (2 * hidden_size + (4 if moe.clamp is None else 7) * moe.ffn_size)
    elements += 4 * moe.shared_size + moe.shared_gate * hidden_size
    return elements + moe.sigmoid * (wide > 1) * wide * hidden_size  # such a router reads its input in fp32


def _delta_elements(delta: Delta, wide: int) -> int:
    """Elements per token that transformers' gated delta net keeps. wide: of one in fp32."""
    keys, heads = delta.value_heads * delta.key_dim, delta.value_heads  # keys are repeated for all value heads
    # The convolution's input and output.
    kept = 2 * (2 * delta.keys + delta.values)
    # Queries and keys before their norm and scaled; keys times beta, solved, and both with their decay. Values; solved, and what
    # is written. Five squares of a chunk, its state, scalars.
    state = delta.key_dim * delta.value_dim // CHUNK
    kept += wide * (8 * keys + 3 * delta.values + heads * (5 * CHUNK + state + 12))
    return kept + (3 + 3 * wide) * delta.values  # output in fp32, its quotient, weighted, gated; the gate and its SiLU


def _delta_at_once(delta: Delta, wide: int, longest: int) -> int:
    """Elements per token that exist at once in a gated delta net's pass without gradients."""
    keys, heads = delta.value_heads * delta.key_dim, delta.value_heads
    # The projections and the convolution's output; repeated queries and keys.
    outside = 4 * delta.keys + 3 * delta.values + 2 * keys
    # Queries, keys twice, keys times beta, decayed and solved; values, times beta, solved, and the output; squares of a chunk.
    inside = 6 * keys + 4 * delta.values + heads * (3 * CHUNK + 4)
    # Of the chunk at work: what is read and written, and its state.
    of_chunk = 3 * delta.values + 2 * heads * delta.key_dim * delta.value_dim // CHUNK
    return outside + wide * (inside + of_chunk // -(-longest // CHUNK))


def _route_width(arch: ModelArch, itemsize: int) -> int:
    """Elements per channel of a row times its expert's weight, which these classes leave in fp32."""
    return FP32 // itemsize if arch.family in ("mixtral", "glm4_moe", "deepseek_v3") else 1


def _quotient(arch: ModelArch, itemsize: int) -> int:
    """Elements per channel of a norm's quotient: in the model's type, or in fp32 where weights are distances from 1."""
    return FP32 // itemsize if arch.centred_norms else 1


def _heads(arch: ModelArch, layout: ParallelLayout) -> tuple[int, int]:
    """(query heads, KV heads) of a tp rank."""
    # Context parallel repeats KV heads if there are fewer than ranks.
    return arch.num_heads // layout.tp, max(arch.num_kv_heads // layout.tp, layout.cp)
