"""The vocabulary ops against an fp64 oracle, over values, shapes, shards, types and implementations; and broken variants."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from megappo.ops import dispatch
from megappo.ops.implementations import interpreted
from tests.ops.vocab_oracle import IGNORE, Answer, assert_matches, bits, cut, oracle, run_shards, some

OPS = torch.ops.megappo
# numpy's, in Triton's interpreter: -inf - -inf of a row that does not count
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow|All-NaN slice) encountered:RuntimeWarning")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def batch(num_tokens, vocab, seed=0, dtype=torch.float32, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_tokens, vocab, generator=generator) * spread).to(dtype)
    target = torch.randint(0, vocab, (num_tokens,), generator=generator)
    target[1::5] = IGNORE
    g = torch.randn(2, num_tokens, generator=generator)
    return logits, target, g[0], g[1]


def check(logits, target, shards, temperature, g_logprob, g_entropy, **how):
    want = oracle(logits, target, temperature, g_logprob, g_entropy)
    got = run_shards(logits, target, shards, temperature, g_logprob, g_entropy, **how)
    assert_matches(got, want, logits, temperature)
    assert not got.logprob[target == IGNORE].any() and not got.entropy[target == IGNORE].any()
    assert not got.dlogits[target == IGNORE].any()
    return got


def whole(logits, target, g_logprob, g_entropy, inv_temp=1.0):
    """(logprob, entropy, dlogits) of one shard that is the whole vocabulary, in the layout that the arguments have."""
    scale = inv_temp if isinstance(inv_temp, float) else 1.0, None if isinstance(inv_temp, float) else inv_temp
    stats = OPS.vocab_stats(logits, target, 0, logits.shape[1], *scale, IGNORE, True)
    logprob, entropy, lse = OPS.vocab_stats_merge(stats[None], target, IGNORE)
    grad = OPS.vocab_logits_backward(logits, target, lse, entropy, g_logprob, g_entropy, 0, logits.shape[1], *scale, IGNORE)
    return logprob, entropy, grad


def assert_same_bits(got, want):
    for a, b in zip(got, want):
        assert torch.equal(bits(a.contiguous()), bits(b.contiguous()))


# among them shards of padding alone, and segments of 4096 (C++) and 32768 (CUDA, Triton) columns with and without a rest
SHAPES = [
    (3, 1, (1,)),
    (1, 2, (1, 1)),
    (6, 31, (31,)),
    (4, 257, (200, 57)),
    (3, 300, (100, 100, 100)),
    (3, 257, (257, 0)),
    (2, 64, (0, 64, 0)),
    (2, 8192, (8192,)),
    (2, 50257, (25129, 25128)),
    (1, 50257, (50257,)),
]
LARGE = [
    (4097, 31, (31,)),
    (127, 2, (1, 1)),
    (129, 257, (257,)),
    (128, 32000, (16000, 16000)),
    (3, 129920, (129920,)),
    (2, 151936, (75968, 75968)),
]


def test_shards_of_any_size_match_the_oracle(kernels):
    for number, (num_tokens, vocab, sizes) in enumerate(SHAPES):
        for dtype in some(DTYPES, number):
            logits, target, g_lp, g_h = batch(num_tokens, vocab, dtype=dtype)
            check(logits, target, cut(vocab, *sizes, padding=3), 1.0, g_lp, g_h, device=kernels)


@pytest.mark.parametrize("num_tokens,vocab,sizes", LARGE)
def test_many_tokens_and_wide_vocabularies(num_tokens, vocab, sizes):
    for dtype in DTYPES:
        logits, target, g_lp, g_h = batch(num_tokens, vocab, dtype=dtype)
        check(logits, target, cut(vocab, *sizes, padding=13), 0.9, g_lp, g_h)


@pytest.mark.parametrize("temperature", [0.3, 1.7, "per token"])
def test_temperature_divides_the_logits(kernels, temperature):
    logits, target, g_lp, g_h = batch(5, 97)
    if temperature == "per token":
        temperature = torch.linspace(0.5, 2.0, 5)
    check(logits, target, cut(97, 50, 47), temperature, g_lp, g_h, device=kernels)


@pytest.mark.parametrize("which", ["logprob", "entropy", "both"])
def test_each_output_has_its_gradient(kernels, which):
    logits, target, g_lp, g_h = batch(4, 65)
    g_lp = torch.zeros(4) if which == "entropy" else g_lp
    check(logits, target, cut(65, 33, 32), 0.8, g_lp, None if which == "logprob" else g_h, device=kernels)


def test_equal_logits_give_log_v(kernels):
    for value in some([0.0, -95.0, -1e4, 88.0, 1e4], 1, 4):
        logits, target, g_lp, g_h = batch(6, 33)
        got = check(torch.full_like(logits, value), target, cut(33, 16, 17), 1.0, g_lp, g_h, device=kernels)
        assert got.entropy[0] == pytest.approx(math.log(33), abs=1e-5)


@pytest.mark.parametrize("peak", [60.0, -60.0, 1000.0])
def test_one_hot_rows(kernels, peak):
    logits, target, g_lp, g_h = batch(6, 33)
    logits = torch.zeros_like(logits).scatter_(1, torch.arange(6)[:, None] * 5, peak)
    for temperature in some([1.0, 0.7], 1):
        got = check(logits, target, cut(33, 16, 17), temperature, g_lp, g_h, device=kernels)
        assert (got.entropy >= 0).all()


def offset_batch():
    # multiples of 2^-6 stay exact in fp32 up to 2^18, so an offset changes no information
    logits, target, g_lp, g_h = batch(6, 50)
    return (logits * 64).round() / 64, target, g_lp, g_h


def test_a_common_offset_changes_nothing(kernels):
    for offset in some([30.0, -30.0, 150.0, -150.0, 1e4, -1e4], 3, 4):
        logits, target, g_lp, g_h = offset_batch()
        shards = cut(50, 25, 25)
        plain, moved = (run_shards(x, target, shards, 1.0, g_lp, g_h, device=kernels) for x in (logits, logits + offset))
        torch.testing.assert_close(moved.entropy, plain.entropy, rtol=0, atol=1e-6)
        torch.testing.assert_close(moved.logprob, plain.logprob, rtol=0, atol=2**-23 * abs(offset) + 1e-6)
        # what the backward keeps of the forward is lse, rounded to its size
        sensitivity = oracle(logits, target, 1.0, g_lp, g_h).sensitivity
        assert ((moved.dlogits - plain.dlogits).abs() <= sensitivity * (2**-23 * abs(offset) + 4e-6) + 1e-7).all()


def test_minus_infinity_columns_have_probability_zero(kernels):
    logits, target, g_lp, g_h = batch(6, 40)
    logits[:, ::3] = -torch.inf
    logits[:, :13] = -torch.inf  # a shard without any finite column
    target = torch.where(target >= 0, 14, target)
    got = check(logits, target, cut(40, 13, 27), 1.0, g_lp, g_h, device=kernels)
    assert not got.dlogits[:, ::3].any()


@pytest.mark.parametrize("column", [7, slice(None), slice(5, None)])
def test_nan_stays_in_its_row(kernels, column):
    logits, target, g_lp, g_h = batch(4, 10)
    target[:] = 3
    logits[2, column] = torch.nan
    got = run_shards(logits, target, cut(10, 5, 5), 1.0, g_lp, g_h, device=kernels)
    bad = torch.tensor([False, False, True, False])
    for result in (got.logprob, got.entropy, got.dlogits.sum(1)):
        assert torch.equal(result.isnan(), bad)


def test_a_row_that_does_not_count_is_zero_whatever_stands_in_it(kernels):
    logits, target, g_lp, g_h = batch(8, 10)
    target[:] = torch.tensor([3, IGNORE, IGNORE, IGNORE, 3, 3, 3, 3])
    g_lp[4:7] = g_h[4:7] = 0.0  # masked by the loss: 0 * inf would be NaN
    for rows in (slice(1, 4), slice(4, 7)):
        logits[rows] = torch.tensor([torch.nan, torch.inf, -torch.inf])[:, None]
    got = run_shards(logits, target, cut(10, 5, 5), 1.0, g_lp, g_h, device=kernels)
    assert not got.logprob[1:4].any() and not got.entropy[1:4].any() and not got.dlogits[1:7].any()
    assert got.dlogits[[0, 7]].any(1).all()


def test_gradient_near_certainty_keeps_its_digits(kernels):
    logits = torch.tensor([[4.59375, 0.0]], dtype=torch.bfloat16)  # p = 0.99
    target = torch.tensor([0])
    want = oracle(logits, target, 1.0, torch.ones(1), None).dlogits
    got = run_shards(logits, target, cut(2, 2), 1.0, torch.ones(1), None, device=kernels).dlogits
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=0)
    rounded_first = 1.0 - logits.float().softmax(1).bfloat16()[0, 0]
    assert abs(rounded_first.double() - want[0, 0]) > 0.1 * want[0, 0]


# ---------------------------------------------------------------------------------------------- where and how rows lie in memory


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: torch.stack((x, x), 2)[:, :, 0],
    "every second row": lambda x: torch.stack((x, x), 1)[:, 0],
    "part of wider rows": lambda x: torch.cat((x[:, :5], x, x), 1)[:, 5 : 5 + x.shape[1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_logits_and_expanded_gradients_give_the_same_bits(request, kernels, layout):
    for dtype in some([torch.float32, torch.bfloat16], [*LAYOUTS].index(layout)):
        logits, target, _, _ = batch(4, 301, dtype=dtype)
        logits, target = logits.to(kernels), target.to(kernels)
        view, ones = LAYOUTS[layout](logits), torch.ones(4, device=kernels)
        assert torch.equal(view, logits) and not (view.is_contiguous() and view.storage_offset() == 0)
        expanded = torch.ones(1, device=kernels).expand(4)
        got, want = whole(view, target, expanded, expanded), whole(logits, target, ones, ones)
        if request.node.callspec.params["kernels"].startswith("reference"):  # torch's sums follow the strides
            torch.testing.assert_close(got, want, rtol=2**-7, atol=2e-6)
        else:
            assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_addresses_of_rows_and_labels(kernels, dtype):
    logits, target, g_lp, g_h = (x.to(kernels) for x in batch(3, 1027, dtype=dtype))
    want = whole(logits, target, g_lp, g_h)
    for offset in some([1, 2, 3, 6], DTYPES.index(dtype)):
        moved = torch.empty(offset + logits.numel(), dtype=dtype, device=kernels)[offset:].view_as(logits).copy_(logits)
        labels = torch.empty(target.numel() + 1, dtype=torch.long, device=kernels)[1:].copy_(target)
        assert_same_bits(whole(moved, labels, g_lp, g_h), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_written_over_the_logits_has_the_same_bits(kernels, dtype):
    logits, target, g_lp, g_h = (x.to(kernels) for x in batch(6, 1027, dtype=dtype))
    stats = OPS.vocab_stats(logits, target, 0, 1020, 0.7, None, IGNORE, True)
    _, entropy, lse = OPS.vocab_stats_merge(stats[None], target, IGNORE)
    rest = (target, lse, entropy, g_lp, g_h, 0, 1020, 0.7, None, IGNORE)
    want = OPS.vocab_logits_backward(logits, *rest)
    buffer = torch.full((6, 1100), 5.0, dtype=dtype, device=kernels)
    rows = buffer[:, 3:1030].copy_(logits)
    assert OPS.vocab_logits_backward_(rows, *rest) is None
    assert_same_bits([rows], [want])
    assert (buffer[:, :3] == 5).all() and (buffer[:, 1030:] == 5).all()
    with pytest.raises((ValueError, RuntimeError), match="overwritten"):
        OPS.vocab_logits_backward_(logits.t().contiguous().t(), *rest)
    with pytest.raises((ValueError, RuntimeError), match="overwritten"):
        OPS.vocab_logits_backward_(logits[:1].expand(6, -1), *rest)
    for kind in DTYPES if dtype == torch.float32 else [dtype]:  # into another tensor, rounded once
        buffer = torch.full((6, 1100), 5.0, dtype=kind, device=kernels)
        out = buffer[:, 3:1030]
        assert OPS.vocab_logits_backward_into(logits, *rest, out) is None
        if kind == torch.bfloat16 and interpreted():  # Triton's interpreter cuts bits off, its compiler rounds
            torch.testing.assert_close(out, want.to(kind), rtol=2**-7, atol=0)
        else:
            assert_same_bits([out], [want.to(kind)])
        assert (buffer[:, :3] == 5).all() and (buffer[:, 1030:] == 5).all()
    wrong = [out[:, 1:], out.t().contiguous().t(), logits.new_empty(logits.shape, dtype=torch.float64)]
    for bad in [*wrong, *([logits.float()] if dtype != torch.float32 else [])]:
        with pytest.raises((ValueError, RuntimeError), match="out |overwritten"):
            OPS.vocab_logits_backward_into(logits, *rest, bad)


def test_offsets_beyond_two_to_the_31(kernels):
    # three rows 2^30 + 8 elements apart; of the 4 GiB only the pages that hold the rows are ever touched
    stride, vocab = 2**30 + 8, 40
    logits, target, g_lp, g_h = (x.to(kernels) for x in batch(3, vocab, dtype=torch.bfloat16))
    far = torch.empty(2 * stride + vocab, dtype=torch.bfloat16, device=kernels).as_strided((3, vocab), (stride, 1)).copy_(logits)
    want = whole(logits, target, g_lp, g_h)
    assert_same_bits(whole(far, target, g_lp, g_h), want)
    stats = OPS.vocab_stats(far, target, 0, vocab, 1.0, None, IGNORE, True)
    _, entropy, lse = OPS.vocab_stats_merge(stats[None], target, IGNORE)
    OPS.vocab_logits_backward_(far, target, lse, entropy, g_lp, g_h, 0, vocab, 1.0, None, IGNORE)
    assert_same_bits([far], want[2:])


# --------------------------------------------------------------------------------------------------------- the same bits


def test_a_token_has_the_same_bits_whatever_stands_around_it(kernels):
    logits, target, g_lp, g_h = batch(7, 303, dtype=torch.bfloat16)
    shards = cut(303, 128, 175)
    every = run_shards(logits, target, shards, 0.7, g_lp, g_h, device=kernels)
    for chosen in some(
        [torch.randperm(7, generator=torch.Generator().manual_seed(0)), torch.tensor([4]), torch.arange(2, 5)], 0, 1
    ):
        part = run_shards(logits[chosen], target[chosen], shards, 0.7, g_lp[chosen], g_h[chosen], device=kernels)
        for name in ("logprob", "entropy", "dlogits"):
            assert torch.equal(getattr(part, name), getattr(every, name)[chosen]), name


@pytest.mark.parametrize("num_tokens,vocab", [(1, 50257), (3, 151936), (40, 9000), (1000, 300)])
def test_bits_do_not_depend_on_the_number_of_threads(num_tokens, vocab):
    problem = batch(num_tokens, vocab)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(whole(*problem))
    finally:
        torch.set_num_threads(before)
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


WHOLE_ROWS = """
import sys, torch
import megappo.ops.vocab_stats
ops, results = torch.ops.megappo, []
for logits, target, g_logprob, g_entropy in torch.load(sys.argv[1]):
    where = 0, logits.shape[1], 1.0, None, -100
    logprob, entropy, lse = ops.vocab_stats_merge(ops.vocab_stats(logits, target, *where, True)[None], target, -100)
    results.append((logprob, entropy, ops.vocab_logits_backward(logits, target, lse, entropy, g_logprob, g_entropy, *where)))
