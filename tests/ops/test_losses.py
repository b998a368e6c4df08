"""Clipped losses against an fp64 loop over tokens; gradients against finite differences; metrics that add."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from megappo.ops.losses import POLICY_MAXIMA, POLICY_SUMS, VALUE_MAXIMA, VALUE_SUMS, entropy_loss, policy_loss, value_loss

LOW, HIGH = 0.2, 0.3


def policy_oracle(logprob, old, advantage, weight, dual):
    """(loss, metrics) of Python floats, case by case as the paper's figure draws it."""
    loss, m = 0.0, dict.fromkeys((*POLICY_SUMS, *POLICY_MAXIMA), 0.0)
    for lp, o, a, w in zip(logprob, old, advantage, weight):
        if w == 0:
            continue
        d = max(-20.0, min(20.0, lp - o))
        r = math.exp(d)
        per_token = -a * r
        if a > 0 and r > 1 + HIGH:
            per_token, _ = -a * (1 + HIGH), m.update(clip_high_sum=m["clip_high_sum"] + 1)
        if a < 0 and r < 1 - LOW:
            per_token, _ = -a * (1 - LOW), m.update(clip_low_sum=m["clip_low_sum"] + 1)
        if a < 0 and dual is not None and r > dual:
            per_token, _ = -a * dual, m.update(dual_clip_sum=m["dual_clip_sum"] + 1)
        loss += w * per_token
        m["tokens_sum"] += 1
        m["approx_kl_sum"] += math.expm1(d) - d
        m["ratio_sum"] += r
        m["ratio_max"] = max(m["ratio_max"], r)
    return loss, m


def check_policy(logprob, old, advantage, weight, dual, call=policy_loss):
    loss, metrics = call(logprob, old, advantage, weight, clip_low=LOW, clip_high=HIGH, dual_clip=dual)
    want, want_metrics = policy_oracle(logprob.tolist(), old.tolist(), advantage.tolist(), weight.tolist(), dual)
    # a rounding of the log-ratio (values to 30) multiplies the ratio
    assert float(loss) == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert set(metrics) == set(want_metrics)
    for name, value in want_metrics.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5, abs=1e-5), name


# every branch on both sides: away from the borders by more than a rounding
LOG_RATIOS = [0.0, 0.1, -0.1, 0.5, -0.5, 1.0, 1.5, -3.0, 15.0, -15.0, 100.0, -100.0]


@pytest.mark.parametrize("dual", [None, 3.0])
def test_every_branch_of_the_policy_loss(dual):
    ratio = torch.tensor(LOG_RATIOS).repeat(3)
    advantage = torch.tensor([1.5, -0.7, 0.0]).repeat_interleave(len(LOG_RATIOS))
    check_policy(ratio - 2.0, torch.full_like(ratio, -2.0), advantage, torch.linspace(0.1, 1, ratio.numel()), dual)


def test_equal_log_probs_have_ratio_one_exactly():
    lp = -torch.rand(100) * 30
    loss, metrics = policy_loss(lp, lp.clone(), torch.ones(100), torch.ones(100))
    assert float(loss) == -100.0 and float(metrics["ratio_max"]) == 1.0 and float(metrics["approx_kl_sum"]) == 0.0


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_gradient_is_whole_inside_the_clip_and_zero_outside(advantage):
    log_ratio = torch.tensor([0.0, math.log(1 + HIGH) - 1e-3, math.log(1 - LOW) + 1e-3, 1.0, -1.0], requires_grad=True)
    loss, _ = policy_loss(log_ratio, torch.zeros(5), torch.full((5,), advantage), torch.ones(5), clip_low=LOW, clip_high=HIGH)
    loss.backward()
    outside = torch.tensor([False, False, False, advantage > 0, advantage < 0])
    torch.testing.assert_close(log_ratio.grad, torch.where(outside, 0.0, -advantage * log_ratio.detach().exp()))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 30), st.integers(0, 10**6), st.sampled_from([None, 1.5, 3.0]))
def test_any_batch_with_any_weights(num_tokens, seed, dual):
    generator = torch.Generator().manual_seed(seed)
    lp, old, advantage = torch.randn(3, num_tokens, generator=generator)
    weight = torch.rand(num_tokens, generator=generator) * (torch.rand(num_tokens, generator=generator) < 0.6)
    check_policy(lp, old, advantage, weight, dual)


@pytest.mark.parametrize("loss_fn", [policy_loss, value_loss, lambda a, *rest: entropy_loss(a, rest[-1])])
def test_masked_tokens_do_nothing_whatever_stands_there(loss_fn):
    generator = torch.Generator().manual_seed(0)
    fields = torch.randn(3, 12, generator=generator)
    weight = (torch.arange(12) % 3 != 0).float()
    results = []
    for junk in (0.0, torch.inf, torch.nan):
        a, b, c = (torch.where(weight != 0, x, junk) for x in fields)
        a.requires_grad_()
        loss, metrics = loss_fn(a, b, c, weight)
        loss.backward()
        results.append((loss.detach(), a.grad, metrics))
    for loss, grad, metrics in results[1:]:
        assert torch.equal(loss, results[0][0]) and torch.equal(grad, results[0][1]) and metrics == results[0][2]


