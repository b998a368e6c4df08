"""Statistics and gradients from hidden states, over every implementation: the oracle, blocks, kept and recomputed logits."""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from megappo.ops import dispatch
from megappo.ops.linear_blocks import LinearLogits, merge_blocks
from tests.ops.linear_calls import linear_logprob
from tests.ops.test_linear_logprob import linear_oracle, problem
from tests.ops.vocab_oracle import IGNORE, forward_tolerance, some

OPS = torch.ops.megappo
VOCAB = 50


def on(device, *tensors):
    return [x.detach().to(device).requires_grad_(x.requires_grad) for x in tensors]


def gemm_tolerance(h, w, temperature=1.0):
    """Three times what a product summed in fp32 loses: H additions of terms that are at most what |h| @ |w| says."""
    terms = float((h.detach().abs().double() @ w.detach().abs().double().t()).max())
    return 3 * math.sqrt(h.shape[1]) * 2**-24 * terms / temperature


# num_tokens, vocab, hidden, padding: tiles of 128 x 256 x 64 and 64 x 64 x 32 that fit and do not
SHAPES = [(1, 2, 8, 0), (3, 31, 24, 3), (129, 300, 72, 4), (64, 513, 32, 0), (70, 257, 96, 7)]


@pytest.mark.parametrize("num_tokens,vocab,hidden,padding", SHAPES)
def test_values_and_gradients_match_the_oracle(kernels, num_tokens, vocab, hidden, padding):
    for dtype in some([torch.float32, torch.bfloat16, torch.float16], SHAPES.index((num_tokens, vocab, hidden, padding))):
        h, w, target, g_lp, g_h = problem(num_tokens, vocab, hidden, padding, dtype)
        want, dh, dw = linear_oracle(h, w, target, vocab, 0.8, g_lp, g_h)
        h_, w_, target_, g_lp_, g_h_ = on(kernels, h, w, target, g_lp, g_h)
        logprob, entropy = linear_logprob(h_, w_, target_, None, vocab_start=0, num_valid=vocab, temperature=0.8)
        (logprob * g_lp_ + entropy * g_h_).sum().backward()

        tolerance = gemm_tolerance(h, w, 0.8) + forward_tolerance(h.detach() @ w.detach().t(), 0.8)
        torch.testing.assert_close(logprob.detach().cpu().double(), want.logprob, rtol=0, atol=tolerance)
        torch.testing.assert_close(entropy.detach().cpu().double(), want.entropy, rtol=4e-6, atol=8 * tolerance)
        # dlogits are rounded to the weights' type, partial sums of dhidden and both results again: half a unit of every term each
        unit = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(dtype, 2**-22)
        # fp16 ends at 2^-24: what is smaller is lost, in each of the terms of a sum
        least = max(num_tokens, vocab) * 2**-24 * 4 if dtype == torch.float16 else 0.0
        h64, w64 = h.detach().abs().double(), w.detach().abs().double()[:vocab]
        of_h, of_w = want.dlogits.abs() @ w64, want.dlogits.abs().t() @ h64
        for got, exact, terms in ((h_.grad, dh, of_h), (w_.grad[:vocab], dw[:vocab], of_w)):
            assert ((got.cpu().double() - exact).abs() <= unit * (terms + exact.abs()) + 16 * tolerance + least).all()
        assert not w_.grad[vocab:].any() and not h_.grad[::6].any()


def test_no_more_than_three_times_the_error_of_a_product_with_fp32_sums(kernels):
    h, w, target, _, _ = problem(64, 500, 256, padding=0, dtype=torch.bfloat16)
    target = target.clamp(min=0)
    want, _, _ = linear_oracle(h, w, target, 500, 1.0, torch.ones(64), None)
    plain = (h.detach().float() @ w.detach().float().t()).log_softmax(1).gather(1, target[:, None])[:, 0]
    h_, w_, target_ = on(kernels, h, w, target)
    got, _ = linear_logprob(h_, w_, target_, None, vocab_start=0, num_valid=500)
    ours, theirs = ((x.detach().cpu().double() - want.logprob).abs().max() for x in (got, plain))
    assert ours <= 3 * max(float(theirs), 2**-22)

    rounded = (h.detach() @ w.detach().t()).float().log_softmax(1).gather(1, target[:, None])[:, 0]
    assert (rounded.double() - want.logprob).abs().max() > 100 * ours  # logits staged in bf16 would be seen


