"""Activations of one rank: an estimate in the manner of Korthikanti et al. 2022 ("Reducing activation recomputation in large
transformer models", section 4), redone for this model: packed tokens, no dropout, SwiGLU, attention that never stores its scores.

Temporary buffers of kernels and allocators are not counted. Weights and optimizer are `memory.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megappo.models.arch import ModelArch, MoeArch
from megappo.parallel.layout import ParallelLayout

FP32 = 4
# What the ops keep of the logits on a GPU; a test holds both against ops/linear_loss.py and ops/linear_blocks.py, which need torch.
CHUNK_TOKENS = 4096  # tokens whose logits over a whole shard exist at once while the policy trains
BLOCK_LOGITS = 1 << 26  # logits that exist at once in a pass without gradients

Recompute = Literal["none", "selective", "full"]


def activation_bytes(
    arch: ModelArch,
    layout: ParallelLayout,
    stage: int,
    tokens: int,
    num_micro_batches: int,
    itemsize: int,
    recompute: Recompute,
    *,
    value_head: bool = False,
    fused: bool = False,
) -> int:
    """Bytes of a stage at its fullest moment of a training pass: what its micro-batches in flight keep, and the larger of what the
    backward pass of a layer and what the model's output need besides.

    tokens: of a micro-batch on this rank, its part under context parallel. recompute: selective counts like none, because
    attention stores no scores that it could save; full keeps the input of every layer, and all of the one being recomputed.
    fused: SwiGLU is one kernel (`models/fusion.py`).
    """
    boundary = arch.hidden_size // sequence_shards(layout)
    sparse = _sparse_layers(arch, layout, stage)
    kept = {kind: layer_elements_per_token(arch, layout, itemsize, kind, fused) for kind in {*sum(sparse, [])}}
    backward = max(backward_elements(arch, layout, kind, fused) for kind in kept)
    # Messages of the pipeline outlive the pass that made or read them; the input is the first layer's own under recomputation.
    messages = 0 if layout.pp == 1 else boundary * (1 if recompute == "full" else 2)
    if recompute == "full":
        chunks = [messages + boundary * len(layers) for layers in sparse]
        backward += max(kept.values())
    else:
        chunks = [messages + sum(kept[kind] for kind in layers) for layers in sparse]
    output = 0
    if stage == layout.pp - 1:
        output = tokens * _final_norm_elements(arch, layout, itemsize, value_head) * itemsize
        output += 0 if value_head else output_bytes(arch, layout, tokens, itemsize, trained=True)
    in_flight = peak_in_flight(layout, stage, num_micro_batches, chunks)
    return tokens * in_flight * itemsize + max(tokens * backward * itemsize, output)


def forward_bytes(
    arch: ModelArch,
    layout: ParallelLayout,
    stage: int,
    tokens: int,
    itemsize: int,
    *,
    value_head: bool = False,
    fused: bool = False,
) -> int:
    """Bytes of a stage at its fullest moment of a pass without gradients: one layer, or the model's output."""
    kinds = {*sum(_sparse_layers(arch, layout, stage), [])}
    layer = tokens * max(forward_elements(arch, layout, kind, fused) for kind in kinds) * itemsize
    if stage < layout.pp - 1 or value_head:
        return layer
    return max(layer, output_bytes(arch, layout, tokens, itemsize, trained=False))


def micro_batch_bytes(layout: ParallelLayout, tokens: int, values: int) -> int:
    """Micro-batches of `tokens` tokens (over all cp ranks) on the device, of a last stage: the one at work and the next, or under
    vpp those of a round and the next. values: fp32 or int32 numbers of a token in the fields that the pass reads.

    A token's id and its place, and with cp where it lies on the ranks, are int64. A rank's other stages hold no fields.
    """
    of_context = 0 if layout.cp == 1 else 2 * 8 + 8 // layout.cp
    alive = 2 if layout.vpp == 1 else layout.pp + 1
    return alive * tokens * (2 * 8 + of_context + 4 * values)