torch.save(results, sys.argv[2])
"""


@pytest.mark.slow  # a process of its own, with as much arithmetic as the other tests of the file together
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_every_instruction_set_matches_the_oracle(tmp_path, isa):
    problems = [batch(7, 5003, dtype=dtype) for dtype in DTYPES]
    torch.save(problems, tmp_path / "problems")
    root, files = Path(__file__).parents[2], [str(tmp_path / "problems"), str(tmp_path / "results")]
    environment = {**os.environ, "MEGAPPO_CPU_ISA": isa, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", WHOLE_ROWS, *files], check=True, cwd=root, env=environment)
    same_bits = []
    for problem, got in zip(problems, torch.load(tmp_path / "results")):
        assert_matches(Answer(*got), oracle(problem[0], problem[1], 1.0, *problem[2:]), problem[0], 1.0)
        same_bits += [torch.equal(a, b) for a, b in zip(got, whole(*problem))]
    if isa == "baseline" and "fma" in Path("/proc/cpuinfo").read_text():
        assert not all(same_bits), "MEGAPPO_CPU_ISA had no effect: without fused multiply-add some roundings differ"


def test_no_tokens(kernels):
    none, labels = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    got = run_shards(torch.zeros(0, 8), labels, cut(8, 4, 4), 1.0, none, none, device=kernels)
    assert got.logprob.shape == (0,) and got.dlogits.shape == (0, 8)


def test_a_target_nobody_owns_has_logprob_minus_infinity(kernels):
    got = run_shards(torch.zeros(1, 8), torch.tensor([8]), cut(8, 4, 4, padding=2), 1.0, torch.ones(1), None, device=kernels)
    assert got.logprob[0] == -torch.inf


def test_without_entropy_the_rest_has_the_same_bits(kernels):
    logits, target, _, _ = (x.to(kernels) for x in batch(5, 301))
    full, short = (OPS.vocab_stats(logits, target, 0, 301, 1.0, None, IGNORE, want) for want in (True, False))
    assert torch.equal(full[:, [0, 1, 3]], short[:, [0, 1, 3]]) and not short[:, 2].any()


@st.composite
def problems(draw):
    """A batch, its shards and a temperature: any cut, masks with gaps, columns of -inf, every type."""
    num_tokens, vocab = draw(st.integers(1, 9)), draw(st.integers(1, 80))
    bounds = sorted(min(cut_at, vocab) for cut_at in draw(st.lists(st.integers(0, 80), max_size=3)))
    sizes = [b - a for a, b in zip([0, *bounds], [*bounds, vocab])]
    seed, spread = draw(st.integers(0, 10**6)), draw(st.sampled_from([0.1, 3.0, 30.0]))
    logits, target, g_lp, g_h = batch(num_tokens, vocab, seed, draw(st.sampled_from(DTYPES)), spread)
    chosen = lambda size: torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    target[chosen(num_tokens)] = IGNORE
    g_lp[chosen(num_tokens)] = g_h[chosen(num_tokens)] = 0.0
    gone = chosen(vocab)
    own = torch.zeros(num_tokens, vocab, dtype=torch.bool).scatter_(1, target.clamp(min=0)[:, None], True)
    logits = logits.masked_fill(gone & ~own, -torch.inf)
    temperature = draw(st.sampled_from([0.5, 1.0, 3.0, torch.linspace(0.4, 2.0, num_tokens)]))
    shards = cut(vocab, *sizes, padding=draw(st.integers(0, 3)))
    return logits, target, shards, temperature, g_lp, draw(st.sampled_from([g_h, None]))


@settings(max_examples=100, deadline=None)
@given(problems())
def test_any_problem_in_cpp(problem):
    check(*problem)


@settings(max_examples=15, deadline=None)
@given(problems())
def test_any_problem_in_cuda_on_the_cpu(cuda_on_cpu, problem):
    with dispatch.using("cpp", native=cuda_on_cpu):
        check(*problem)


# ------------------------------------------------------------------------------------------------ as operators of torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_state_their_effects_and_have_fake_kernels(dtype):
    logits, target, g_lp, g_h = batch(6, 12, dtype=dtype)
    stats = OPS.vocab_stats(logits, target, 0, 10, 0.5, None, IGNORE, True)
    opcheck(OPS.vocab_stats, (logits, target, 0, 10, 0.5, None, IGNORE, True))
    opcheck(OPS.vocab_stats, (logits, target, 0, 0, 1.0, torch.ones(6), IGNORE, False))
    target = target.clamp(max=9)
    opcheck(OPS.vocab_stats_merge, (stats[None], target, IGNORE))
    _, entropy, lse = OPS.vocab_stats_merge(stats[None], target, IGNORE)
    rest = (target, lse, entropy, g_lp, g_h, 0, 10, 0.5, None, IGNORE)
    opcheck(OPS.vocab_logits_backward, (logits, *rest))
    opcheck(OPS.vocab_logits_backward_, (logits, *rest))
    opcheck(OPS.vocab_logits_backward_into, (logits, *rest, torch.empty(6, 12, dtype=torch.bfloat16)))


def test_wrong_arguments_of_the_ops_themselves_never_reach_a_kernel(kernels):
    logits, target, g_lp, g_h = (x.to(kernels) for x in batch(6, 12))
    tail, short = (0, 12, 1.0, None, IGNORE), g_lp[:5]
    for wrong in ((logits[0], target), (logits, target[:5]), (logits.int(), target), (logits, target.int())):
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            OPS.vocab_stats(*wrong, *tail, True)
    with pytest.raises((ValueError, RuntimeError)):
        OPS.vocab_stats(logits, target, 0, 12, 1.0, short, IGNORE, True)
    for at in range(4):
        vectors = [g_lp, g_lp, g_lp, g_h]
        vectors[at] = short
        with pytest.raises((ValueError, RuntimeError)):
            OPS.vocab_logits_backward(logits, target, *vectors, *tail)
    with pytest.raises((ValueError, RuntimeError)):
        OPS.vocab_stats_merge(torch.zeros(2, 6, 3, device=kernels), target, IGNORE)


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


@pytest.mark.parametrize(
    "part,broken,offset",
    [
        ("stats", phantom_columns, 0.0),
        ("stats", maximum_starts_at_zero, -120.0),
        ("stats", temperature_forgotten, 0.0),
        ("merge", merge_without_shift_of_t, 0.0),
        ("backward", gradient_on_the_owner_only, 0.0),
        ("backward", bf16_gradient, 0.0),
    ],
)
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