def test_temperature_and_entropy_on_request(kernels):
    for want_entropy in [False, True]:
        for temperature in some([0.3, "per token"], want_entropy):
            h, w, target, g_lp, _ = problem(70, 130, 40)
            if temperature == "per token":
                temperature = torch.linspace(0.5, 2.0, 70)
            want, _, _ = linear_oracle(h, w, target, 130, temperature, g_lp, None)
            h_, w_, target_ = on(kernels, h, w, target)
            scale = temperature.to(kernels) if isinstance(temperature, torch.Tensor) else temperature
            logprob, entropy = linear_logprob(
                h_, w_, target_, None, vocab_start=0, num_valid=130, temperature=scale, want_entropy=want_entropy
            )
            torch.testing.assert_close(logprob.detach().cpu().double(), want.logprob, rtol=0, atol=4e-5)
            assert (entropy is not None) == want_entropy
            if entropy is not None:
                torch.testing.assert_close(entropy.detach().cpu().double(), want.entropy, rtol=0, atol=4e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_logits_are_rounded_before_temperature(kernels, dtype):
    h, w, target, g_lp, g_h = problem(40, 60, 32, dtype=dtype)
    h_, w_, target_, g_lp_, g_h_ = on(kernels, h, w, target, g_lp, g_h)
    where = {"vocab_start": 0, "num_valid": 60, "temperature": 0.5}
    logprob, entropy = linear_logprob(h_, w_, target_, None, logits_dtype="bf16", **where)
    (dh,) = torch.autograd.grad((logprob * g_lp_ + entropy * g_h_).sum(), h_)
    # the fp64 logits rounded once; a sum in fp32 next to the border between two bf16 numbers may fall to the other one
    exact = (h.detach().double() @ w.detach().double()[:60].t()).bfloat16().double().requires_grad_()
    log_p = (exact / 0.5).log_softmax(1)
    want = torch.where(target == IGNORE, 0.0, log_p.gather(1, target.clamp(min=0)[:, None])[:, 0])
    entropies = torch.where(target == IGNORE, 0.0, -(log_p.exp() * log_p).sum(1))
    same = (logprob.detach().cpu().double() - want).abs() < 1e-5
    assert same.float().mean() > 0.9
    plain, _ = linear_logprob(h_, w_, target_, None, **where)
    counted = target != IGNORE
    assert ((plain.detach() - logprob.detach()).abs().cpu() > 1e-4)[counted].float().mean() > 0.9  # it does round
    # straight through: the gradient at the rounded logits
    (dlogits,) = torch.autograd.grad((want * g_lp + entropies * g_h).sum(), exact)
    exact_dh = dlogits @ w.detach().double()[:60]
    unit = 2**-6 if dtype == torch.bfloat16 else 1e-4
    assert ((dh.cpu().double() - exact_dh).abs() <= unit * exact_dh.abs().max())[same].all()


@pytest.mark.parametrize("fault", ["phantom columns", "no ignored rows", "unscaled"])
def test_injected_faults_are_caught(kernels, fault):
    h, w, target, g_lp, _ = problem(20, 45, 16, padding=3)
    want, _, _ = linear_oracle(h, w, target, 45, 0.5, g_lp, None)
    h_, w_, target_ = on(kernels, h, w, target)
    arguments = {"vocab_start": 0, "num_valid": 45, "temperature": 0.5, "ignore_index": IGNORE}
    right, _ = linear_logprob(h_, w_, target_, None, **arguments)
    wrong = {
        "phantom columns": lambda: linear_logprob(h_, w_, target_, None, **(arguments | {"num_valid": 48})),
        "no ignored rows": lambda: linear_logprob(h_, w_, target_.clamp(min=0), None, **arguments),
        "unscaled": lambda: linear_logprob(h_, w_, target_, None, **(arguments | {"temperature": 1.0})),
    }[fault]()[0]
    error, broken = ((x.detach().cpu().double() - want.logprob).abs().max() for x in (right, wrong))
    assert error < 2e-5 < 1e-3 < broken


def test_kept_and_recomputed_logits_give_the_same_bits(kernels):
    for logits_dtype in ("fp32", "bf16"):
        for dtype in some([torch.float32, torch.bfloat16], logits_dtype == "bf16"):
            h, w, target, g_lp, g_h = problem(70, 90, 32, dtype=dtype)
            h, w, target, g_lp, g_h = on(kernels, h, w, target, g_lp, g_h)
            grads = []
            for keep_logits in (False, True):
                # the same forward for both: a fused one has other roundings in lse
                given = (target, 0, 90, 1.25, None, IGNORE, None, logits_dtype == "bf16", False)
                stats, logits = OPS.linear_stats(h, w, *given, True, True, 35)
                logprob, entropy, lse = OPS.vocab_stats_merge(stats[None], target, IGNORE)
                upstream = lse.detach(), entropy.detach(), g_lp, g_h
                kept_logits = logits.detach() if keep_logits else None
                grads.append(OPS.linear_backward(h.detach(), w.detach(), *given, *upstream, kept_logits, 35))
            assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])
            assert logits.dtype == (torch.bfloat16 if logits_dtype == "bf16" and dtype == torch.bfloat16 else torch.float32)


