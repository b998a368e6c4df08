"""Activations of one rank: an estimate in the manner of Korthikanti et al. 2022 ("Reducing activation recomputation in large
transformer models", section 4), redone for this model: packed tokens, no dropout, SwiGLU, attention that never stores its scores.

Temporary buffers of kernels and allocators are not counted. Weights and optimizer are `memory.py`'s.
"""

from __future__ import annotations

from typing import Literal, Sequence

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
    trained: bool = True,
) -> int:
    """Bytes that the layers of a stage keep at its fullest moment; without a backward pass, what a single layer needs.

    tokens: of a micro-batch on this rank, its part under context parallel. recompute: selective counts like none, because
    attention stores no scores that it could save; full keeps the input of every layer, and all of the one being recomputed.
    """
    boundary = arch.hidden_size // _sequence_shards(layout)
    numbers = [layout.chunk_layers(arch.num_layers, stage, chunk) for chunk in range(layout.vpp)]
    sparse = [[arch.is_sparse(layer) for layer in chunk] for chunk in numbers]
    elements = {kind: layer_elements_per_token(arch, layout, itemsize, kind) for kind in {*sum(sparse, [])}}
    chunks = [[elements[kind] for kind in chunk] for chunk in sparse]
    largest = max(max(layers) for layers in chunks)
    if not trained:
        return tokens * largest * itemsize
    if recompute == "full":
        kept, working = [boundary * len(layers) for layers in chunks], largest
    else:
        kept, working = [sum(layers) for layers in chunks], 0
    return tokens * (peak_in_flight(layout, stage, num_micro_batches, kept) + working) * itemsize


def layer_elements_per_token(arch: ModelArch, layout: ParallelLayout, itemsize: int, sparse: bool = False) -> int:
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
        mlp = _expert_elements(arch.moe, arch.hidden_size, layout, itemsize)
    else:  # gate and up, up again (Megatron adds an offset to it), silu(gate), and the product
        mlp = 5 * arch.ffn_size // layout.tp
    return norms // _sequence_shards(layout) + attention + mlp


def _expert_elements(moe: MoeArch, hidden_size: int, layout: ParallelLayout, itemsize: int) -> int:
    """What dispatch, experts and router keep per token of a rank, where the tokens fall evenly on the experts.

    A rank of ep receives as many rows as it sends, top_k for each of its tokens, and gathers those of its etp ranks. A row: its
    input; gate and up, up with its offset, silu(gate), the product, and the product weighed by the router. Router: weight (fp32)
    and choice of every expert, and the indices and weights of the chosen ones (24 bytes each). A rank whose experts are chosen
    more often than others needs more.
    """
    row = hidden_size + 6 * moe.ffn_size // layout.etp
    router = (moe.num_experts * (FP32 + 1) + moe.top_k * 24) // itemsize
    return (moe.top_k * layout.etp * row + router) // _sequence_shards(layout)


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
    passes = [
        (chunk, round_ * pp + place) for round_ in range(rounds) for chunk in range(vpp) for place in range(pp)
    ]
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
    """Log-probs without full logits. Training: fp32 logits of a chunk, their gradient in the weights' type (fp32 is written over
    the logits), and the projection's fp32 gradient, which waits for the backward pass.
    """
    rows = -(-arch.vocab_size // layout.tp)
    if not trained:
        return min(tokens * rows, BLOCK_LOGITS) * FP32
    logit = FP32 if itemsize == FP32 else FP32 + itemsize
    return min(tokens, CHUNK_TOKENS) * rows * logit + rows * arch.hidden_size * FP32


def _sequence_shards(layout: ParallelLayout) -> int:
    return layout.tp if layout.sequence_parallel else 1