def value_oracle(value, old, returns, weight, clip):
    loss, m = 0.0, dict.fromkeys((*VALUE_SUMS, *VALUE_MAXIMA), 0.0)
    for v, o, r, w in zip(value, old, returns, weight):
        if w == 0:
            continue
        squared = (v - r) ** 2
        if clip is not None:
            clipped = (max(o - clip, min(o + clip, v)) - r) ** 2
            m["value_clip_sum"] += clipped > squared
            squared = max(squared, clipped)
        loss += w * squared / 2
        m["tokens_sum"] += 1
        m["value_sum"] += v
        m["value_error_sum"] += v - r
        m["value_squared_error_sum"] += (v - r) ** 2
        m["value_error_max"] = max(m["value_error_max"], abs(v - r))
    return loss, m


def check_value(value, old, returns, weight, clip, call=value_loss):
    loss, metrics = call(value, old, returns, weight, clip=clip)
    want, want_metrics = value_oracle(*(x.double().tolist() for x in (value, old, returns, weight)), clip)
    assert float(loss) == pytest.approx(want, rel=1e-5, abs=1e-6)
    for name, value in want_metrics.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5, abs=1e-5), name


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 30), st.integers(0, 10**6), st.sampled_from([None, 0.2, 1.0]))
def test_value_loss_matches_the_loop(num_tokens, seed, clip):
    generator = torch.Generator().manual_seed(seed)
    value, old, returns = torch.randn(3, num_tokens, generator=generator)
    weight = torch.rand(num_tokens, generator=generator) * (torch.rand(num_tokens, generator=generator) < 0.6)
    check_value(value, old, returns, weight, clip)


def test_gradients_match_finite_differences():
    generator = torch.Generator().manual_seed(3)
    a, b, c = torch.randn(3, 20, dtype=torch.float64, generator=generator)
    weight = torch.rand(20, dtype=torch.float64, generator=generator) * (torch.arange(20) % 4 != 0)
    a.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, b, c, weight, dual_clip=2.0)[0], (a,))
    assert torch.autograd.gradcheck(lambda x: value_loss(x, b, c, weight, clip=0.2)[0], (a,))
    assert torch.autograd.gradcheck(lambda x: entropy_loss(x, weight)[0], (a,))


def test_micro_batches_add_up_to_the_batch():
    generator = torch.Generator().manual_seed(5)
    fields = torch.randn(3, 60, generator=generator)
    weight = torch.rand(60, generator=generator)
    for loss_fn in (policy_loss, value_loss):
        whole, metrics = loss_fn(*fields, weight)
        parts = [loss_fn(*fields[:, s], weight[s]) for s in (slice(0, 7), slice(7, 8), slice(8, 8), slice(8, 60))]
        assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole), rel=1e-5)
        for name, value in metrics.items():
            combined = [float(m[name]) for _, m in parts]
            assert (max if name.endswith("_max") else sum)(combined) == pytest.approx(float(value), rel=1e-9), name


def test_ops_are_functional_and_have_fake_kernels():
    a, b, c = torch.randn(3, 9)
    a.requires_grad_()
    opcheck(torch.ops.megappo.policy_loss, (a, b, c, torch.ones(9), 0.2, 0.2, None))
    opcheck(torch.ops.megappo.policy_loss, (a, b, c, torch.ones(9), 0.2, 0.2, 3.0))
    opcheck(torch.ops.megappo.value_loss, (a, b, c, torch.ones(9), 0.2))


def test_bf16_input_has_bf16_gradient_and_fp32_loss():
    lp = torch.randn(6).bfloat16().requires_grad_()
    loss, _ = policy_loss(lp, torch.randn(6), torch.randn(6), torch.ones(6))
    loss.backward()
    assert loss.dtype == torch.float32 and lp.grad.dtype == torch.bfloat16


def test_shapes_that_differ_are_named():
    with pytest.raises(ValueError, match=r"advantage \(4,\)"):
        policy_loss(torch.zeros(3), torch.zeros(3), torch.zeros(4), torch.zeros(3))


# ------------------------------------------------------------------------------------------------------- negative controls


def dual_clip_on_both_signs(lp, old, advantage, weight, *, clip_low, clip_high, dual_clip):
    _, metrics = policy_loss(lp, old, advantage, weight, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    ratio = (lp - old).clamp(-20, 20).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    return (weight * torch.minimum(loss, -advantage * dual_clip)).sum(), metrics


def clips_without_the_maximum(lp, old, advantage, weight, *, clip_low, clip_high, dual_clip):
    _, metrics = policy_loss(lp, old, advantage, weight, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return (weight * -advantage * (lp - old).exp().clamp(1 - clip_low, 1 + clip_high)).sum(), metrics


@pytest.mark.parametrize("broken", [dual_clip_on_both_signs, clips_without_the_maximum])
def test_an_injected_policy_fault_is_noticed(broken):
    lp, old, advantage = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    check_policy(lp, old, advantage, torch.ones(50), 3.0)
    with pytest.raises(AssertionError):
        check_policy(lp, old, advantage, torch.ones(50), 3.0, call=broken)


def test_a_value_clip_by_minimum_is_noticed():
    def broken(value, old, returns, weight, *, clip):
        clipped = old + (value - old).clamp(-clip, clip)
        loss = torch.minimum((value - returns).square(), (clipped - returns).square())
        return 0.5 * (weight * loss).sum(), value_loss(value, old, returns, weight, clip=clip)[1]

    value, old, returns = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    check_value(value, old, returns, torch.ones(50), 0.2)
    with pytest.raises(AssertionError):
        check_value(value, old, returns, torch.ones(50), 0.2, call=broken)