@pytest.mark.parametrize("keep_logits", [False, True])
def test_backward_twice_leaves_inputs_and_kept_logits_as_they_are(keep_logits):
    h, w, target, g_lp, g_h = problem()
    before = h.detach().clone(), w.detach().clone()
    logprob, entropy = linear_logprob(h, w, target, None, vocab_start=0, num_valid=VOCAB, keep_logits=keep_logits)
    loss = (logprob * g_lp + entropy * g_h).sum()
    first = torch.autograd.grad(loss, (h, w), retain_graph=True)
    second = torch.autograd.grad(loss, (h, w))
    assert all(torch.equal(a, b) for a, b in zip((*first, *before), (*second, h, w)))


@pytest.mark.parametrize("which", ["logprob", "entropy"])
def test_one_output_alone_has_the_gradient_it_has_with_the_other(which):
    h, w, target, g_lp, g_h = problem()
    where = {"vocab_start": 0, "num_valid": VOCAB}
    pick = {"logprob": lambda lp, e: (lp * g_lp).sum(), "entropy": lambda lp, e: (e * g_h).sum()}[which]
    alone = torch.autograd.grad(pick(*linear_logprob(h, w, target, None, **where)), (h, w))
    logprob, entropy = linear_logprob(h, w, target, None, **where)
    other = 0.0 * (entropy.sum() if which == "logprob" else logprob.sum())
    for a, b in zip(alone, torch.autograd.grad(pick(logprob, entropy) + other, (h, w))):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_strided_inputs_and_expanded_gradients(kernels):
    h, w, target, _, _ = problem(20, 40, 16)
    h_, w_, target_ = on(kernels, h, w, target)
    wide_h, wide_w = (torch.randn(x.shape[0], 2 * x.shape[1], device=kernels) for x in (h_, w_))
    wide_h[:, ::2], wide_w[:, ::2] = h_.detach(), w_.detach()
    strided = wide_h[:, ::2].requires_grad_(), wide_w[:, ::2].requires_grad_()
    results = []
    for a, b in ((h_, w_), strided):
        logprob, entropy = linear_logprob(a, b, target_.expand(1, -1)[0], None, vocab_start=0, num_valid=40)
        ones = torch.ones((), device=kernels).expand(20)
        results.append((logprob, *torch.autograd.grad((logprob, entropy), (a, b), (ones, ones))))
    for got, want in zip(results[1], results[0]):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_no_tokens_and_an_empty_shard(kernels):
    h, w, target, _, _ = (x.detach().to(kernels) for x in problem(5, 12, 8))
    tail = (1.0, None, IGNORE, None, False, False)
    stats, _ = OPS.linear_stats(h[:0], w, target[:0], 0, 12, *tail, True, False, 0)
    assert stats.shape == (0, 4)
    stats, _ = OPS.linear_stats(h, w, target, 12, 0, *tail, True, False, 0)
    assert (stats[:, 0] == -torch.inf).all() and not stats[:, 1:3].any() and (stats[:, 3] == -torch.inf).all()
    zero = torch.zeros(5, device=kernels)
    dhidden, dweight = OPS.linear_backward(h, w, target, 12, 0, *tail, zero, zero, zero, None, None, 0)
    assert not dhidden.any() and not dweight.any() and dhidden.shape == h.shape and dweight.shape == w.shape


