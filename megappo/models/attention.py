"""Causal attention over packed sequences, and the tables that all layers of one micro-batch share.

`PackedAttention` replaces Megatron's core_attention, `RotaryTEAttention` wraps TransformerEngine's; both rotate q and k themselves.
Under context parallel a rank holds a part of every sequence (`parallel/context.py`). `PackedAttention` exchanges tokens for heads
(DeepSpeed-Ulysses, arXiv:2309.14509); TransformerEngine passes keys and values round a ring.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad as pad_channels
from torch.nn.functional import scaled_dot_product_attention

from megappo.data.packing import moved
from megappo.models.arch import ModelArch, Rope
from megappo.models.rope import inverse_frequencies, query_scale, rotary_table, rotate
from megappo.models.vision import table_of_axes
from megappo.parallel.context import ContextShard

VARLEN_SETTINGS = frozenset(inspect.signature(varlen_attn).parameters)

# A sequence joins a group of padded sequences when it fills at least this share of the group's length (attention costs length^2,
# so a share of 0.8 wastes at most 36 % of the products); below _SHORT tokens a call costs more than the padding.
_FILL = 0.8
_SHORT = 32


@dataclass(frozen=True)
class LengthGroup:
    """`num_sequences` sequences padded to `length`, from row `start` of the padded layout on."""

    start: int
    num_sequences: int
    length: int


@dataclass(frozen=True)
class Grouping:
    """Padded layout of a packed batch. padded: [P] packed index of each padded row. packed: [T] padded row of each token."""

    groups: tuple[LengthGroup, ...]
    padded: Tensor
    packed: Tensor
    _masks: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict, repr=False, compare=False)

    def mask(self, length: int, window: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [length, length]: 0 inside `band`, -inf outside."""
        # One tensor for all layers: the backward keeps it for each of them.
        key = length, window, dtype
        if key not in self._masks:
            outside = ~band(length, window, self.packed.device)
            self._masks[key] = torch.zeros(length, length, dtype=dtype, device=outside.device).masked_fill_(outside, -torch.inf)
        return self._masks[key]


def group_by_length(cu_seqlens: Sequence[int]) -> Grouping:
    """Sort sequences by length and cut them into groups of bounded padding."""
    lengths = torch.tensor(cu_seqlens).diff()
    starts = torch.tensor(cu_seqlens[:-1], dtype=torch.long)
    # Stable: equal lengths keep their order, so that a batch has one grouping and one set of bits.
    order = torch.argsort(lengths, descending=True, stable=True)
    order = order[lengths[order] > 0]
    groups: list[LengthGroup] = []
    padded: list[Tensor] = []
    packed = torch.empty(cu_seqlens[-1], dtype=torch.long)
    row = first = 0
    sorted_lengths = lengths[order].tolist()
    while first < len(sorted_lengths):
        length = sorted_lengths[first]
        last = first
        while last < len(sorted_lengths) and (length <= _SHORT or sorted_lengths[last] >= _FILL * length):
            last += 1
        members = order[first:last]
        offset = torch.arange(length)[None, :]
        # Padding repeats the sequence's own last token: causal queries never see it, and no value of a neighbour can leak.
        index = starts[members, None] + torch.minimum(offset, lengths[members, None] - 1)
        real = offset < lengths[members, None]
        packed[index[real]] = row + torch.arange(index.numel()).view_as(index)[real]
        padded.append(index.flatten())
        groups.append(LengthGroup(row, len(members), length))
        row += index.numel()
        first = last
    return Grouping(tuple(groups), torch.cat(padded) if padded else packed, packed)


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's thd parameters with the position tables and the grouping of one micro-batch.
    Under context parallel the tables are of this rank's T / cp tokens; cu_seqlens and the grouping are of the whole micro-batch."""

    cos: Tensor | None = None
    sin: Tensor | None = None
    """[T, 1, channels that are rotated] like `cos`, in the dtype of the activations."""
    query_scale: Tensor | None = None
    """[T, 1, 1]; None if queries are not scaled."""
    sliding: tuple[Tensor, Tensor] | None = None
    """cos and sin of the layers with a window; None: those of the others."""
    late: Sequence[Tensor] = ()
    """Features of images that layers add to their outputs, from the first layer on: [T, 1, H] of this rank's tokens each."""
    context: ContextShard | None = None
    real: Tensor | None = None
    """[real tokens] int64 positions of the tokens that are not padding, for the router of experts; None if all are real."""
    routes: Tensor | None = None
    """[T, sparse layers x top_k] int16 experts of this rank's tokens, in place of the routers' choice; NO_ID: their own."""
    own_sequences: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    """Result of `moe.local_sequences`, set by the first router."""
    offsets: Tensor | None = None
    """cu_seqlens as given, usually on the host: reading them on the device would synchronise."""
    _grouping: Grouping | None = field(default=None, repr=False)

    def grouping(self) -> Grouping:
        """Group the sequences at first use; all layers and recomputation share the result."""
        if self._grouping is None:
            grouping = group_by_length((self.cu_seqlens_q if self.offsets is None else self.offsets).tolist())
            device = self.cu_seqlens_q.device
            self._grouping = Grouping(grouping.groups, moved(grouping.padded, device), moved(grouping.packed, device))
        return self._grouping

    def rotate(self, query: Tensor, key: Tensor, *, slides: bool) -> tuple[Tensor, Tensor]:
        """Apply positions to query and key [T, heads, head_dim] (this rank's tokens under context parallel).
        slides: the layer has a window."""
        assert self.cos is not None and self.sin is not None
        cos, sin = self.sliding if slides and self.sliding is not None else (self.cos, self.sin)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return (query if self.query_scale is None else query * self.query_scale), key


