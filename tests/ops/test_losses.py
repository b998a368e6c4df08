"""Clipped losses of every implementation against the loss written plainly in fp64, its autograd, and metrics counted by case."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.algo.losses import POLICY_MAXIMA, POLICY_SUMS, VALUE_MAXIMA, VALUE_SUMS
from megappo.ops.implementations import interpreted
from megappo.ops.losses import policy_loss, value_loss
from tests.ops.advantages_oracle import examples

LOW, HIGH = 0.2, 0.3
# tiles of the implementations: 16, 1024, 4096; 3072 tokens are what the tests' build of the CUDA kernels takes in one round
SIZES = [0, 1, 15, 16, 17, 1023, 1024, 1025, 3073, 4097, 9001]
OF_TRITON = [0, 1, 1024, 1025, 3073]


def policy_oracle(logprob, old, advantage, weight, *, clip_low, clip_high, dual_clip):
    """(loss sum, its gradient, metrics) in fp64: plain expressions over the tokens with weight, gradient by autograd."""
    kept = weight != 0
    lp = logprob.detach().double().requires_grad_()
    x, a, w = (lp - old.double())[kept], advantage.double()[kept], weight.double()[kept]
    r = x.clamp(-20, 20).exp()
    plain = torch.maximum(-a * r, -a * r.clamp(1 - clip_low, 1 + clip_high))
    limited = plain if dual_clip is None else torch.where(a < 0, torch.minimum(plain, -a * dual_clip), plain)
    loss = (w * limited).sum()
    loss.backward()
    metrics = {
        "tokens_sum": kept.sum(),
        "clip_low_sum": ((a < 0) & (r < 1 - clip_low)).sum(),
        "clip_high_sum": ((a > 0) & (r > 1 + clip_high)).sum(),
        "dual_clip_sum": ((a < 0) & (r > dual_clip)).sum() if dual_clip is not None else 0,
        "approx_kl_sum": (x.clamp(-20, 20).expm1() - x.clamp(-20, 20)).sum(),
        "ratio_sum": r.sum(),
        "ratio_max": r.max() if r.numel() else 0,
    }
    return loss.detach(), lp.grad, metrics


def value_oracle(value, old, returns, weight, *, clip):
    """As policy_oracle, of the value loss."""
    kept = weight != 0
    v = value.detach().double().requires_grad_()
    x, o, target, w = v[kept], old.double()[kept], returns.double()[kept], weight.double()[kept]
    squared = (x - target).square()
    clipped = squared if clip is None else (o + (x - o).clamp(-clip, clip) - target).square()
    loss = (w * torch.maximum(squared, clipped)).sum() / 2
    loss.backward()
    error = x - target
    metrics = {
        "tokens_sum": kept.sum(),
        "value_clip_sum": (clipped > squared * (1 + 1e-9)).sum(),
        "value_error_sum": error.sum(),
        "value_squared_error_sum": squared.sum(),
        "value_sum": x.sum(),
        "value_error_max": error.abs().max() if error.numel() else 0,
    }
    return loss.detach(), v.grad, metrics


def check(loss_fn, oracle, fields, weight, device, **options):
    first = fields[0].detach().to(device).requires_grad_()
    loss, metrics = loss_fn(first, *(x.to(device) for x in fields[1:]), weight.to(device), **options)
    loss.backward()
    want_loss, want_gradient, want_metrics = oracle(*fields, weight, **options)
    # fp32 rounds a log-ratio (at most 20 here, of log-probs to 100: 6e-6) before the exponential; sums are fp64
    scale = max(1.0, float(want_gradient.abs().sum()))
    assert float(loss.detach()) == pytest.approx(float(want_loss), rel=1e-5, abs=1e-5 * scale)
    assert first.grad.dtype == fields[0].dtype
    torch.testing.assert_close(first.grad.cpu().double(), want_gradient, rtol=1e-5 + torch.finfo(first.dtype).eps / 2, atol=1e-6)
    assert metrics.keys() == want_metrics.keys()
    # A sum of differences may cancel, and each of them was rounded to fp32.
    rounding = torch.finfo(torch.float32).eps * sum(float(field.abs().sum()) for field in fields)
    for name, want in want_metrics.items():
        assert metrics[name].dtype == torch.float64 and metrics[name].shape == ()
        expected = pytest.approx(float(torch.as_tensor(want).detach()), rel=1e-5, abs=max(1e-5, rounding))
        assert float(metrics[name]) == expected, name


def check_policy(fields, weight, device, dual_clip, loss_fn=policy_loss):
    check(loss_fn, policy_oracle, fields, weight, device, clip_low=LOW, clip_high=HIGH, dual_clip=dual_clip)


def check_value(fields, weight, device, clip, loss_fn=value_loss):
    check(loss_fn, value_oracle, fields, weight, device, clip=clip)


def random_batch(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(num_tokens, generator=generator) * (torch.rand(num_tokens, generator=generator) < 0.6)
    return torch.randn(3, num_tokens, generator=generator), weight


# every branch on both sides: away from the borders by more than a rounding
LOG_RATIOS = [0.0, 0.1, -0.1, 0.5, -0.5, 1.0, 1.5, -3.0, 15.0, -15.0, 100.0, -100.0]


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_every_branch_of_the_policy_loss(kernels, dual_clip):
    log_ratio = torch.tensor(LOG_RATIOS).repeat(3)
    advantage = torch.tensor([1.5, -0.7, 0.0]).repeat_interleave(len(LOG_RATIOS))
    weight = torch.linspace(0.1, 1, log_ratio.numel())
    # each kind of ratio alone too: the largest would hide the others in a sum
    check_policy((log_ratio - 2.0, torch.full_like(log_ratio, -2.0), advantage), weight, kernels, dual_clip)
    for keep in (log_ratio.abs() < 10, log_ratio < 10, log_ratio.abs() > 50):
        check_policy((log_ratio - 2.0, torch.full_like(log_ratio, -2.0), advantage), weight * keep, kernels, dual_clip)


def test_any_number_of_tokens(kernels):
    for num_tokens in OF_TRITON if interpreted() else SIZES:
        fields, weight = random_batch(num_tokens)
        check_policy(fields, weight, kernels, 3.0)
        check_value(fields, weight, kernels, 0.2)


def test_any_batch_with_any_weights(kernels, request):
    @settings(max_examples=examples(request) // 2, deadline=None)
    @given(st.integers(0, 40), st.integers(0, 10**6), st.sampled_from([None, 1.5, 3.0]), st.sampled_from([1e-3, 1.0, 30.0]))
    def run(num_tokens, seed, bound, scale):
        fields, weight = random_batch(num_tokens, seed)
        check_policy(fields * scale, weight, kernels, bound)
        check_value(fields * scale, weight, kernels, bound)

    run()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_fp32(kernels, dtype):
    fields, weight = random_batch(100)
    check_policy(fields.to(dtype), weight, kernels, 3.0)
    check_value(fields.to(dtype), weight.to(dtype), kernels, 0.2)
    loss, _ = policy_loss(*fields.to(kernels, dtype), weight.to(kernels))
    assert loss.dtype == torch.float32


def test_equal_log_probs_have_ratio_one_exactly(kernels):
    lp = (-torch.rand(100, generator=torch.Generator().manual_seed(0)) * 30).to(kernels)
    ones = torch.ones(100, device=kernels)
    # without any room for the ratio: at both bounds, and neither cuts
    loss, metrics = policy_loss(lp, lp.clone(), ones, ones, clip_low=0.0, clip_high=0.0, dual_clip=1.0)
    assert float(loss) == -100.0 and float(metrics["ratio_max"]) == 1.0 and float(metrics["approx_kl_sum"]) == 0.0
    assert not any(float(metrics[name]) for name in ("clip_low_sum", "clip_high_sum", "dual_clip_sum"))


def test_the_clip_starts_beyond_its_bound(kernels):
    for log_ratio in [0.3, 1e-3, -1e-3, -0.3]:
        lp = torch.tensor([log_ratio], device=kernels, requires_grad=True)
        advantage, one = torch.tensor([math.copysign(1.0, log_ratio)], device=kernels), torch.ones(1, device=kernels)
        ratio = policy_loss(lp, 0 * one, advantage, one)[1]["ratio_max"].item()
        nearer = torch.nextafter(torch.tensor(ratio, dtype=torch.float32), torch.tensor(1.0)).item()
        for bound, gradient in ((ratio, -ratio * advantage), (nearer, 0 * one)):
            low, high = (0.0, bound - 1.0) if log_ratio > 0 else (1.0 - bound, 0.0)
            loss, metrics = policy_loss(lp, 0 * one, advantage, one, clip_low=low, clip_high=high)
            assert torch.equal(torch.autograd.grad(loss, lp)[0], gradient)
            assert float(loss.detach()) == pytest.approx(-float(advantage) * bound)
            assert float(metrics["clip_low_sum"] + metrics["clip_high_sum"]) == (bound == nearer)


def test_small_changes_have_an_accurate_kl(kernels):
    # d^2 / 2 = 5e-9: the difference of two fp32 numbers near 1e-4 would leave three digits
    log_ratio = torch.linspace(-1e-4, 1e-4, 200)
    zero, one = torch.zeros(200, device=kernels), torch.ones(200, device=kernels)
    kl = policy_loss(log_ratio.to(kernels), zero, one, one)[1]["approx_kl_sum"]
    assert float(kl) == pytest.approx(float((log_ratio.double().expm1() - log_ratio.double()).sum()), rel=1e-6)


def test_micro_batches_add_up_to_the_batch(kernels):
    fields, weight = (x.to(kernels) for x in random_batch(2000))
    for loss_fn in (policy_loss, value_loss):
        whole, metrics = loss_fn(*fields, weight)
        parts = [loss_fn(*fields[:, s], weight[s]) for s in (slice(0, 7), slice(7, 8), slice(8, 8), slice(8, 2000))]
        assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole), rel=1e-6)
        for name, value in metrics.items():
            combined = [float(m[name]) for _, m in parts]
            assert (max if name.endswith("_max") else sum)(combined) == pytest.approx(float(value), rel=1e-12), name


# ------------------------------------------------------------------------------------------------------- negative controls


def dual_clip_on_both_signs(lp, old, advantage, weight, *, clip_low, clip_high, dual_clip):
    _, metrics = policy_loss(lp, old, advantage, weight, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    ratio = (lp - old).clamp(-20, 20).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    return (weight * torch.minimum(loss, -advantage * dual_clip)).sum(), metrics


def clips_without_the_maximum(lp, old, advantage, weight, *, clip_low, clip_high, dual_clip):
    _, metrics = policy_loss(lp, old, advantage, weight, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return (weight * -advantage * (lp - old).exp().clamp(1 - clip_low, 1 + clip_high)).sum(), metrics


def keeps_the_gradient_of_cut_tokens(lp, old, advantage, weight, *, clip_low, clip_high, dual_clip):
    loss, metrics = policy_loss(lp, old, advantage, weight, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    unclipped = (weight * -advantage * (lp - old).exp()).sum()
    return loss.detach() + unclipped - unclipped.detach(), metrics


@pytest.mark.parametrize("broken", [dual_clip_on_both_signs, clips_without_the_maximum, keeps_the_gradient_of_cut_tokens])
def test_an_injected_policy_fault_is_noticed(broken):
    fields, weight = random_batch(50, seed=1)
    check_policy(fields, weight, "cpu", 3.0)
    with pytest.raises(AssertionError):
        check_policy(fields, weight, "cpu", 3.0, loss_fn=broken)


def test_a_value_clip_by_minimum_is_noticed():
    def broken(value, old, returns, weight, *, clip):
        clipped = old + (value - old).clamp(-clip, clip)
        loss = torch.minimum((value - returns).square(), (clipped - returns).square())
        return 0.5 * (weight * loss).sum(), value_loss(value, old, returns, weight, clip=clip)[1]

    fields, weight = random_batch(50, seed=1)
    check_value(fields, weight, "cpu", 0.2)
    with pytest.raises(AssertionError):
        check_value(fields, weight, "cpu", 0.2, loss_fn=broken)


def test_names_are_of_what_the_ops_return():
    fields, weight = random_batch(5)
    assert set(policy_loss(*fields, weight)[1]) == {*POLICY_SUMS, *POLICY_MAXIMA}
    assert set(value_loss(*fields, weight)[1]) == {*VALUE_SUMS, *VALUE_MAXIMA}
