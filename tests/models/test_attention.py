"""Oracle: softmax attention in fp64, one sequence and one head at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megappo.models.attention import PackedSequences, group_by_length, grouped_attention, varlen_attention

CASES = {"one": (9,), "equal": (5, 5, 5), "mixed": (40, 1, 33, 7, 64, 0, 41, 2), "long": (200, 190, 100, 3)}


def slow_attention(q, k, v, lengths, scale, window=None):
    out, start = torch.zeros(q.shape, dtype=torch.float64), 0
    for length in lengths:
        rows = slice(start, start + length)
        for head in range(q.size(1)):
            kv = head // (q.size(1) // k.size(1))
            scores = q[rows, head].double() @ k[rows, kv].double().T * scale
            age = torch.arange(length)[:, None] - torch.arange(length)
            seen = (age >= 0) & (age < (length if window is None else window))
            out[rows, head] = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[rows, kv].double()
        start += length
    return out


def random_qkv(lengths, heads=4, kv_heads=2, dim=10, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(lengths))
    shape = (sum(lengths), heads, dim), (sum(lengths), kv_heads, dim), (sum(lengths), kv_heads, dim)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shape]


def grouping_of(lengths):
    return group_by_length([0, *torch.tensor(lengths).cumsum(0).tolist()])


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_output_and_gradients_equal_the_oracle(lengths):
    for heads, kv_heads, window in [(4, 4, None), (4, 2, None), (6, 1, None), (4, 2, 1), (4, 4, 12), (6, 1, 40)]:
        q, k, v = random_qkv(lengths, heads, kv_heads)
        weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(9))
        out = grouped_attention(q, k, v, grouping_of(lengths), 0.3, window)
        got = [out, *torch.autograd.grad((out * weight).sum(), (q, k, v))]
        expected = slow_attention(q, k, v, lengths, 0.3, window)
        expected = [expected, *torch.autograd.grad((expected * weight).sum(), (q, k, v))]
        for ours, oracle in zip(got, expected):
            torch.testing.assert_close(ours.double(), oracle.double(), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("wrong", [None, 11, 13])
def test_a_window_that_is_one_off_is_detected(wrong):
    """Negative control."""
    lengths = (40, 5, 13)
    q, k, v = random_qkv(lengths)
    out = grouped_attention(q, k, v, grouping_of(lengths), 0.3, wrong)
    assert (out - slow_attention(q, k, v, lengths, 0.3, 12)).abs().max() > 1e-2


def test_a_neighbour_that_is_not_a_number_stays_where_it_is():
    lengths = (5, 4, 5, 33)
    q, k, v = random_qkv(lengths)
    with torch.no_grad():
        for x in (q, k, v):
            x[5:9] = float("nan")
    out = grouped_attention(q, k, v, grouping_of(lengths), 1.0)
    others = torch.cat((out[:5], out[9:]))
    assert others.isfinite().all() and out[5:9].isnan().all()
    others.sum().backward()
    assert all(torch.cat((x.grad[:5], x.grad[9:])).isfinite().all() for x in (q, k, v))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 300), max_size=40))
def test_grouping_places_every_token_once_and_bounds_the_padding(lengths):
    grouping = grouping_of(lengths) if lengths else group_by_length([0])
    total = sum(lengths)
    assert torch.equal(grouping.padded[grouping.packed], torch.arange(total))
    assert grouping.packed.unique().numel() == total
    area = sum(g.num_sequences * g.length for g in grouping.groups)
    assert area == grouping.padded.numel() and [g.start for g in grouping.groups] == sorted(g.start for g in grouping.groups)
    long = [n for n in lengths if n > 32]
    assert area <= sum(long) / 0.8 + 32 * sum(0 < n <= 32 for n in lengths) + 1
    # Groups of lengths above 32 differ by the factor 0.8 at least.
    assert len(grouping.groups) <= 2 + torch.tensor(300 / 32).log() / torch.tensor(1.25).log()


def test_an_empty_batch_has_an_empty_output():
    q, k, v = random_qkv(())
    assert grouped_attention(q, k, v, group_by_length([0]), 1.0).shape == (0, 4, 10)


@pytest.mark.parametrize("fault", ["shift", "swap"])
def test_the_oracle_detects_a_wrong_grouping(fault):
    """Negative control."""
    lengths = (7, 12, 9)
    q, k, v = random_qkv(lengths)
    grouping = grouping_of(lengths)
    if fault == "shift":
        grouping.packed[3] = grouping.packed[4]
    else:
        grouping.padded[[0, 1]] = grouping.padded[[1, 0]]
    out = grouped_attention(q, k, v, grouping, 1.0)
    assert (out - slow_attention(q, k, v, lengths, 1.0)).abs().max() > 1e-2


@pytest.mark.parametrize("kv_heads, window", [(4, None), (2, None), (2, 3)])
def test_the_cuda_kernel_takes_our_arguments(kv_heads, window):
    """Shapes and arguments only, on fake tensors: what the kernel computes needs a GPU."""
    with FakeTensorMode():
        q, k, v = (torch.empty(16, h, 32, dtype=torch.bfloat16) for h in (4, kv_heads, kv_heads))
        ends = torch.empty(4, dtype=torch.int32)
        packed = PackedSequences(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=7, max_seqlen_kv=7)
        out = varlen_attention(q, k, v, packed, 0.2, window)
        assert out.shape == q.shape and out.dtype == torch.bfloat16