def cuts(num_tokens):
    """Ways to run a batch: permuted, split, among other tokens, in chunks."""
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(4))
    yield order, {}
    yield torch.arange(num_tokens // 3, num_tokens), {}
    yield torch.arange(1), {}
    yield torch.arange(num_tokens).repeat(2), {}
    for chunk_tokens in (1, 8, 4096):
        yield torch.arange(num_tokens), {"chunk_tokens": chunk_tokens}


@pytest.mark.parametrize("dtype,logits_dtype", [(torch.float32, "fp32"), (torch.bfloat16, "fp32"), (torch.bfloat16, "bf16")])
def test_invariant_mode_gives_a_token_the_same_bits_in_any_batch(kernels, dtype, logits_dtype):
    h, w, target, g_lp, g_h = problem(140, 70, 72, dtype=dtype)
    h, w, target, g_lp, g_h = on(kernels, h, w, target, g_lp, g_h)

    def run(rows, **options):
        own = h.detach()[rows].requires_grad_()
        logprob, entropy = linear_logprob(
            own,
            w.detach(),
            target[rows],
            None,
            vocab_start=0,
            num_valid=70,
            temperature=0.7,
            mode="invariant",
            logits_dtype=logits_dtype,
            **options,
        )
        (grad,) = torch.autograd.grad((logprob * g_lp[rows] + entropy * g_h[rows]).sum(), own)
        return logprob.detach(), entropy.detach(), grad

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # slow, and its products are the CPU's
    if interpreted and dtype == torch.bfloat16:
        pytest.skip("fp32 stands for all in the interpreter")
    whole = run(torch.arange(140))
    for rows, options in list(cuts(140))[: 2 if interpreted else None]:
        for got, want in zip(run(rows, **options), whole):
            assert torch.equal(got, want[rows]), options


def test_packed_and_padded_batches_agree_bitwise_in_invariant_mode():
    h, w, target, _, _ = (x.detach() for x in problem(60, 300, 72))
    lengths, where = (25, 10, 25), {"vocab_start": 0, "num_valid": 300, "mode": "invariant"}
    packed, _ = linear_logprob(h, w, target, None, **where)
    padded_h, padded_target = torch.randn(3, 25, 72), torch.full((3, 25), IGNORE)
    for b, (part, ids) in enumerate(zip(h.split(lengths), target.split(lengths))):
        padded_h[b, : len(part)], padded_target[b, : len(part)] = part, ids
    padded, _ = linear_logprob(padded_h.flatten(0, 1), w, padded_target.flatten(), None, **where)
    assert torch.equal(torch.cat([row[:n] for row, n in zip(padded.view(3, 25), lengths)]), packed)


def test_blocks_cover_everything_once_and_in_bounds():
    cases = ((5000, 512, 32000, 0), (1, 8192, 151936, 0), (7, 4, 3, 0), (300, 64, 129, 64))
    for num_tokens, hidden, vocab, chunk_tokens in cases:
        h, w = torch.empty(num_tokens, hidden), torch.empty(vocab, hidden, device="meta")
        blocks = LinearLogits(h, w, h, 0, vocab, 1.0, None, IGNORE, None, False).blocks(chunk_tokens)
        for size, slices in zip((num_tokens, vocab), blocks):
            assert [i for s in slices for i in range(s.start, s.stop)] == list(range(size))
        largest = max(t.stop - t.start for t in blocks[0]) * max(c.stop - c.start for c in blocks[1])
        assert largest <= 2**22 and (not chunk_tokens or max(t.stop - t.start for t in blocks[0]) <= chunk_tokens)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 2**16), st.sampled_from([0.0, 1e4, -300.0]))
def test_merging_blocks_is_the_statistic_of_all_columns(sizes, seed, offset):
    x = torch.randn(4, sum(sizes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 5 + offset
    x[0, : sizes[0]] = -torch.inf  # a block without probability
    x[1] = x[1, :1]
    target = torch.randint(0, sum(sizes), (4,), generator=torch.Generator().manual_seed(seed + 1))
    blocks, start = [], 0
    for size in sizes:
        blocks.append(OPS.vocab_stats(x[:, start : start + size], target, start, size, 1.0, None, IGNORE, True))
        start += size
    whole = OPS.vocab_stats(x, target, 0, sum(sizes), 1.0, None, IGNORE, True)
    merged = merge_blocks(torch.stack(blocks))
    if len(sizes) == 1:  # all -inf: m and z_y are -inf on both sides
        assert torch.equal(merged, whole)
    torch.testing.assert_close(merged, whole, rtol=1e-11, atol=1e-11)


def test_dispatch_says_what_the_products_are_around():
    with dispatch.using("cpp"):
        assert dispatch.selected("cpu")["linear_stats"] == dispatch.selected("cpu")["linear_backward"] == "gemm + cpp"
    with dispatch.using("reference"):
        assert dispatch.selected("cpu")["linear_stats"] == "reference"


def test_ops_are_functional_and_have_fake_kernels():
    h, w, target, g_lp, g_h = problem(6)
    h, w, lse = h.detach(), w.detach(), torch.full((6,), 4.0)
    kept = torch.arange(50).expand(6, -1)
    tail = (0, 50, 1.0, None, IGNORE)
    for keep_logits, ids in ((False, None), (True, kept)):
        opcheck(OPS.linear_stats, (h, w, target, *tail, ids, False, False, True, keep_logits, 4))
    opcheck(OPS.linear_dlogits, (h, w[:50], target, *tail, kept, False, False, lse, lse, g_lp, g_h))
    opcheck(OPS.linear_backward, (h, w, target, *tail, kept, False, False, lse, lse, g_lp, g_h, None, 4))
    opcheck(OPS.linear_backward, (h, w, target, *tail, None, False, True, lse, lse, g_lp, None, h @ w[:50].t(), 0))