def packed_sequences(
    arch: ModelArch,
    cu_seqlens: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    context: ContextShard | None = None,
    axes: Tensor | None = None,
) -> PackedSequences:
    """Build `PackedSequences` of a micro-batch with cu_seqlens [B+1] (int32, on the host or the device).
    context: this rank's part of it under context parallel. axes: [3, T] positions of a vision-language model."""
    ends = cu_seqlens.long()
    lengths = ends.diff()
    positions = torch.arange(int(ends[-1]), device=ends.device) - ends[:-1].repeat_interleave(lengths)
    positions = moved(positions, device)
    if context is not None:
        positions = context.take(positions)

    def table(rope: Rope) -> tuple[Tensor, Tensor]:
        return rotary_table(positions, *inverse_frequencies(rope, rope.channels or arch.head_dim), dtype)

    if axes is None:
        cos, sin = table(arch.rope)
    else:
        assert arch.vision is not None, "positions of images, and a model that reads text alone"
        cos, sin = table_of_axes(moved(axes, device), context, arch, dtype)
    longest = int(lengths.max()) if lengths.numel() else 0
    offsets, cu_seqlens = cu_seqlens, moved(cu_seqlens.to(torch.int32), device)
    # TransformerEngine's ring needs the padded offsets; the same tensor means no padding between the sequences.
    padded: Any = None if context is None else cu_seqlens  # None is Megatron's default, which its types leave out
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        context=context,
        offsets=offsets,
        cos=cos,
        sin=sin,
        sliding=None if arch.sliding_rope is None else table(arch.sliding_rope),
        query_scale=None if arch.rope.llama4_beta is None else query_scale(positions, arch.rope, dtype),
    )


