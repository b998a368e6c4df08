"""Attention under context parallel against attention over whole sequences in one process, forward and gradient, in fp64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.models.test_attention import slow_attention
from tests.worlds import spawn_world

# Multiples of 8 = 2 cp tokens for cp 4, among them the shortest and none at all.
LENGTHS = (24, 8, 0, 40, 16)
SHAPES = [(8, 8), (8, 4), (8, 2), (8, 1), (12, 4)]
WINDOWS = [None, 1, 7]
FAULTS = ("no exchange", "wrong order", "wrong KV head", "positions of the shard")


@cache
def inputs(heads: int, kv_heads: int) -> list[torch.Tensor]:
    """query, key, value and the weights of the loss, all tokens."""
    generator = torch.Generator().manual_seed(heads + kv_heads)
    shapes = [(sum(LENGTHS), n, 6) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


class FusedAttention(torch.nn.Module):
    """Demands and behaviour of TransformerEngine's attention: numbers of heads that fit its configuration, no window in its ring.

    In place of the ring it exchanges tokens for heads itself. The library needs a GPU; `RotaryTEAttention` around it does not.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type) -> None:
        super().__init__()
        assert config.context_parallel_size == 1 or config.window_size is None
        self.config = config

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        from megappo.models.attention import grouped_attention, whole_sequences

        config, packed = self.config, packed_seq_params
        assert (query.size(1), key.size(1)) == (config.num_attention_heads, config.num_query_groups)
        ring = config.context_parallel_size > 1
        if ring:
            assert packed.cu_seqlens_q_padded is packed.cu_seqlens_q and packed.cu_seqlens_kv_padded is packed.cu_seqlens_kv
            query, key, value = whole_sequences(query, key, value, packed.context)
        window = None if config.window_size is None else config.window_size[0] + 1
        out = grouped_attention(query, key, value, packed.grouping(), config.kv_channels**-0.5, window)
        return (packed.context.tokens_from_heads(out) if ring else out).flatten(1)


def attention_class(fused: bool):
    from megappo.models.attention import PackedAttention, rotary_te_attention

    if not fused:
        return PackedAttention
    with mock.patch("megatron.core.extensions.transformer_engine.TEDotProductAttention", FusedAttention):
        return rotary_te_attention()


