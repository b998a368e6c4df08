"""Estimate of the activations of one rank after Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer
models", section 4), redone for packed tokens, no dropout, SwiGLU, and attention that never stores its scores.

Temporary buffers of kernels and allocators are not counted. Weights and optimizer are in `memory.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Literal

from megappo.commands.plan.timeline import order_of_passes, padded_micro_batches
from megappo.commands.plan.tower import FP32, kept_bytes, working_bytes
from megappo.config.role_sections import LoraConfig
from megappo.models.arch import Delta, Kind, ModelArch, MoeArch
from megappo.parallel.layout import ParallelLayout

DENSE = Kind(sparse=False, delta=False)
CHUNK = 64  # tokens of a chunk of a delta net's (`models/delta.py`, which needs torch; a test compares them)
ITEMSIZE = {"bf16": 2, "fp32": 4}
# Logits that the ops hold; a test compares these with ops/linear_loss.py and ops/linear_blocks.py, which need torch.
CHUNK_TOKENS = {"cpu": 512, "cuda": 4096}  # tokens whose logits over a whole shard exist at once while the policy trains
BLOCK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 26}  # logits that exist at once in a pass without gradients
BLOCK_WEIGHTS = 1 << 22  # weights of a block on the CPU, which widens those in bf16

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class RoleWork:
    """Settings and sizes that decide what one rank of a role holds."""

    dtype: Literal["bf16", "fp32"]
    trained: bool
    micro_batch_tokens: int
    """Most tokens of a micro-batch, over all cp ranks."""
    num_micro_batches: int
    longest: int = 0
    """Tokens of the longest sequence, for attention that keeps its scores in memory."""
    forward_tokens: int | None = None
    """The same for passes without gradients; None: `micro_batch_tokens`."""
    value_head: bool = False
    distributed_optimizer: bool = True
    recompute: Recompute = "none"
    offload: tuple[bool, bool, bool] = (False, False, False)
    """True for each of (parameters, gradients, optimizer state) that leaves the device while other roles work."""
    adam_buffers: bool = False
    """True for torch's AdamW on a GPU, which Megatron-core takes without TransformerEngine and Apex."""
    fused: bool = False
    """True if SwiGLU is one kernel (`models/build.py`), as on a GPU."""
    steps: int = 1
    """Optimizer steps of one training phase."""
    values: tuple[int, int] | None = None
    """Numbers per token that (a pass without gradients, a training pass) reads; None leaves out the bytes of micro-batches."""
    lora: LoraConfig | None = None
    """Adapters that train, with a value head, on a frozen base; None if the role has none."""
    frozen: frozenset[str] = frozenset()
    """Hugging Face names of weights that do not train. Their activations are counted as if they did, but for a tower's."""
    patches: tuple[int, int] = (0, 0)
    """Most patches of images in a micro-batch of (a training pass, a pass without gradients)."""
    tower_trains: bool = False