class _Pad(torch.autograd.Function):
    """Packed [T, ...] -> padded [P, ...]. Padding has zero gradient (`_Unpad` does not read it), so the backward is a gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grouping: Grouping) -> Tensor:
        ctx.grouping = grouping
        return x.index_select(0, grouping.padded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad.index_select(0, ctx.grouping.packed), None


class _Unpad(torch.autograd.Function):
    """Padded [P, ...] -> packed [T, ...]; the backward leaves zeros at the padding, which `_Pad` relies on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grouping: Grouping) -> Tensor:
        ctx.grouping, ctx.num_rows = grouping, x.size(0)
        return x.index_select(0, grouping.packed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        padded = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return padded.index_copy_(0, ctx.grouping.packed, grad), None


def pad(x: Tensor, grouping: Grouping) -> Tensor:
    """Packed [T, ...] -> padded rows of the groups [P, ...]; differentiable where `unpad` leaves padding without gradients."""
    padded = _Pad.apply(x, grouping)
    assert isinstance(padded, Tensor)
    return padded


def unpad(x: Tensor, grouping: Grouping) -> Tensor:
    """Padded rows of the groups [P, ...] -> packed [T, ...]; differentiable."""
    packed = _Unpad.apply(x, grouping)
    assert isinstance(packed, Tensor)
    return packed


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, grouping: Grouping, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention within each sequence: one scaled_dot_product_attention call per length group.
    query [T, heads, dim], key and value [T, kv_heads, dim] -> [T, heads, dim]. K and V are shared by query heads, not repeated.
    window: a token sees itself and the window - 1 tokens before it."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # [sequences, heads, length, dim]; the CPU kernel is faster on contiguous heads by more than the copy costs.
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        length = q.size(2)
        mask = None if window is None or length <= window else grouping.mask(length, window, q.dtype)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.transpose(1, 2)

    return by_length((query, key, value), grouping, attend)


def by_length(tensors: Sequence[Tensor], grouping: Grouping, function: Callable[..., Tensor]) -> Tensor:
    """Call `function` for each group of sequences padded to one length, [sequences, length, ...] each, for all tokens of the packed
    batch: tensors [T, ...] -> [T, ...], of the shape of the first one if there is no token."""
    if not grouping.groups:
        return tensors[0].new_zeros(tensors[0].shape)
    padded, outputs = [pad(x, grouping) for x in tensors], []
    for group in grouping.groups:
        rows, sizes = group.num_sequences * group.length, (group.num_sequences, group.length)
        parts = (x.narrow(0, group.start, rows).view(*sizes, *x.shape[1:]) for x in padded)
        outputs.append(function(*parts).flatten(0, 1))
    return unpad(torch.cat(outputs), grouping)


def band(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length] bool, [i, j] true where token i sees token j: i - window < j <= i, as transformers and vLLM define it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float, window: int | None = None
) -> Tensor:
    """Compute `grouped_attention` with torch's flash kernel (CUDA, fp16 or bf16)."""
    # One split: with more, the order in which a row is summed would depend on the other sequences.
    settings: dict[str, Any] = {"enable_gqa": query.size(1) != key.size(1), "num_splits": 1}
    if not VARLEN_SETTINGS.issuperset(settings):  # torch 2.11 never splits, and needs a KV head for each head
        key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
        settings = {}
    out = varlen_attn(
        query,
        key,
        value,
        packed.cu_seqlens_q,
        packed.cu_seqlens_kv,
        packed.max_seqlen_q,
        packed.max_seqlen_kv,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **settings,
    )
    assert isinstance(out, Tensor)  # a tuple only if more outputs are requested
    return out


