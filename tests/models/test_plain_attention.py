"""Oracle: softmax attention with caps, windows and sinks in fp64, one sequence and one head at a time."""

from __future__ import annotations

import pytest
import torch

from megappo.models.attention import plain_attention
from tests.models.test_attention import CASES, grouping_of, random_qkv


def slow_attention(q, k, v, lengths, scale, window, softcap, sinks):
    out, start = torch.zeros(q.shape, dtype=torch.float64), 0
    for length in lengths:
        rows = slice(start, start + length)
        for head in range(q.size(1)):
            kv = head // (q.size(1) // k.size(1))
            scores = q[rows, head].double() @ k[rows, kv].double().T * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            age = torch.arange(length)[:, None] - torch.arange(length)
            seen = (age >= 0) & (age < (length if window is None else window))
            weights = scores.exp() * seen
            total = weights.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks[head].double().exp())
            out[rows, head] = weights / total @ v[rows, kv].double()
        start += length
    return out


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_output_and_gradients_equal_the_oracle(lengths) -> None:
    for heads, kv_heads, window in [(4, 4, None), (4, 2, 12), (6, 1, 1)]:
        for softcap, with_sinks in [(None, True), (2.0, False), (2.0, True), (None, False)]:
            inputs = random_qkv(lengths, heads, kv_heads)
            sinks = torch.randn(heads, generator=torch.Generator().manual_seed(3)).requires_grad_() if with_sinks else None
            weight = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(9))
            wanted_of = [*inputs, *([sinks] if with_sinks else [])]
            out = plain_attention(*inputs, grouping_of(lengths), 0.3, window=window, softcap=softcap, sinks=sinks)
            exact = slow_attention(*inputs, lengths, 0.3, window, softcap, sinks)
            got = [out, *torch.autograd.grad((out * weight).sum(), wanted_of)]
            expected = [exact, *torch.autograd.grad((exact * weight).sum(), wanted_of)]
            for ours, oracle in zip(got, expected):
                torch.testing.assert_close(ours.double(), oracle.double(), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("wrong", [dict(softcap=None), dict(sinks=None), dict(window=11)])
def test_a_feature_that_is_left_out_is_seen(wrong) -> None:
    """Negative control."""
    lengths = (40, 5, 13)
    inputs, sinks = random_qkv(lengths), torch.tensor([0.5, -0.5, 1.0, 0.0])
    right = dict(window=12, softcap=1.0, sinks=sinks)
    out = plain_attention(*inputs, grouping_of(lengths), 0.3, **(right | wrong))
    assert (out - slow_attention(*inputs, lengths, 0.3, 12, 1.0, sinks)).abs().max() > 1e-2


def test_no_sequences_give_no_rows() -> None:
    empty = torch.zeros(0, 2, 4)
    assert plain_attention(empty, empty, empty, grouping_of(()), 1.0).shape == (0, 2, 4)
