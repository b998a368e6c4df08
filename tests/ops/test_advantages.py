"""Rewards, GAE and moments against a loop over tokens in fp64 that is written from the contract, not from the code."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from megappo.ops.advantages import gae, token_advantages


def oracle(logprob, ref_logprob, score, value, mask, cu, bootstrap, gamma, lam_policy, lam_value, kl_kind, kl_coef):
    """All lists of Python floats; lam_* and score per sequence. Walks every sequence from its last token to its first."""
    n = len(value)
    reward, advantage, returns = [0.0] * n, [0.0] * n, [0.0] * n
    for b in range(len(cu) - 1):
        sampled = [t for t in range(cu[b], cu[b + 1]) if mask[t]]
        for t in sampled:
            d = logprob[t] - ref_logprob[t]
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(min(-d, 20.0)) - 1 + d}[kl_kind]
            reward[t] = -kl_coef * kl if kl_coef else 0.0
        if sampled:
            reward[sampled[-1]] += score[b]
        next_value = bootstrap[b] if bootstrap is not None else 0.0
        acc_policy = acc_value = 0.0
        for t in reversed(sampled):
            delta = reward[t] + gamma * next_value - value[t]
            acc_policy = delta + gamma * lam_policy[b] * acc_policy
            acc_value = delta + gamma * lam_value[b] * acc_value
            advantage[t], returns[t] = acc_policy, acc_value + value[t]
            next_value = value[t]
    return reward, advantage, returns


def batch(lengths, seed=0, mask="random"):
    generator = torch.Generator().manual_seed(seed)
    cu = torch.tensor([0, *torch.tensor(lengths, dtype=torch.long).cumsum(0).tolist()], dtype=torch.int32)
    total, count = int(cu[-1]), len(lengths)
    fields = torch.randn(3, total, generator=generator)
    position = torch.cat([torch.arange(n) for n in lengths]) if mask in ("prefix", "suffix") and lengths else torch.arange(total)
    half = torch.tensor(lengths, dtype=torch.long).repeat_interleave(torch.tensor(lengths, dtype=torch.long)) // 2
    masks = {
        "random": torch.rand(total, generator=generator) < 0.6, "all": torch.ones(total, dtype=torch.bool),
        "none": torch.zeros(total, dtype=torch.bool), "prefix": position < half, "suffix": position >= half,
    }
    return {
        "logprob": -fields[0].abs(),
        "ref_logprob": -fields[0].abs() + 0.3 * fields[1],
        "score": torch.randn(count, generator=generator),
        "value": fields[2],
        "response_mask": masks[mask],
        "cu_seqlens": cu,
        "bootstrap": torch.randn(count, generator=generator),
    }


def check(inputs, call=token_advantages, gamma=0.98, lam_policy=0.9, lam_value=0.97, kl_kind="k1", kl_coef=0.05):
    reward, advantage, returns, moments = call(
        **inputs, gamma=gamma, lam_policy=lam_policy, lam_value=lam_value, kl_kind=kl_kind, kl_coef=kl_coef
    )
    count = inputs["score"].numel()
    lams = [lam.tolist() if isinstance(lam, torch.Tensor) else [lam] * count for lam in (lam_policy, lam_value)]
    lists = {k: v.tolist() if v is not None else None for k, v in inputs.items()}
    want = oracle(
        lists["logprob"], lists["ref_logprob"], lists["score"], lists["value"], lists["response_mask"], lists["cu_seqlens"],
        lists["bootstrap"], gamma, *lams, kl_kind, kl_coef,
    )
    scale = max((max(map(abs, x), default=0.0) for x in want), default=0.0)
    for name, got, expected in zip(("reward", "advantage", "returns"), (reward, advantage, returns), want):
        expected = torch.tensor(expected, dtype=torch.float64)
        # one rounding to fp32 of each result
        atol = 2**-40 * max(scale, 1.0)
        torch.testing.assert_close(got.double(), expected, rtol=2**-23, atol=atol, msg=lambda m: f"{name}: {m}")
        assert not got[~inputs["response_mask"]].any()
    kept = advantage[inputs["response_mask"]].double()
    torch.testing.assert_close(moments.tolist(), [float(kept.numel()), float(kept.sum()), float(kept.square().sum())])
    return reward, advantage, returns, moments


LENGTHS = [[1], [7], [3, 1, 5], [0, 4, 0, 0, 6, 0], [0], [], [127, 128, 129], [1] * 40]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", ["random", "all", "none", "prefix", "suffix"])
def test_packed_sequences_match_the_loop(lengths, mask):
    check(batch(lengths, mask=mask))


LIMITS = [(0.0, 0.9, 0.9), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0), (0.9, 1.0, 1.0), (1.0, 1.0, 1.0)]


@pytest.mark.parametrize("gamma,lam_policy,lam_value", LIMITS)
def test_limits_of_gamma_and_lambda(gamma, lam_policy, lam_value):
    check(batch([9, 4, 17]), gamma=gamma, lam_policy=lam_policy, lam_value=lam_value)


@pytest.mark.parametrize("kl_kind", ["k1", "k2", "k3"])
def test_kl_kinds(kl_kind):
    check(batch([9, 4, 17]), kl_kind=kl_kind, kl_coef=0.2)


def test_an_extreme_log_ratio_stays_finite():
    inputs = batch([4], mask="all")
    inputs["ref_logprob"] = inputs["logprob"] + torch.tensor([100.0, -100.0, 0.0, 1e4])
    assert all(x.isfinite().all() for x in check(inputs, kl_kind="k3"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 12), max_size=6), st.integers(0, 10**6), st.sampled_from(["k1", "k2", "k3"]), st.booleans(),
    st.booleans(),
)
def test_any_lengths_and_masks(lengths, seed, kl_kind, with_bootstrap, per_sequence):
    inputs = batch(lengths, seed=seed)
    if not with_bootstrap:
        inputs["bootstrap"] = None
    lam = torch.linspace(0.1, 1.0, len(lengths), dtype=torch.float64) if per_sequence else 0.9
    check(inputs, kl_kind=kl_kind, lam_policy=lam)


def test_garbage_in_masked_slots_never_leaks():
    clean = batch([5, 8, 3], seed=3)
    dirty = dict(clean)
    for name, junk in (("logprob", torch.inf), ("ref_logprob", -torch.inf), ("value", torch.nan)):
        dirty[name] = torch.where(clean["response_mask"], clean[name], junk)
    for a, b in zip(token_advantages(**clean, kl_coef=0.1, kl_kind="k3"), token_advantages(**dirty, kl_coef=0.1, kl_kind="k3")):
        assert torch.equal(a, b)


def test_nan_stays_in_its_sequence():
    inputs = batch([5, 8, 3], mask="all")
    inputs["value"][7] = torch.nan
    _, advantage, _, _ = token_advantages(**inputs)
    assert advantage[:5].isfinite().all() and advantage[13:].isfinite().all() and advantage[5:8].isnan().all()


def test_packed_equals_alone_bitwise():
    inputs = batch([6, 1, 30, 0, 11], seed=5)
    packed = token_advantages(**inputs, kl_coef=0.1)
    cu = inputs["cu_seqlens"].tolist()
    for b, (start, end) in enumerate(zip(cu, cu[1:])):
        alone = {k: v[start:end] for k, v in inputs.items() if k in ("logprob", "ref_logprob", "value", "response_mask")}
        alone |= {k: inputs[k][b : b + 1] for k in ("score", "bootstrap")} | {"cu_seqlens": torch.tensor([0, end - start])}
        for whole, part in zip(packed[:3], token_advantages(**alone, kl_coef=0.1)[:3]):
            assert torch.equal(whole[start:end], part)


def test_masked_tokens_are_as_if_they_were_not_there():
    inputs = batch([20], seed=9)
    kept = inputs["response_mask"]
    dense = {k: (v[kept] if v.shape == kept.shape else v) for k, v in inputs.items()}
    dense["cu_seqlens"] = torch.tensor([0, int(kept.sum())])
    for gappy, plain in zip(token_advantages(**inputs)[:3], token_advantages(**dense)[:3]):
        torch.testing.assert_close(gappy[kept], plain, rtol=0, atol=0)


def test_two_lambdas_are_two_runs_and_rewards_are_linear():
    inputs = batch([20, 4], seed=2)
    _, advantage, returns, _ = token_advantages(**inputs, lam_policy=0.5, lam_value=0.99)
    _, only_policy, _, _ = token_advantages(**inputs, lam_policy=0.5, lam_value=0.5)
    _, _, only_value, _ = token_advantages(**inputs, lam_policy=0.99, lam_value=0.99)
    assert torch.equal(advantage, only_policy) and torch.equal(returns, only_value)

    zero = torch.zeros(24)
    gae_inputs = (zero, inputs["response_mask"], inputs["cu_seqlens"])
    a, b = torch.randn(2, 24, generator=torch.Generator().manual_seed(1))
    of_sum, of_a, of_b = (gae(x, *gae_inputs)[0].double() for x in (a + 2 * b, a, b))
    torch.testing.assert_close(of_sum, of_a + 2 * of_b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [[131072], [1] * 100_000], ids=["one long sequence", "many short ones"])
def test_long_batches_at_gamma_lambda_one(lengths):
    inputs = batch(lengths, mask="all")
    reward, advantage, _, _ = token_advantages(**inputs, gamma=1.0, lam_policy=1.0, lam_value=1.0, kl_coef=0.1)
    # with gamma = lambda = 1 the advantage is the reward still to come, plus the bootstrap, minus the value
    backwards = reward.double().flip(0).cumsum(0).flip(0)
    to_come = backwards if len(lengths) == 1 else reward.double()
    want = to_come + inputs["bootstrap"].double().expand_as(to_come) - inputs["value"].double()
    torch.testing.assert_close(advantage.double(), want, rtol=1e-6, atol=2e-7 * float(want.abs().max()))


def test_ops_are_functional_and_have_fake_kernels():
    x = batch([5, 3])
    lam = torch.full((2,), 0.9, dtype=torch.float64)
    opcheck(torch.ops.megappo.token_advantages, (
        x["logprob"], x["ref_logprob"], x["score"], x["value"], x["response_mask"], x["cu_seqlens"], None,
        1.0, 0.9, 0.9, lam, None, "k1", 0.1,
    ))
    opcheck(torch.ops.megappo.gae, (x["value"], x["value"], x["response_mask"], x["cu_seqlens"], x["bootstrap"], None, 1.0, 0.9, 0.8, None, lam))


@pytest.mark.parametrize("change,text", [
    ({"value": torch.zeros(3)}, "not one value for each of 3 tokens"), ({"score": torch.zeros(7)}, "score"),
    ({"kl_kind": "k4"}, "k1, k2, k3"), ({"response_mask": torch.ones(8)}, "bool"), ({"lam_policy": torch.ones(3)}, "lambda"),
])
def test_wrong_arguments_are_named(change, text):
    with pytest.raises(ValueError, match=text):
        token_advantages(**{**batch([5, 3]), **change})


# ------------------------------------------------------------------------------------------------------- negative controls


def decays_over_masked_tokens(**kw):
    everything = {**kw, "response_mask": torch.ones_like(kw["response_mask"])}
    mask = kw["response_mask"]
    return tuple(x * mask for x in token_advantages(**everything)[:3]) + (token_advantages(**kw)[3],)


def score_on_the_last_token_of_the_sequence(**kw):
    reward, _, _, _ = token_advantages(**{**kw, "score": torch.zeros_like(kw["score"])})
    ends = kw["cu_seqlens"][1:].long() - 1
    reward[ends] += kw["score"] * kw["response_mask"][ends]
    rest = {k: kw[k] for k in ("value", "response_mask", "cu_seqlens", "bootstrap", "gamma", "lam_policy", "lam_value")}
    return (reward, *gae(reward, **rest))


def ignores_sequence_borders(**kw):
    total = kw["value"].numel()
    one = {**kw, "cu_seqlens": torch.tensor([0, total]), "score": kw["score"][-1:], "bootstrap": kw["bootstrap"][-1:]}
    return token_advantages(**one)


def one_lambda_for_both(**kw):
    return token_advantages(**{**kw, "lam_value": kw["lam_policy"]})


@pytest.mark.parametrize("broken", [
    decays_over_masked_tokens, score_on_the_last_token_of_the_sequence, ignores_sequence_borders, one_lambda_for_both,
])
def test_an_injected_fault_is_noticed(broken):
    inputs = batch([12, 9], seed=4)
    inputs["response_mask"][-1] = False
    check(inputs)
    with pytest.raises(AssertionError):
        check(inputs, call=broken)
