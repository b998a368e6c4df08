"""The three vocabulary ops against an fp64 oracle, over values, shapes, shards and types; and broken variants."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from tests.ops.vocab_oracle import IGNORE, assert_matches, cut, oracle, run_shards

OPS = torch.ops.megappo


def batch(num_tokens, vocab, seed=0, dtype=torch.float32, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_tokens, vocab, generator=generator) * spread).to(dtype)
    target = torch.randint(0, vocab, (num_tokens,), generator=generator)
    target[1::5] = IGNORE
    g = torch.randn(2, num_tokens, generator=generator)
    return logits, target, g[0], g[1]


def check(logits, target, shards, temperature, g_logprob, g_entropy, **ops):
    want = oracle(logits, target, temperature, g_logprob, g_entropy)
    got = run_shards(logits, target, shards, temperature, g_logprob, g_entropy, **ops)
    scale = float(g_logprob.abs().max())
    if g_entropy is not None:
        scale += float(g_entropy.abs().max()) * math.log(logits.shape[1] + 1)
    assert_matches(got, want, logits, temperature, scale)
    assert not got.logprob[target == IGNORE].any() and not got.entropy[target == IGNORE].any()
    assert not got.dlogits[target == IGNORE].any()
    return got


SHAPES = [
    (3, 1, (1,)), (1, 2, (1, 1)), (127, 31, (31,)), (129, 257, (200, 57)), (128, 300, (100, 100, 100)), (3, 257, (257, 0)),
    (5, 64, (0, 64)), (2, 50257, (25129, 25128)), (1, 151936, (75968, 75968)),
]


@pytest.mark.parametrize("num_tokens,vocab,sizes", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shards_of_any_size_match_the_oracle(num_tokens, vocab, sizes, dtype):
    logits, target, g_lp, g_h = batch(num_tokens, vocab, dtype=dtype)
    check(logits, target, cut(vocab, *sizes, padding=3), 1.0, g_lp, g_h)


@pytest.mark.parametrize("temperature", [0.3, 1.7, "per token"])
def test_temperature_divides_the_logits(temperature):
    logits, target, g_lp, g_h = batch(40, 97)
    if temperature == "per token":
        temperature = torch.linspace(0.5, 2.0, 40)
    check(logits, target, cut(97, 50, 47), temperature, g_lp, g_h)


@pytest.mark.parametrize("which", ["logprob", "entropy", "both"])
def test_each_output_has_its_gradient(which):
    logits, target, g_lp, g_h = batch(30, 65)
    g_lp = torch.zeros(30) if which == "entropy" else g_lp
    check(logits, target, cut(65, 33, 32), 0.8, g_lp, None if which == "logprob" else g_h)


@pytest.mark.parametrize("value", [0.0, -95.0, -1e4, 88.0, 1e4])
def test_equal_logits_give_log_v(value):
    logits, target, g_lp, g_h = batch(6, 33)
    got = check(torch.full_like(logits, value), target, cut(33, 16, 17), 1.0, g_lp, g_h)
    assert got.entropy[0] == pytest.approx(math.log(33), abs=1e-5)


@pytest.mark.parametrize("peak", [60.0, -60.0])
def test_one_hot_rows(peak):
    logits, target, g_lp, g_h = batch(6, 33)
    logits = torch.zeros_like(logits).scatter_(1, torch.arange(6)[:, None] * 5, peak)
    got = check(logits, target, cut(33, 16, 17), 1.0, g_lp, g_h)
    assert (got.entropy >= 0).all()


def offset_batch():
    # multiples of 2^-6 stay exact in fp32 up to 2^18, so an offset changes no information
    logits, target, g_lp, g_h = batch(20, 50)
    return (logits * 64).round() / 64, target, g_lp, g_h


@pytest.mark.parametrize("offset", [30.0, -30.0, 150.0, -150.0, 1e4, -1e4])
def test_a_common_offset_changes_nothing(offset):
    logits, target, g_lp, g_h = offset_batch()
    shards = cut(50, 25, 25)
    plain, moved = (run_shards(x, target, shards, 1.0, g_lp, g_h) for x in (logits, logits + offset))
    torch.testing.assert_close(moved.entropy, plain.entropy, rtol=0, atol=1e-6)
    torch.testing.assert_close(moved.logprob, plain.logprob, rtol=0, atol=2**-23 * abs(offset) + 1e-6)


def test_minus_infinity_columns_have_probability_zero():
    logits, target, g_lp, g_h = batch(20, 40)
    logits[:, ::3] = -torch.inf
    logits[:, :13] = -torch.inf  # a shard without any finite column
    target = torch.where(target >= 0, 14, target)
    got = check(logits, target, cut(40, 13, 27), 1.0, g_lp, g_h)
    assert not got.dlogits[:, ::3].any()


def test_nan_stays_in_its_row():
    logits, target, g_lp, g_h = batch(4, 10)
    target[:] = 3
    logits[2, 7] = torch.nan
    got = run_shards(logits, target, cut(10, 5, 5), 1.0, g_lp, g_h)
    bad = torch.tensor([False, False, True, False])
    for result in (got.logprob, got.entropy, got.dlogits.sum(1)):
        assert torch.equal(result.isnan(), bad)


def test_an_ignored_row_is_zero_whatever_stands_in_it():
    logits, target, g_lp, g_h = batch(4, 10)
    target[:] = torch.tensor([3, IGNORE, IGNORE, IGNORE])
    logits[1], logits[2], logits[3] = torch.nan, torch.inf, -torch.inf
    got = run_shards(logits, target, cut(10, 5, 5), 1.0, g_lp, g_h)
    assert not got.logprob[1:].any() and not got.entropy[1:].any() and not got.dlogits[1:].any()


def test_gradient_near_certainty_keeps_its_digits():
    logits = torch.tensor([[4.59375, 0.0]], dtype=torch.bfloat16)  # p = 0.99
    target = torch.tensor([0])
    want = oracle(logits, target, 1.0, torch.ones(1), None).dlogits
    got = run_shards(logits, target, cut(2, 2), 1.0, torch.ones(1), None).dlogits
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=0)
    rounded_first = 1.0 - logits.float().softmax(1).bfloat16()[0, 0]
    assert abs(rounded_first.double() - want[0, 0]) > 0.1 * want[0, 0]


@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_strided_logits_and_expanded_gradients(layout):
    logits, target, _, _ = batch(24, 36)
    view = logits.t().contiguous().t() if layout == "transposed" else torch.stack((logits, logits), 2)[:, :, 0]
    g = torch.ones(1).expand(24)
    want = run_shards(logits, target, cut(36, 36), 1.0, torch.ones(24), torch.ones(24))
    scale = (1.0, None)
    stats = OPS.vocab_stats(view, target, 0, 36, *scale, IGNORE, True)
    logprob, entropy, lse = OPS.vocab_stats_merge(stats[None], target, IGNORE)
    grad = OPS.vocab_logits_backward(view, target, lse, entropy, g, g, 0, 36, *scale, IGNORE)
    # the order of the sums may follow the strides: one rounding of values up to 16
    torch.testing.assert_close(logprob, want.logprob, rtol=0, atol=2e-6)
    torch.testing.assert_close(grad, want.dlogits, rtol=0, atol=2e-6)


def test_a_token_has_the_same_bits_whatever_stands_around_it():
    logits, target, g_lp, g_h = batch(61, 300)
    shards = cut(300, 128, 172)
    whole = run_shards(logits, target, shards, 0.7, g_lp, g_h)
    for chosen in (torch.randperm(61, generator=torch.Generator().manual_seed(0)), torch.tensor([17]), torch.arange(5, 44)):
        part = run_shards(logits[chosen], target[chosen], shards, 0.7, g_lp[chosen], g_h[chosen])
        for name in ("logprob", "entropy", "dlogits"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[chosen]), name


def test_no_tokens():
    got = run_shards(torch.zeros(0, 8), torch.zeros(0, dtype=torch.long), cut(8, 4, 4), 1.0, torch.zeros(0), torch.zeros(0))
    assert got.logprob.shape == (0,) and got.dlogits.shape == (0, 8)


def test_a_target_nobody_owns_has_logprob_minus_infinity():
    got = run_shards(torch.zeros(1, 8), torch.tensor([8]), cut(8, 4, 4, padding=2), 1.0, torch.ones(1), None)
    assert got.logprob[0] == -torch.inf


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 9), st.integers(1, 40), st.lists(st.integers(0, 40), max_size=3), st.integers(0, 3), st.integers(0, 10**6),
    st.sampled_from([0.5, 1.0, 3.0]),
)
def test_any_cut_of_any_vocabulary(num_tokens, vocab, cuts, padding, seed, temperature):
    bounds = sorted(min(c, vocab) for c in cuts)
    sizes = [b - a for a, b in zip([0, *bounds], [*bounds, vocab])]
    logits, target, g_lp, g_h = batch(num_tokens, vocab, seed=seed)
    if num_tokens:
        check(logits, target, cut(vocab, *sizes, padding=padding), temperature, g_lp, g_h)


def test_ops_are_functional_and_have_fake_kernels():
    for dtype in (torch.float32, torch.bfloat16):
        logits, target, g_lp, g_h = batch(6, 12, dtype=dtype)
        stats = OPS.vocab_stats(logits, target, 0, 10, 0.5, None, IGNORE, True)
        opcheck(OPS.vocab_stats, (logits, target, 0, 10, 0.5, None, IGNORE, True))
        opcheck(OPS.vocab_stats, (logits, target, 0, 0, 1.0, torch.ones(6), IGNORE, False))
        target = target.clamp(max=9)
        opcheck(OPS.vocab_stats_merge, (stats[None], target, IGNORE))
        _, entropy, lse = OPS.vocab_stats_merge(stats[None], target, IGNORE)
        opcheck(OPS.vocab_logits_backward, (logits, target, lse, entropy, g_lp, g_h, 0, 10, 0.5, None, IGNORE))


# ------------------------------------------------------------------------------------------------------- negative controls


def phantom_columns(logits, target, start, num_valid, *rest):
    return OPS.vocab_stats(logits, target, start, logits.shape[1], *rest)


def maximum_starts_at_zero(logits, target, start, num_valid, inv_temp, *rest):
    stats = OPS.vocab_stats(logits, target, start, num_valid, inv_temp, *rest)
    x = logits[:, :num_valid].float() * inv_temp
    m = x.amax(1).clamp(min=0.0)
    e = (x - m[:, None]).exp()
    return torch.stack((m, e.sum(1), (e * (x - m[:, None])).sum(1), stats[:, 3]), 1)


def temperature_forgotten(logits, target, start, num_valid, inv_temp, *rest):
    return OPS.vocab_stats(logits, target, start, num_valid, 1.0, *rest)


def merge_without_shift_of_t(gathered, target, ignore_index):
    m_r, s_r, t_r, z_r = gathered.unbind(2)
    m = m_r.amax(0)
    w = (m_r - m).exp()
    s, t = (w * s_r).sum(0), (w * t_r).sum(0)
    ignored = target == ignore_index
    lse = m + s.log()
    return (z_r.amax(0) - lse).masked_fill(ignored, 0), (s.log() - t / s).masked_fill(ignored, 0), lse


def gradient_on_the_owner_only(logits, target, *rest):
    grad = OPS.vocab_logits_backward(logits, target, *rest)
    start, num_valid = rest[4], rest[5]
    return grad * ((target >= start) & (target < start + num_valid))[:, None]


def bf16_gradient(*args):
    return OPS.vocab_logits_backward(*args).bfloat16().float()


@pytest.mark.parametrize("part,broken,offset", [
    ("stats", phantom_columns, 0.0), ("stats", maximum_starts_at_zero, -120.0), ("stats", temperature_forgotten, 0.0),
    ("merge", merge_without_shift_of_t, 0.0), ("backward", gradient_on_the_owner_only, 0.0), ("backward", bf16_gradient, 0.0),
])
def test_an_injected_fault_is_noticed(part, broken, offset):
    logits, target, g_lp, g_h = batch(20, 50)
    shards = cut(50, 20, 30, padding=2)
    check(logits + offset, target, shards, 0.7, g_lp, g_h)
    with pytest.raises(AssertionError):
        check(logits + offset, target, shards, 0.7, g_lp, g_h, **{part: broken})


def test_the_offset_test_notices_the_textbook_entropy():
    logits, _, _, _ = offset_batch()
    x = logits + 1e4
    m = x.amax(1, keepdim=True)
    e = (x - m).exp()
    textbook = e.sum(1).log() + m[:, 0] - (e * x).sum(1) / e.sum(1)
    want = torch.distributions.Categorical(logits=logits.double()).entropy()
    assert (textbook.double() - want).abs().max() > 1e-4