def _sparse_layers(arch: ModelArch, layout: ParallelLayout, stage: int) -> list[list[bool]]:
    """Of every chunk of the stage: whether each layer has experts."""
    numbers = [layout.chunk_layers(arch.num_layers, stage, chunk) for chunk in range(layout.vpp)]
    return [[arch.is_sparse(layer) for layer in chunk] for chunk in numbers]


def forward_elements(arch: ModelArch, layout: ParallelLayout, sparse: bool = False, fused: bool = False) -> int:
    """Activations per token that exist at once in one layer of a pass without gradients, in elements.

    The residual, its norm and what is added to it; with sequence parallel the gathered input of a product. Then the larger of
    attention (query, key and value together, apart and rotated, and the output; the CPU's kernel takes twice as much, for copies
    in padded order) and MLP: gate and up, silu(gate), up with its offset, and the product (fused: gate and up, and the product),
    or the rows of experts on their way there and back.
    """
    hidden = 4 * arch.hidden_size // sequence_shards(layout) + _gathered(arch, layout) + _message(arch, layout)
    attention = 4 * (arch.num_heads + arch.num_kv_heads) // layout.tp * arch.head_dim
    if not sparse:
        return hidden + max(attention, (3 if fused else 5) * arch.ffn_size // layout.tp)
    moe = arch.moe
    assert moe is not None
    own = (3 if fused else 6) * moe.ffn_size // layout.etp // (moe.num_experts // layout.ep)  # one expert after the other
    rows = moe.top_k * layout.etp * max(5 * arch.hidden_size, 3 * arch.hidden_size + own) // sequence_shards(layout)
    return hidden + max(attention, rows)


def backward_elements(arch: ModelArch, layout: ParallelLayout, sparse: bool = False, fused: bool = False) -> int:
    """What the backward pass of one layer needs besides what was kept, per token, in elements.

    The gradients of the residual and of a norm. Then, where the most is there: the gradients of the MLP's product and of its two
    factors, when one kept tensor has gone (fused: of the product, and of gate and up in one); or with sequence parallel the
    gathered input of the first product and the gradient before it is scattered, when all kept of the MLP (5 tensors, fused 3) has
    gone and the gradient of gate and up (2) is there. Of experts the rows on their way there and back.
    """
    hidden = 2 * arch.hidden_size // sequence_shards(layout)
    if sparse:
        assert arch.moe is not None
        return hidden + 5 * arch.moe.top_k * layout.etp * arch.hidden_size // sequence_shards(layout)
    ffn = arch.ffn_size // layout.tp
    return hidden + max(2 * ffn, 2 * _gathered(arch, layout) - (1 if fused else 3) * ffn)


def _final_norm_elements(arch: ModelArch, layout: ParallelLayout, itemsize: int, value_head: bool) -> int:
    """Per token behind the last layer: the norm's input (in fp32), the normalised input and the output; then the gathered output
    and its gradient of a language model, or the fp32 copy that the value head takes and the fp32 gradients of both.
    """
    wide = FP32 // itemsize
    norm = arch.hidden_size * (wide + 2) // sequence_shards(layout)
    if value_head:
        return norm + 3 * wide * arch.hidden_size // sequence_shards(layout)
    return norm + arch.hidden_size + _gathered(arch, layout)


def _gathered(arch: ModelArch, layout: ParallelLayout) -> int:
    """The input of a product under sequence parallel: the tokens of all tp ranks."""
    return arch.hidden_size if layout.sequence_parallel else 0


def _message(arch: ModelArch, layout: ParallelLayout) -> int:
    return 0 if layout.pp == 1 else arch.hidden_size // sequence_shards(layout)


def layer_elements_per_token(
    arch: ModelArch, layout: ParallelLayout, itemsize: int, sparse: bool = False, fused: bool = False
) -> int:
    """Activations that one layer keeps per token of its rank, in elements of `itemsize` bytes. sparse: a layer of experts.

    Each of the two norms: its input (in fp32), the normalised input and the output. Attention: query, key and value, the output,
    and its copy in the packed order; context parallel exchanges tokens for heads and repeats KV heads where there are fewer than
    ranks. Norms of the heads keep a copy in fp32 and the normalised one. A test holds this against the tensors that a real model
    saves.
    """
    norms = 2 * (arch.hidden_size * FP32 // itemsize + 2 * arch.hidden_size)
    heads, kv_heads = arch.num_heads // layout.tp, arch.num_kv_heads // layout.tp
    attention = 3 * (heads + max(kv_heads, layout.cp)) * arch.head_dim
    if arch.qk_norm:
        attention += 3 * (heads + kv_heads) * arch.head_dim
    if sparse:
        assert arch.moe is not None
        mlp = _expert_elements(arch.moe, arch.hidden_size, layout, itemsize, fused)
    else:  # gate and up, and the product; not fused also up again (Megatron adds an offset to it) and silu(gate)
        mlp = (3 if fused else 5) * arch.ffn_size // layout.tp
    return norms // sequence_shards(layout) + attention + mlp


def _expert_elements(moe: MoeArch, hidden_size: int, layout: ParallelLayout, itemsize: int, fused: bool) -> int:
    """What dispatch, experts and router keep per token of a rank, where the tokens fall evenly on the experts.

    A rank of ep receives as many rows as it sends, top_k for each of its tokens, and gathers those of its etp ranks. A row: its
    input; gate and up, and the product weighed by the router; not fused also up with its offset, silu(gate) and the product before
    it is weighed. Router: weight (fp32) and choice of every expert, and the indices and weights of the chosen ones (24 bytes
    each). A rank whose experts are chosen more often than others needs more.
    """
    row = hidden_size + (3 if fused else 6) * moe.ffn_size // layout.etp
    router = (moe.num_experts * (FP32 + 1) + moe.top_k * 24) // itemsize
    return (moe.top_k * layout.etp * row + router) // sequence_shards(layout)


def peak_in_flight(layout: ParallelLayout, stage: int, num_micro_batches: int, chunks: Sequence[int]) -> int:
    """The most that a stage holds at once; a micro-batch keeps chunks[c] in model chunk c from its forward to its backward pass.

    The order of 1F1B, and of its interleaved form (Narayanan et al. 2021, section 2.2): in rounds of pp micro-batches, a chunk
    after the other forwards, in the opposite order backwards, after the warm-up of Megatron-core's `get_pp_rank_microbatches`.
    Those that fill up the last round count as empty: by as much as they hold, the others are smaller.
    """
    pp, vpp = layout.pp, layout.vpp
    warm_up = pp - stage - 1 if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp
    # The warm-up is shorter than two rounds; from then on every round is like the one before.
    rounds = min(-(-num_micro_batches // pp), 4)
    passes = [(chunk, round_ * pp + place) for round_ in range(rounds) for chunk in range(vpp) for place in range(pp)]
    held = peak = 0
    for step, (chunk, micro_batch) in enumerate(passes):
        if micro_batch < num_micro_batches:
            held += chunks[chunk]
            peak = max(peak, held)
        if step >= warm_up:
            chunk, micro_batch = passes[step - warm_up]
            held -= chunks[vpp - 1 - chunk] if micro_batch < num_micro_batches else 0
    return peak


def output_bytes(arch: ModelArch, layout: ParallelLayout, tokens: int, itemsize: int, trained: bool) -> int:
    """Log-probs without full logits. Training: fp32 logits of a chunk; while they are made a block of them a second time, then
    their gradient in the weights' type (fp32 is written over the logits); and the projection's fp32 gradient, which waits for the
    backward pass. Otherwise a block of logits, and with sequence parallel the gathered input.
    """
    rows = -(-arch.vocab_size // layout.tp)
    if not trained:
        return min(tokens * rows, BLOCK_LOGITS) * FP32 + tokens * _gathered(arch, layout) * itemsize
    logits = min(tokens, CHUNK_TOKENS) * rows
    second = max(min(logits, BLOCK_LOGITS) * FP32, 0 if itemsize == FP32 else logits * itemsize)
    return logits * FP32 + second + rows * arch.hidden_size * FP32


def sequence_shards(layout: ParallelLayout) -> int:
    """Ranks over which the activations between the matrix products are cut."""
    return layout.tp if layout.sequence_parallel else 1
