"""Estimate of the activations of one rank after Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer
models", section 4), redone for packed tokens, no dropout, SwiGLU, and attention that never stores its scores.

Temporary buffers of kernels and allocators are not counted. Weights and optimizer are in `memory.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megappo.commands.plan.timeline import order_of_passes, padded_micro_batches
from megappo.config.role_sections import LoraConfig
from megappo.models.arch import ModelArch, MoeArch
from megappo.parallel.layout import ParallelLayout

FP32 = 4
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
    """Hugging Face names of weights that do not train. Their activations are counted as if they did."""


def activation_bytes(arch: ModelArch, layout: ParallelLayout, stage: int, work: RoleWork, adapter_width: int = 0) -> int:
    """Peak bytes of a stage in a training pass: activations of micro-batches in flight, plus the larger of a layer's backward
    working set and the output's. adapter_width: numbers per token and layer between A and B of the adapters; 0 without adapters."""
    itemsize, fused, tokens = ITEMSIZE[work.dtype], work.fused, -(-work.micro_batch_tokens // layout.cp)
    boundary = arch.hidden_size // sequence_shards(layout)
    sparse = _sparse_layers(arch, layout, stage)
    kept = {kind: layer_elements_per_token(arch, layout, itemsize, kind, fused) for kind in {*sum(sparse, [])}}
    if adapter_width:  # the weights of norms are frozen: no normalised input is kept for their gradients
        kept = {kind: elements + adapter_width - 2 * boundary for kind, elements in kept.items()}
    backward = max(backward_elements(arch, layout, kind, fused) for kind in kept)
    # Pipeline messages, in and out, outlive their pass; under full recomputation the input is already the first layer's.
    messages = 0 if layout.pp == 1 else boundary * (1 if work.recompute == "full" else 2)
    if work.recompute == "full":
        # The inputs of all layers are kept, and all activations of the one layer being recomputed.
        chunks = [messages + boundary * len(layers) for layers in sparse]
        backward += max(kept.values())
    else:  # selective too: our attention stores no scores that recomputation could save
        chunks = [messages + sum(kept[kind] for kind in layers) for layers in sparse]
    output = 0
    if stage == layout.pp - 1:
        output = tokens * _final_norm_elements(arch, layout, itemsize, work.value_head) * itemsize
        output += (
            0 if work.value_head else output_bytes(arch, layout, tokens, itemsize, fused, trained=True, frozen=adapter_width > 0)
        )
    in_flight = peak_in_flight(layout, stage, work.num_micro_batches, chunks)
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
    """Peak bytes of a stage in a pass without gradients: in one layer, or at the model's output."""
    kinds = {*sum(_sparse_layers(arch, layout, stage), [])}
    layer = tokens * max(forward_elements(arch, layout, kind, fused) for kind in kinds) * itemsize
    if stage < layout.pp - 1 or value_head:
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


def _sparse_layers(arch: ModelArch, layout: ParallelLayout, stage: int) -> list[list[bool]]:
    """[chunk][layer] of the stage: True if the layer has experts."""
    numbers = [layout.chunk_layers(arch.num_layers, stage, chunk) for chunk in range(layout.vpp)]
    return [[arch.is_sparse(layer) for layer in chunk] for chunk in numbers]


def forward_elements(arch: ModelArch, layout: ParallelLayout, sparse: bool = False, fused: bool = False) -> int:
    """Peak activations per token in one layer of a pass without gradients, in elements."""
    # The residual, its norm and the output added to it; the gathered input of a product; the pipeline's message.
    hidden = 4 * arch.hidden_size // sequence_shards(layout) + _gathered(arch, layout) + _message(arch, layout)
    # Query, key and value together, apart and rotated, and the output; the CPU's kernel copies them to padded order: twice this.
    attention = 4 * (arch.num_heads + arch.num_kv_heads) // layout.tp * arch.head_dim
    if not sparse:  # gate and up, silu(gate), up with its offset, the product; fused: gate and up, the product
        return hidden + max(attention, (3 if fused else 5) * arch.ffn_size // layout.tp)
    moe = arch.moe
    assert moe is not None
    own = (3 if fused else 6) * moe.ffn_size // layout.etp // (moe.num_experts // layout.ep)  # one expert after the other
    # Rows of tokens on their way to the experts and back.
    rows = moe.top_k * layout.etp * max(5 * arch.hidden_size, 3 * arch.hidden_size + own) // sequence_shards(layout)
    return hidden + max(attention, rows)


def backward_elements(arch: ModelArch, layout: ParallelLayout, sparse: bool = False, fused: bool = False) -> int:
    """Peak working set of one layer's backward pass besides the kept activations, per token, in elements."""
    hidden = 2 * arch.hidden_size // sequence_shards(layout)  # gradients of the residual and of a norm
    if sparse:
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
    norm = arch.hidden_size * (wide + 2) // sequence_shards(layout)
    if value_head:  # the head's fp32 copy of its input, and the fp32 gradients of both
        return norm + 3 * wide * arch.hidden_size // sequence_shards(layout)
    return norm + arch.hidden_size + _gathered(arch, layout)  # the gradient of the output, and the gathered output


def _gathered(arch: ModelArch, layout: ParallelLayout) -> int:
    """Elements per token of a product's input that sequence parallel gathers from all tp ranks."""
    return arch.hidden_size if layout.sequence_parallel else 0


def _message(arch: ModelArch, layout: ParallelLayout) -> int:
    return 0 if layout.pp == 1 else arch.hidden_size // sequence_shards(layout)


def layer_elements_per_token(
    arch: ModelArch, layout: ParallelLayout, itemsize: int, sparse: bool = False, fused: bool = False
) -> int:
    """Activations that one layer keeps per token of its rank, in elements of `itemsize` bytes. sparse: the layer has experts."""
    # Two norms: the input in fp32, the normalised input, the output.
    norms = 2 * (arch.hidden_size * FP32 // itemsize + 2 * arch.hidden_size)
    heads, kv_heads = arch.num_heads // layout.tp, arch.num_kv_heads // layout.tp
    # Query, key and value, the output, its copy in packed order; context parallel repeats KV heads if there are fewer than ranks.
    attention = 3 * (heads + max(kv_heads, layout.cp)) * arch.head_dim
    if arch.qk_norm:  # a copy of query and key in fp32, and the normalised ones
        attention += 3 * (heads + kv_heads) * arch.head_dim
    if sparse:
        assert arch.moe is not None
        mlp = _expert_elements(arch.moe, arch.hidden_size, layout, itemsize, fused)
    else:  # gate and up, and the product; not fused also up again (Megatron adds an offset to it) and silu(gate)
        mlp = (3 if fused else 5) * arch.ffn_size // layout.tp
    return norms // sequence_shards(layout) + attention + mlp


def _expert_elements(moe: MoeArch, hidden_size: int, layout: ParallelLayout, itemsize: int, fused: bool) -> int:
    """Elements that dispatch, experts and router keep per token of a rank, if tokens fall evenly on the experts."""
    # A row: its input; gate and up, the product weighted by the router; not fused: also up with its offset, silu(gate) and the
    # product before weighting.
    row = hidden_size + (3 if fused else 6) * moe.ffn_size // layout.etp
    # Weight (fp32) and choice (1 byte) of every expert; 24 bytes of indices and weights for each chosen one.
    router = (moe.num_experts * (FP32 + 1) + moe.top_k * 24) // itemsize
    # A rank of ep receives as many rows as it sends, top_k for each token (more if its experts are busier), and gathers those of
    # its etp ranks.
    return (moe.top_k * layout.etp * row + router) // sequence_shards(layout)


def peak_in_flight(layout: ParallelLayout, stage: int, num_micro_batches: int, chunks: Sequence[int]) -> int:
    """Peak of a stage in the unit of `chunks`: what a micro-batch keeps in each model chunk from its forward to its backward."""
    # The warm-up is shorter than two rounds of pp micro-batches; from then on every round is like the one before.
    count = padded_micro_batches(layout, min(num_micro_batches, 4 * layout.pp))
    held = peak = 0
    for kind, chunk, micro_batch in order_of_passes(layout, stage, count):
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