def module(heads: int, kv_heads: int, window: int | None, cp: int = 1, fused: bool = False):
    """(arch, core attention of one layer). The rope has a scale of the query that depends on the position."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from megappo.models.arch import ModelArch, Rope

    rope = Rope(theta=100.0, original_max_positions=8, llama4_beta=0.5)
    arch = ModelArch("ministral3", "Ministral3ForCausalLM", 1, 48, heads, kv_heads, 6, 8, 8, 64, False, 1e-6, rope)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=48,
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        kv_channels=6,
        attention_dropout=0.0,
        context_parallel_size=cp,
        window_size=None if window is None else (window - 1, 0),
        use_cpu_initialization=True,
    )
    return arch, attention_class(fused)(config, 1, AttnMaskType.causal, "self")


def attend(attention, arch, tensors, cu_seqlens, context):
    from megappo.models.attention import packed_sequences

    packed = packed_sequences(arch, cu_seqlens, torch.device("cpu"), torch.float64, context)
    return attention(*tensors, attention_mask=None, packed_seq_params=packed)


def with_gradients(out, tensors, weight):
    return [out.detach(), *torch.autograd.grad((out * weight.flatten(1)).sum(), tensors)]


def error_of(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected))


def compare(heads: int, kv_heads: int, window: int | None, group, fault: str = "", fused: bool = False) -> float:
    """Largest relative error of the output and of the gradients of q, k, v on this rank, against the whole in one process."""
    from megappo.data.packing import cu_seqlens_of
    from megappo.parallel.context import context_shard

    *qkv, weight = inputs(heads, kv_heads)
    cu_seqlens = cu_seqlens_of(LENGTHS)
    arch, whole = module(heads, kv_heads, window)
    leaves = [x.clone().requires_grad_() for x in qkv]
    expected = with_gradients(attend(whole, arch, leaves, cu_seqlens, None), leaves, weight)
    context = context_shard(cu_seqlens, group, torch.device("cpu"))
    mine = [context.take(x).requires_grad_() for x in qkv]
    _, attention = module(heads, kv_heads, window, context.size, fused)
    out = with_fault(fault, attention, arch, mine, cu_seqlens, context)
    got = [out.detach(), *torch.autograd.grad((context.gather(out) * weight.flatten(1)).sum(), mine)]
    return error_of(got, [context.take(x) for x in expected])


def with_fault(fault, attention, arch, mine, cu_seqlens, context):
    if fault == "no exchange":
        return attend(attention, arch, mine, cu_seqlens // context.size, None)
    if fault == "wrong order":
        same = torch.arange(context.order.numel())
        return attend(attention, arch, mine, cu_seqlens, replace(context, order=same, ranked=same))
    if fault == "wrong KV head":
        mine = [mine[0], mine[1].flip(1), mine[2].flip(1)]
    if fault == "positions of the shard":
        first = replace(context, index=torch.arange(context.index.numel()))
        return attend(attention, arch, mine, cu_seqlens, first)
    return attend(attention, arch, mine, cu_seqlens, context)


def all_errors(rank: int) -> dict:
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    groups = {2: pair, 4: dist.group.WORLD}
    errors = {
        (cp, heads, kv_heads, window): compare(heads, kv_heads, window, group)
        for cp, group in groups.items()
        for heads, kv_heads in SHAPES
        for window in WINDOWS
    }
    fused = {
        ("fused", cp, kv_heads, window): compare(8, kv_heads, window, group, fused=True)
        for cp, group in groups.items()
        for kv_heads in (2, 8)
        for window in (None, 7)
    }
    return errors | fused | {fault: compare(8, 2, None, pair, fault) for fault in FAULTS}


@pytest.fixture(scope="module")
def errors() -> dict:
    """(cp, heads, KV heads, window), ("fused", cp, KV heads, window) or fault -> the largest error of any rank."""
    ranks = spawn_world(all_errors, 4)
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


@pytest.mark.parametrize("cp", [2, 4])
def test_output_and_gradients_equal_attention_over_whole_sequences(errors, cp) -> None:
    """With as many KV heads as query heads, with shared ones, and with fewer than cp (they are repeated)."""
    ours = {key: error for key, error in errors.items() if key[0] == cp}
    assert len(ours) == len(SHAPES) * len(WINDOWS)
    assert max(ours.values()) < 1e-12, ours


def test_transformer_engine_gets_whole_sequences_where_its_ring_has_no_windows(errors) -> None:
    """Around a stand-in for the library: a layer with a window exchanges heads in front of it, one without leaves it the ring."""
    ours = {key: error for key, error in errors.items() if key[0] == "fused"}
    assert len(ours) == 8 and max(ours.values()) < 1e-12, ours


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_exchange_is_detected(errors, fault) -> None:
    """Negative control."""
    assert errors[fault] > 1e-2


@pytest.mark.parametrize("window", WINDOWS)
def test_the_whole_in_one_process_equals_the_oracle(window) -> None:
    """The oracle of the ranks is right: softmax attention, one sequence and one head at a time."""
    from megappo.data.packing import cu_seqlens_of
    from megappo.models.attention import packed_sequences

    *qkv, _ = inputs(8, 2)
    arch, attention = module(8, 2, window)
    out = attend(attention, arch, qkv, cu_seqlens_of(LENGTHS), None)
    query, key = packed_sequences(arch, cu_seqlens_of(LENGTHS), torch.device("cpu"), torch.float64).rotate(*qkv[:2], slides=False)
    expected = slow_attention(query, key, qkv[2], LENGTHS, 6**-0.5, window)
    torch.testing.assert_close(out, expected.flatten(1), rtol=1e-12, atol=1e-12)