def activation_bytes(arch: ModelArch, layout: ParallelLayout, stage: int, work: RoleWork, adapter_width: int = 0) -> int:
    """Peak bytes of a stage in a training pass: activations of micro-batches in flight, plus the larger of a layer's backward
    working set and the output's. adapter_width: numbers per token and layer between A and B of the adapters; 0 without adapters."""
    itemsize, fused, tokens = ITEMSIZE[work.dtype], work.fused, -(-work.micro_batch_tokens // layout.cp)
    boundary = arch.hidden_size // sequence_shards(layout)
    kinds = _kinds_of_chunks(arch, layout, stage)
    kept = {kind: layer_elements_per_token(arch, layout, itemsize, kind, fused) for kind in set().union(*kinds)}
    kept_scores, scores = score_bytes_per_token(arch, layout, work.longest, itemsize)
    if work.recompute != "selective":  # our other attention stores no scores that this recomputation could save
        kept = {kind: elements + kept_scores // itemsize for kind, elements in kept.items()}
    if adapter_width:  # the weights of norms are frozen: no normalised input is kept for their gradients
        kept = {kind: elements + adapter_width - 2 * boundary for kind, elements in kept.items()}
    backward = max(backward_elements(arch, layout, kind, fused) for kind in kept)
    backward = max(backward, (scores + kept_scores * (work.recompute == "selective")) // itemsize)
    # Pipeline messages, in and out, outlive their pass; under full recomputation the input is already the first layer's.
    messages = 0 if layout.pp == 1 else boundary * (1 if work.recompute == "full" else 2)
    if work.recompute == "full":
        # The inputs of all layers are kept, and all activations of the one layer being recomputed.
        chunks = [messages + boundary * sum(layers.values()) for layers in kinds]
        backward += max(kept.values())
    else:
        chunks = [messages + sum(kept[kind] * count for kind, count in layers.items()) for layers in kinds]
    output = 0
    if stage == layout.pp - 1:
        output = tokens * _final_norm_elements(arch, layout, itemsize, work.value_head) * itemsize
        output += (
            0 if work.value_head else output_bytes(arch, layout, tokens, itemsize, fused, trained=True, frozen=adapter_width > 0)
        )
    held = [tokens * one * itemsize for one in chunks]
    tower, passing = tower_bytes(arch, layout, stage, work)
    # Of a micro-batch that passes the tower no layer has kept anything yet.
    passing = max(0, passing - held[0])
    held[0] += tower
    in_flight = peak_in_flight(layout, stage, work.num_micro_batches, held)
    return in_flight + max(tokens * backward * itemsize, output, passing)


def tower_bytes(arch: ModelArch, layout: ParallelLayout, stage: int, work: RoleWork) -> tuple[int, int]:
    """Bytes of a vision tower in the passes of a stage: (kept for the backward pass of a micro-batch, alive at once in the forward
    pass of one that is frozen); zeros without images."""
    patches, vision = work.patches[0], arch.vision
    if vision is None or stage > 0 or not patches:
        return 0, 0
    itemsize = ITEMSIZE[work.dtype]
    # Features that later layers add wait there, one for each of the rank's tokens.
    late = vision.deepstack * -(-work.micro_batch_tokens // layout.cp) * arch.hidden_size // sequence_shards(layout) * itemsize
    if not work.trained:
        return 0, work.patches[1] * working_bytes(vision, itemsize)
    if work.tower_trains:
        return patches * kept_bytes(vision, itemsize) + late, 0
    return late, patches * working_bytes(vision, itemsize)


def forward_bytes(arch: ModelArch, layout: ParallelLayout, stage: int, tokens: int, work: RoleWork) -> int:
    """Peak bytes of a stage in a pass without gradients: in one layer, at the model's output, or in a vision tower. tokens: of the
    micro-batch on this rank."""
    itemsize, fused, patches = ITEMSIZE[work.dtype], work.fused, work.patches[1]
    kinds = set().union(*_kinds_of_chunks(arch, layout, stage))
    layer = tokens * max(forward_elements(arch, layout, kind, fused) for kind in kinds) * itemsize
    layer = max(layer, tokens * score_bytes_per_token(arch, layout, work.longest, itemsize)[1])
    if arch.vision is not None and stage == 0 and patches:
        late = arch.vision.deepstack * tokens * arch.hidden_size // sequence_shards(layout) * itemsize
        layer = max(layer + late, patches * working_bytes(arch.vision, itemsize))
    if stage < layout.pp - 1 or work.value_head:
        return layer
    return max(layer, output_bytes(arch, layout, tokens, itemsize, fused, trained=False))


def micro_batch_bytes(layout: ParallelLayout, tokens: int, values: int) -> int:
    """Bytes of the micro-batches on the device of a last stage. tokens: of one, over all cp ranks. values: fp32 or int32 numbers
    per token that the pass reads."""
    # Two int64 indices of all tokens (`ContextShard.order`, `ranked`) and one of this rank's (`index`).
    of_context = 0 if layout.cp == 1 else 2 * 8 + 8 // layout.cp
    # The current one and the next; under vpp a round of pp and the next.
    alive = 2 if layout.vpp == 1 else layout.pp + 1
    return alive * tokens * (2 * 8 + of_context + 4 * values)  # 2 * 8: token id and position, int64


@cache  # a search of layouts asks for each size of micro-batches
def _kinds_of_chunks(arch: ModelArch, layout: ParallelLayout, stage: int) -> tuple[dict[Kind, int], ...]:
    """Layers of each kind in each chunk of the stage."""
    return tuple(arch.count_kinds(layout.chunk_layers(arch.num_layers, stage, chunk)) for chunk in range(layout.vpp))


def forward_elements(arch: ModelArch, layout: ParallelLayout, kind: Kind = DENSE, fused: bool = False) -> int:
    """Peak activations per token in one layer of a pass without gradients, in elements."""
    # The residual, its norm and the output added to it; the gathered input of a product; the pipeline's message.
    hidden = 4 * arch.hidden_size // sequence_shards(layout) + _gathered(arch, layout) + _message(arch, layout)
    # Query, key and value together, apart and rotated, and the output; the CPU's kernel copies them to padded order: twice this.
    attention = 4 * (arch.num_heads + arch.as_held(layout.tp).num_kv_heads) // layout.tp * arch.key_dim
    if kind.delta:
        attention = _delta_elements(arch.delta, layout, FP32 // ITEMSIZE["bf16"])
    if not kind.sparse:  # gate and up, silu(gate), up with its offset, the product; fused: gate and up, the product
        return hidden + max(attention, (3 if fused else 5) * arch.ffn_size // layout.tp)
    moe = arch.moe
    assert moe is not None
    own = (
        (3 if fused and moe.clamp is None else 6) * moe.ffn_size // layout.etp // (moe.num_experts // layout.ep)
    )  # one expert after the other
    # Rows of tokens on their way to the experts and back.
    rows = moe.top_k * layout.etp * max(5 * arch.hidden_size, 3 * arch.hidden_size + own) // sequence_shards(layout)
    return hidden + max(attention, rows)


def backward_elements(arch: ModelArch, layout: ParallelLayout, kind: Kind = DENSE, fused: bool = False) -> int:
    """Peak working set of one layer's backward pass besides the kept activations, per token, in elements."""
    hidden = 2 * arch.hidden_size // sequence_shards(layout)  # gradients of the residual and of a norm
    if kind.sparse:
        assert arch.moe is not None
        # Gradients of the rows on their way to the experts and back.
        return hidden + 5 * arch.moe.top_k * layout.etp * arch.hidden_size // sequence_shards(layout)
    ffn = arch.ffn_size // layout.tp
    # The larger of two moments. MLP: gradients of the product and its two factors, with one kept tensor freed (fused: of the
    # product, and of gate and up in one). Sequence parallel: the gathered input of the first product and its gradient before the
    # scatter, with all 5 kept tensors of the MLP (fused: 3) freed and the gradient of gate and up (2) alive.
    return hidden + max(2 * ffn, 2 * _gathered(arch, layout) - (1 if fused else 3) * ffn)


def _final_norm_elements(arch: ModelArch, layout: ParallelLayout, itemsize: int, value_head: bool) -> int:
    """Activations per token behind the last layer, in elements."""
    wide = FP32 // itemsize
    # The norm's input in fp32, the normalised input and the output.
    norm = arch.hidden_size * (_normed(arch, itemsize) + 1) // sequence_shards(layout)
    if value_head:  # the head's fp32 copy of its input, and the fp32 gradients of both
        return norm + 3 * wide * arch.hidden_size // sequence_shards(layout)
    return norm + arch.hidden_size + _gathered(arch, layout)  # the gradient of the output, and the gathered output


def _normed(arch: ModelArch, itemsize: int) -> int:
    """Elements per channel that a norm keeps beside its output: the input in fp32 and the normalised input, which weights around 0
    multiply in fp32."""
    wide = FP32 // itemsize
    return 2 * wide if arch.centred_norms else wide + 1


def _gathered(arch: ModelArch, layout: ParallelLayout) -> int:
    """Elements per token of a product's input that sequence parallel gathers from all tp ranks."""
    return arch.hidden_size if layout.sequence_parallel else 0


def _message(arch: ModelArch, layout: ParallelLayout) -> int:
    return 0 if layout.pp == 1 else arch.hidden_size // sequence_shards(layout)


def layer_elements_per_token(
    arch: ModelArch, layout: ParallelLayout, itemsize: int, kind: Kind = DENSE, fused: bool = False
) -> int:
    """Activations that one layer keeps per token of its rank, in elements of `itemsize` bytes."""
    # Two norms: the input in fp32, the normalised input, the output. Of those behind the blocks the residual keeps no output.
    norms = 2 * arch.hidden_size * (_normed(arch, itemsize) + 1)
    norms += 2 * arch.hidden_size * _normed(arch, itemsize) if arch.sandwich else 0
    heads, kv_heads = arch.num_heads // layout.tp, arch.as_held(layout.tp).num_kv_heads // layout.tp
    # Query, key and value, the output, its copy in packed order; context parallel repeats KV heads if there are fewer than ranks.
    attention = 3 * (heads + max(kv_heads, layout.cp)) * arch.head_dim
    if arch.latent is not None:
        # Query, key, padded value and output, and the output without padding. Two norms of latents, as above.
        attention = heads * (4 * arch.key_dim + arch.head_dim)
        norms += (arch.latent.kv_rank + (arch.latent.q_rank or 0)) * (FP32 // itemsize + 2) + arch.latent.rope
    if arch.qk_norm:  # a copy of query and key in fp32, and the normalised ones
        attention += max(3, _normed(arch, itemsize)) * (heads + kv_heads) * arch.head_dim
    if arch.output_gate:  # its sigmoid, and the output before it; in fp32 the norm of queries keeps a copy, and gates beside them
        attention += (4 if itemsize == FP32 else 2) * heads * arch.head_dim
    if kind.delta:
        attention = _delta_elements(arch.delta, layout, FP32 // itemsize)
    if kind.sparse:
        assert arch.moe is not None
        mlp = _expert_elements(arch.moe, arch.hidden_size, layout, itemsize, fused)
        mlp += (3 if fused else 5) * arch.moe.shared_size // layout.tp
        mlp += arch.moe.shared_gate * arch.hidden_size // sequence_shards(layout)  # the output before its gate
    else:  # gate and up, and the product; not fused also up again (Megatron adds an offset to it) and silu(gate)
        mlp = (3 if fused else 5) * arch.ffn_size // layout.tp
    return norms // sequence_shards(layout) + attention + mlp


def _delta_elements(delta: Delta | None, layout: ParallelLayout, wide: int) -> int:
    """Elements that a gated delta net keeps per token of a rank. wide: of one in fp32."""
    assert delta is not None
    keys, values, heads = (size // layout.tp for size in (delta.keys, delta.values, delta.value_heads))
    mixed, key_heads = 2 * keys + values, delta.key_heads // layout.tp
    # The convolution's input and output; queries, keys and values of the rule; queries and keys of length 1, and copies of them
    # for products of chunks.
    kept = 2 * mixed + wide * (mixed + 6 * keys)
    # Of every value head: key and value with their decay, the solved ones, query and key with theirs, what is written, the state of
    # a chunk, scalars; four squares of a chunk, and two of a key head.
    channels = delta.key_dim + delta.value_dim
    of_head = 2 * channels + 2 * delta.key_dim + delta.value_dim + delta.key_dim * delta.value_dim // CHUNK + 12
    kept += wide * (heads * (of_head + 4 * CHUNK) + 2 * key_heads * CHUNK)
    return kept + (2 + 4 * wide) * values  # output, normed, weighted and gated; the gate and its SiLU


def _expert_elements(moe: MoeArch, hidden_size: int, layout: ParallelLayout, itemsize: int, fused: bool) -> int:
    """Elements that dispatch, experts and router keep per token of a rank, if tokens fall evenly on the experts."""
    # A row: its input; gate and up, the product weighted by the router; not fused: also up with its offset, silu(gate) and the
    # product before weighting.
    row = hidden_size + (3 if fused else 6) * moe.ffn_size // layout.etp
    if moe.clamp is not None:  # gate and up, both clamped, sigmoid, gate times it, up with its offset, product; unweighted output
        row = 2 * hidden_size + 7 * moe.ffn_size // layout.etp
    # Weight (fp32) and choice (1 byte) of every expert; 24 bytes of indices and weights for each chosen one.
    router = (moe.num_experts * (FP32 + 1) + moe.top_k * 24) // itemsize
    # A rank of ep receives as many rows as it sends, top_k for each token (more if its experts are busier), and gathers those of
    # its etp ranks.
    return (moe.top_k * layout.etp * row + router) // sequence_shards(layout)


def score_bytes_per_token(arch: ModelArch, layout: ParallelLayout, longest: int, itemsize: int) -> tuple[int, int]:
    """Bytes of a layer's attention scores per token of its rank: (kept for the backward pass, existing at once); (0, 0) for models
    that do not store them. longest: tokens of a sequence."""
    if not arch.keeps_scores:
        return 0, 0
    # Sliding windows save nothing: scores exist for all pairs of tokens. cp leaves a rank fewer heads and all tokens of these.
    pairs = arch.num_heads // layout.tp * longest
    # The softmax, and its rounding for the product with the values; scores, capped or masked ones, their softmax.
    return pairs * (FP32 + itemsize), 3 * pairs * FP32


def peak_in_flight(layout: ParallelLayout, stage: int, num_micro_batches: int, chunks: Sequence[int]) -> int:
    """Peak of a stage in the unit of `chunks`: what a micro-batch keeps in each model chunk from its forward to its backward."""
    # The warm-up is shorter than two rounds of pp micro-batches; from then on every round is like the one before.
    count = padded_micro_batches(layout, min(num_micro_batches, 4 * layout.pp))
    unit = gcd(*chunks) or 1  # most layouts have equal chunks, whose peak is that of one unit each
    shape = tuple(one // unit for one in chunks)
    return unit * _peak_in_flight(layout.pp, layout.vpp, stage, count, min(num_micro_batches, count), shape)


@cache  # a search asks for the same few shapes again and again
def _peak_in_flight(pp: int, vpp: int, stage: int, count: int, num_micro_batches: int, chunks: tuple[int, ...]) -> int:
    held = peak = 0
    for kind, chunk, micro_batch in order_of_passes(pp, vpp, stage, count):
        if micro_batch < num_micro_batches:  # micro-batches that only fill up the last round add no sequences
            held += chunks[chunk] if kind == "forward" else -chunks[chunk]
            peak = max(peak, held)
    return peak


def output_bytes(
    arch: ModelArch, layout: ParallelLayout, tokens: int, itemsize: int, on_gpu: bool, *, trained: bool, frozen: bool = False
) -> int:
    """Peak bytes of the log-probs, for which not all logits exist at once. frozen: the output projection has no gradient."""
    found = logit_bytes(arch, layout, tokens, itemsize, "cuda" if on_gpu else "cpu", trained=trained)
    # The projection's fp32 gradient is made with the log-probs and waits for the backward pass.
    return found + (-(-arch.vocab_size // layout.tp) * arch.hidden_size * FP32 if trained and not frozen else 0)


def logit_bytes(
    arch: ModelArch, layout: ParallelLayout, tokens: int, itemsize: int, device: Literal["cpu", "cuda"], *, trained: bool
) -> int:
    """Peak bytes of the logits, their gradients and the copies of inputs and weights that the products read."""
    rows = -(-arch.vocab_size // layout.tp)
    chunk = min(tokens, CHUNK_TOKENS[device]) if trained else tokens
    block = min(chunk * rows, BLOCK_LOGITS[device])
    widened = 0
    if device == "cpu" and itemsize != FP32:  # the chunk's input, and the weights of a block
        columns = min(rows, max(block // chunk, 256), max(BLOCK_WEIGHTS // arch.hidden_size, 256))
        widened = (chunk + columns) * arch.hidden_size * FP32
    if not trained:  # a block of logits, and with sequence parallel the gathered input
        return block * FP32 + widened + tokens * _gathered(arch, layout) * itemsize
    logits = chunk * rows
    # While they are computed, one block exists twice; later their gradient in the weights' type (fp32 overwrites the logits). On a
    # GPU that of all tokens may wait for one product (`ops.linear_loss`).
    waits = device == "cuda" and tokens <= min(arch.hidden_size * FP32 // itemsize, 2 * chunk)
    gradient = tokens * rows * itemsize if waits else 0 if itemsize == FP32 else logits * itemsize
    return logits * FP32 + max(block * FP32 + widened, gradient)


def sequence_shards(layout: ParallelLayout) -> int:
    """Number of ranks that share the activations between the matrix products."""
    return layout.tp if layout.sequence_parallel else 1