def whole_sequences(query: Tensor, key: Tensor, value: Tensor, context: ContextShard) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange tokens for heads: [T / cp, heads, dim] -> all tokens with this rank's heads [T, heads / cp, dim]. Collective."""
    cp, (tokens, _, dim) = context.size, query.shape
    if key.size(1) < cp:  # every rank gets the KV head that its query heads share
        key, value = (x.repeat_interleave(cp // x.size(1), dim=1) for x in (key, value))
    # Block r of query, key and value goes to rank r: concatenated they need one exchange instead of three.
    blocks = [x.view(tokens, cp, x.size(1) // cp, dim) for x in (query, key, value)]
    sizes = [block.size(2) for block in blocks]
    merged = torch.cat(blocks, dim=2).view(tokens, cp * sum(sizes), dim)
    query, key, value = context.heads_from_tokens(merged).split(sizes, dim=1)
    return query, key, value


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grouping: Grouping,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `grouped_attention` with scores capped at `softcap`, and a sink [heads] for each query head, which no fused kernel
    has. The scores are in memory, which grows with the square of the longest sequence; softmax in fp32."""
    return by_length((query, key, value), grouping, lambda q, k, v: _attend(q, k, v, scale, window, softcap, sinks))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend sequences of one length: q [B, L, heads, dim], k and v [B, L, kv_heads, dim] -> [B, L, heads, dim]."""
    sequences, length, heads, dim = q.shape
    shared = heads // k.size(2)  # query heads of a KV head, which is not repeated
    q = q.view(sequences, length, k.size(2), shared, dim)
    scores = torch.einsum("bikgd,bjkd->bkgij", q, k).float() * scale
    if softcap is not None:  # Gemma 2
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~band(length, length if window is None else window, q.device), -torch.inf)
    if sinks is not None:  # gpt-oss: a score of each head that takes a share of the softmax and adds no value
        sink = sinks.float().view(1, k.size(2), shared, 1, 1).expand(sequences, -1, -1, length, 1)
        scores = torch.cat([scores, sink], dim=-1)
    shares = scores.softmax(dim=-1)[..., :length].to(v.dtype)
    return torch.einsum("bkgij,bjkd->bikgd", shares, v).reshape(sequences, length, heads, dim)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within each sequence, by the kernel for this device and these scores: query [T, heads, dim], key and value
    [T, kv_heads, dim], whose values may have fewer channels -> [T, heads, value's dim]; T / cp tokens under context parallel, which
    are exchanged for heads. window: tokens that a token sees, itself included. softcap: cap of the scores. sinks: [heads]."""
    context, value_dim = packed.context, value.size(-1)
    if value_dim < key.size(-1):  # latent attention; kernels and the exchange want one width
        value = pad_channels(value, (0, key.size(-1) - value_dim))
    if context is not None:
        query, key, value = (x.contiguous() for x in whole_sequences(query, key, value, context))
        sinks = None if sinks is None else sinks.view(context.size, -1)[context.rank]  # of the exchanged heads
    if softcap is not None or sinks is not None:
        out = plain_attention(query, key, value, packed.grouping(), scale, window=window, softcap=softcap, sinks=sinks)
    elif query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        out = varlen_attention(query, key, value, packed, scale, window)
    else:
        out = grouped_attention(query, key, value, packed.grouping(), scale, window)
    return (out if context is None else context.tokens_from_heads(out))[..., :value_dim]


class PackedAttention(torch.nn.Module):
    """Core attention of Megatron's SelfAttention (local layer spec)."""

    sinks: torch.nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        rotated: bool = False,
    ) -> None:
        """rotated: queries and keys come with their positions."""
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        assert config.kv_channels is not None and config.attention_dropout == 0.0
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.window, self.rotated = _window(config, layer_number), rotated
        self.register_parameter("sinks", None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [T, heads, dim], key, value [T, kv_heads, dim] -> [T, heads * value's dim]; T / cp of them under cp."""
        assert attention_mask is None and attention_bias is None
        assert isinstance(packed_seq_params, PackedSequences), "the model's own forward builds PackedSequences"
        if not self.rotated:
            query, key = packed_seq_params.rotate(query, key, slides=self.window is not None)
        return attend(query, key, value, packed_seq_params, self.scale, window=self.window, sinks=self.sinks).flatten(1)


class SinkAttention(PackedAttention):
    """Core attention with a learned sink for each query head (gpt-oss), cut over tp with the heads."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.sinks = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """Tokens that a token of this layer sees, itself included; None for all before it. layer_number: 1.. in the whole model."""
    skipped: Any = config.window_attn_skip_freq  # may be None, which the types of its reader leave out
    if config.window_size is None or not is_layer_window_attention(config.window_size, skipped, layer_number):
        return None
    return config.window_size[0] + 1  # Megatron does not count the token itself


def rotary_te_attention() -> Callable[..., torch.nn.Module]:
    """Make TransformerEngine's attention class with our rotation in front."""
    # Made in a function: the base class can be imported only if TransformerEngine is installed.
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class RotaryTEAttention(TEDotProductAttention):
        """TEDotProductAttention on rotated q and k."""

        def __init__(self, config: TransformerConfig, layer_number: int, *args: Any, **kwargs: Any) -> None:
            # TransformerEngine's ring over cp has no windows, and its all-to-all needs cp KV heads on every tp rank and a recent
            # version for packed sequences: layers with a window exchange tokens for heads as `PackedAttention` does.
            self.slides = _window(config, layer_number) is not None
            self.exchanges_heads = config.context_parallel_size > 1 and self.slides
            super().__init__(_one_cp_rank(config) if self.exchanges_heads else config, layer_number, *args, **kwargs)

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            packed = kwargs["packed_seq_params"]
            query, key = packed.rotate(query, key, slides=self.slides)
            if not self.exchanges_heads or packed.context is None:
                return super().forward(query, key, value, *args, **kwargs)
            query, key, value = (x.contiguous() for x in whole_sequences(query, key, value, packed.context))
            out = super().forward(query, key, value, *args, **kwargs)
            return packed.context.tokens_from_heads(out.view(query.shape)).flatten(1)

    return RotaryTEAttention


def _one_cp_rank(config: TransformerConfig) -> TransformerConfig:
    """Config of the attention of one cp rank after `whole_sequences`: no context parallel, its share of the heads."""
    assert config.num_query_groups is not None
    alone = copy.copy(config)
    alone.context_parallel_size = 1
    alone.num_attention_heads = config.num_attention_heads // config.context_parallel_size
    # At least one KV head on every tp rank: `whole_sequences` repeats fewer.
    alone.num_query_groups = max(config.num_query_groups // config.context_parallel_size, config.tensor_model_parallel_size)
    return alone
