"""KL-shaped rewards, advantages and moments against loops over tokens; long batches and borders are in test_advantages_tiles.py."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from megappo.algo.kl import ESTIMATORS
from megappo.ops import dispatch
from megappo.ops.advantages import KERNEL_ESTIMATORS
from tests.ops.advantages_oracle import (
    MASKS,
    OF_TOKENS,
    SMALL_TILES,
    batch,
    check,
    examples,
    on,
    rewards_batch,
    token_advantages,
    with_tokens,
)

CPU = torch.device("cpu")
INTERPRETED_WITH = SMALL_TILES


LENGTHS = [[1], [7], [3, 1, 5], [0, 4, 0, 0, 6, 0], [0], [], [127, 128, 129], [1, 0, 2] * 50, [31, 33, 64, 0, 2, 300]]


def test_packed_sequences_match_the_loop(kernels):
    for lengths in LENGTHS:
        check(kernels, batch(lengths, mask="mixed"))


def test_kinds_of_masks(kernels):
    for mask in MASKS:
        check(kernels, batch([9, 0, 17, 66, 1], mask=mask))


LIMITS = [(0.0, 0.9, 0.9), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0), (0.9, 1.0, 1.0), (1.0, 1.0, 1.0)]


def test_limits_of_gamma_and_lambda(kernels):
    for gamma, lam_policy, lam_value in LIMITS:
        check(kernels, batch([9, 4, 17]), gamma=gamma, lam_policy=lam_policy, lam_value=lam_value)


@pytest.mark.parametrize("kl_estimator", KERNEL_ESTIMATORS)
def test_kl_estimators_from_tiny_to_extreme_ratios(kernels, kl_estimator):
    inputs = batch([9, 4, 33], mask="all")
    ratios = torch.tensor([0, 1e-7, -1e-5, 1e-3, -9e-3, 11e-3, -0.3, 0.3, 3.0, -19.9, -20.1, 60, -60, 100.0, -100.0, 1e4, -1e4])
    inputs["logprob"][:17] = -1.0
    inputs["ref_logprob"][:17] = -1.0 - ratios
    assert all(x.isfinite().all() for x in check(kernels, inputs, kl_estimator=kl_estimator, kl_coef=0.2))


def test_kernels_number_the_estimators_alike():
    header = (Path(__file__).parents[2] / "csrc" / "advantages" / "advantages.h").read_text()
    (names,) = re.findall(r"enum class Kl : std::int32_t {(.*?)}", header)
    assert tuple(names.replace(" ", "").split(",")) == ("none", *KERNEL_ESTIMATORS)


def test_an_estimator_added_to_the_table_runs_on_the_reference_and_is_refused_by_kernels(kernels, monkeypatch):
    """A kernel that took it by number would return another estimator's reward."""
    monkeypatch.setitem(ESTIMATORS, "squared_k1", torch.square)
    inputs = on(kernels, batch([5, 12]))
    asked = {"kl_estimator": "squared_k1", "kl_coef": 0.2}
    if dispatch.selected(kernels.type)["token_advantages"] != "reference":
        with pytest.raises(ValueError, match="squared_k1.* no kernel .*k1, k2, k3.*kernels=reference"):
            token_advantages(**inputs, **asked)
    with dispatch.using("reference"):
        doubled = token_advantages(**inputs, kl_estimator="k2", kl_coef=0.4)
        assert all(torch.equal(a, b) for a, b in zip(token_advantages(**inputs, **asked), doubled))


def test_no_reference_is_no_kl(kernels):
    inputs = on(kernels, batch([5, 12]))
    without = token_advantages(**{**inputs, "ref_logprob": None}, kl_coef=0.3)
    unread = {name: inputs[name] * torch.nan for name in ("logprob", "ref_logprob")}
    for other in ({**inputs, **unread}, {**inputs, **unread, "ref_logprob": None}):
        assert all(torch.equal(a, b) for a, b in zip(without, token_advantages(**other, kl_coef=0.0)))


def test_any_lengths_masks_and_lambdas(kernels, request):
    @settings(max_examples=examples(request), deadline=None)
    @given(
        st.lists(st.one_of(st.integers(0, 12), st.integers(0, 90)), max_size=6),
        st.integers(0, 10**6),
        st.sampled_from(["k1", "k2", "k3", "given"]),
        st.booleans(),
        st.floats(0, 1),
        st.one_of(st.none(), st.floats(0, 1)),
        st.sampled_from([*MASKS, "mixed"]),
    )
    def run(lengths, seed, reward, with_bootstrap, gamma, lam, mask):
        inputs = rewards_batch(lengths, seed, mask) if reward == "given" else batch(lengths, seed, mask)
        if not with_bootstrap:
            inputs["bootstrap"] = None
        lam = torch.linspace(0.1, 1.0, len(lengths), dtype=torch.float64) if lam is None else lam
        check(kernels, inputs, gamma=gamma, lam_policy=lam, kl_estimator=reward if reward != "given" else "k1")

    run()


def test_garbage_in_masked_slots_never_leaks(kernels):
    clean = batch([5, 8, 3, 40], seed=3)
    dirty = dict(clean)
    for name, junk in (("logprob", torch.inf), ("ref_logprob", -torch.inf), ("value", torch.nan)):
        dirty[name] = torch.where(clean["response_mask"], clean[name], junk)
    clean, dirty = on(kernels, clean), on(kernels, dirty)
    for a, b in zip(
        token_advantages(**clean, kl_coef=0.1, kl_estimator="k3"), token_advantages(**dirty, kl_coef=0.1, kl_estimator="k3")
    ):
        assert torch.equal(a, b)


def test_never_bootstraps_from_a_masked_slot(kernels):
    inputs = batch([6, 30], mask="all")
    inputs["response_mask"][4:6] = inputs["response_mask"][20:] = False
    inputs["bootstrap"] = None
    loud = {**inputs, "value": torch.where(inputs["response_mask"], inputs["value"], 1e30)}
    _, advantage, _, _ = check(kernels, loud, kl_coef=0.0)
    assert advantage[3] == inputs["score"][0] - inputs["value"][3]


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_nan_stays_in_its_sequence(kernels, lam):
    inputs = batch([5, 8, 3, 50], mask="all")
    inputs["value"][7] = torch.nan
    _, advantage, returns, moments = token_advantages(**on(kernels, inputs), lam_policy=lam, lam_value=lam)
    for x in (advantage.cpu(), returns.cpu()):
        assert x[:5].isfinite().all() and x[8:].isfinite().all() and x[6:8].isnan().any()
    assert moments[1].isnan() and moments[0] == 66


def test_a_score_without_a_token_goes_nowhere(kernels):
    inputs = batch([4, 6, 5], mask="all")
    inputs["response_mask"][4:10] = False
    inputs["score"][1] = inputs["bootstrap"][1] = torch.nan
    reward, *rest = token_advantages(**on(kernels, inputs))
    assert all(x.isfinite().all() for x in (reward, *rest))
    torch.testing.assert_close(reward.sum().cpu(), inputs["score"][::2].sum())


def test_terminal_reward_reaches_the_last_sampled_token(kernels):
    inputs = batch([10, 70], mask="all")
    inputs["response_mask"][6:10] = False
    inputs["response_mask"][12:] = False
    reward = token_advantages(**on(kernels, inputs))[0].cpu()
    want = torch.zeros(80)
    want[5], want[11] = inputs["score"]
    assert torch.equal(reward, want)


def test_packed_equals_alone_bitwise(kernels):
    inputs = on(kernels, batch([6, 1, 30, 0, 11, 75], seed=5))
    packed = token_advantages(**inputs, kl_coef=0.1)
    cu = inputs["cu_seqlens"].tolist()
    for b, (start, end) in enumerate(zip(cu, cu[1:])):
        alone = {k: v[start:end] for k, v in inputs.items() if k in ("logprob", "ref_logprob", "value", "response_mask")}
        alone |= {k: inputs[k][b : b + 1] for k in ("score", "bootstrap")}
        alone["cu_seqlens"] = torch.tensor([0, end - start], device=kernels)
        for whole, part in zip(packed[:3], token_advantages(**alone, kl_coef=0.1)[:3]):
            assert torch.equal(whole[start:end], part)


def rows(packed, cu, length):
    """[B * length]: each sequence at the left, at the right or spread over its row, in turn, and garbage around it."""
    junk = torch.full((), torch.nan) if packed.is_floating_point() else packed.new_zeros(())
    out = junk.to(packed.dtype).expand(len(cu) - 1, length).clone()
    for i, (start, end) in enumerate(zip(cu, cu[1:])):
        size = end - start
        at = (torch.arange(size), torch.arange(length - size, length), torch.arange(size) * (length // max(size, 1)))[i % 3]
        out[i, at] = packed[start:end]
    return out.flatten()


@pytest.mark.parametrize("made", [batch, rewards_batch], ids=["shaped", "given"])
def test_packed_equals_padded_bitwise(kernels, made):
    inputs = made([37, 1, 30, 40, 12], seed=3)
    cu = inputs["cu_seqlens"].tolist()
    of_tokens = [name for name, x in inputs.items() if x is not None and x.shape == (120,)]
    padded = {**inputs, **{name: rows(inputs[name], cu, 80) for name in of_tokens}, "cu_seqlens": torch.arange(6) * 80}
    there = rows(torch.ones(120, dtype=torch.bool), cu, 80)
    *packed, moments = (x.cpu() for x in token_advantages(**on(kernels, inputs), kl_coef=0.1))
    *unpacked, others = (x.cpu() for x in token_advantages(**on(kernels, padded), kl_coef=0.1))
    assert all(torch.equal(wide[there], want) and not wide[~there].any() for wide, want in zip(unpacked, packed))
    torch.testing.assert_close(others, moments, rtol=1e-12, atol=1e-12)


def test_masked_tokens_are_as_if_they_were_not_there(kernels):
    inputs = batch([70], seed=9)
    kept = inputs["response_mask"]
    dense = {k: (v[kept] if v.shape == kept.shape else v) for k, v in inputs.items()}
    dense["cu_seqlens"] = torch.tensor([0, int(kept.sum())])
    for gappy, plain in zip(token_advantages(**on(kernels, inputs))[:3], token_advantages(**on(kernels, dense))[:3]):
        torch.testing.assert_close(gappy.cpu()[kept], plain.cpu(), rtol=0, atol=0)


def test_two_lambdas_are_two_runs_and_rewards_are_linear(kernels):
    inputs = on(kernels, batch([20, 40], seed=2))
    _, advantage, returns, _ = token_advantages(**inputs, lam_policy=0.5, lam_value=0.99)
    _, only_policy, _, _ = token_advantages(**inputs, lam_policy=0.5, lam_value=0.5)
    _, _, only_value, _ = token_advantages(**inputs, lam_policy=0.99, lam_value=0.99)
    assert torch.equal(advantage, only_policy) and torch.equal(returns, only_value)

    plain = on(kernels, rewards_batch([20, 40], seed=2))
    plain |= {name: torch.zeros_like(plain[name]) for name in ("value", "bootstrap")}
    a, b = torch.randn(2, 60, generator=torch.Generator().manual_seed(1)).to(kernels)
    of_sum, of_a, of_b = (token_advantages(**{**plain, "token_reward": x})[1].double() for x in (a + 2 * b, a, b))
    torch.testing.assert_close(of_sum, of_a + 2 * of_b, rtol=1e-5, atol=1e-6)


def test_lambda_is_a_number_a_scalar_or_one_per_sequence(kernels):
    inputs = on(kernels, batch([20, 0, 40], seed=2))
    number = token_advantages(**inputs, lam_policy=0.5, lam_value=0.25)
    for lam in (torch.tensor(0.5), torch.full((3,), 0.5), torch.full((3,), 0.5, dtype=torch.float64)):
        other = token_advantages(**inputs, lam_policy=lam.to(kernels), lam_value=lam.to(kernels) / 2)
        assert all(torch.equal(x, y) for x, y in zip(number, other))


def test_inputs_may_be_strided_offset_and_of_other_floats_and_stay_as_they_are(kernels):
    inputs = on(kernels, batch([20, 45, 3], seed=2))
    plain = token_advantages(**inputs, kl_coef=0.1)
    spread = {k: torch.stack((v, v), 1).flatten()[::2] for k, v in inputs.items()}
    # one element into its storage: nothing is aligned to 16 bytes
    offset = {k: torch.cat((v[:1], v))[1:] for k, v in inputs.items()}
    wide = {**inputs, "cu_seqlens": inputs["cu_seqlens"].long()}
    for other in (spread, offset, wide):
        before = {k: v.clone() for k, v in other.items()}
        assert all(torch.equal(x, y) for x, y in zip(plain, token_advantages(**other, kl_coef=0.1)))
        assert all(torch.equal(v, before[k]) for k, v in other.items())
    halves = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    widened = {k: v.float() if v.is_floating_point() else v for k, v in halves.items()}
    assert all(torch.equal(x, y) for x, y in zip(token_advantages(**halves), token_advantages(**widened)))


def test_ops_are_functional_and_have_fake_kernels():
    x = batch([5, 3])
    lam = torch.full((2,), 0.9, dtype=torch.float64)
    opcheck(
        torch.ops.megappo.token_advantages,
        (
            x["logprob"],
            x["ref_logprob"],
            x["score"],
            x["value"],
            x["response_mask"],
            x["cu_seqlens"],
            None,
            1.0,
            0.9,
            0.8,
            lam,
            None,
            "k1",
            0.1,
            x["value"],
            x["response_mask"],
            x["value"].double(),
            None,
        ),
    )


def test_compiles_without_a_break():
    x = batch([5, 3])
    compiled = torch.compile(lambda **kw: token_advantages(**kw, kl_coef=0.1), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(**x), token_advantages(**x, kl_coef=0.1)))


WRONG = [
    ({"value": torch.zeros(3)}, "logprob .* not one value for each of 3 tokens"),
    ({"value": torch.zeros(2, 4)}, "value .* must be"),
    ({"score": torch.zeros(7)}, "score"),
    ({"score": torch.zeros(2, dtype=torch.long)}, "score must be floating-point"),
    ({"bootstrap": torch.zeros(3)}, "bootstrap"),
    ({"kl_estimator": "k4"}, "k1, k2, k3"),
    ({"response_mask": torch.ones(8)}, "response_mask must be bool"),
    ({"lam_policy": torch.ones(3)}, "lam_policy .* for each of 2 sequences"),
    ({"value": torch.zeros(8, device="meta")}, "logprob is on cpu, value on meta"),
    ({"lam_value": torch.zeros(2, device="meta")}, "lam_value is on meta"),
    ({"cu_seqlens": torch.tensor([0.0, 5.0, 8.0])}, "cu_seqlens .* int32 or int64"),
    ({"cu_seqlens": torch.tensor([], dtype=torch.int32)}, "cu_seqlens"),
    ({"cu_seqlens": torch.tensor([0]), "score": torch.zeros(0), "bootstrap": None}, "names no sequence for 8 tokens"),
    ({"cu_seqlens": torch.tensor([1, 5, 8])}, "goes from 1 to 8, but must go from 0 to the 8 tokens"),
    ({"cu_seqlens": torch.tensor([0, 5, 9])}, "goes from 0 to 9"),
    ({"cu_seqlens": torch.tensor([0, 9, 8])}, "falls from 9 to 8 after entry 1"),
]


@pytest.mark.parametrize("change,text", WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments_are_named(change, text):
    with pytest.raises(ValueError, match=text):
        token_advantages(**{**batch([5, 3]), **change})


# --------------------------------------------------------------------------------------- rewards, steps and traces of tokens


def test_rewards_steps_weights_and_traces_of_tokens_match_the_loop(kernels):
    for names in [*((name,) for name in OF_TOKENS), ("weight", "trace"), OF_TOKENS]:
        check(kernels, with_tokens(batch([31, 33, 0, 64, 1, 150], mask="mixed"), names))


def test_steps_in_sequences_of_any_length_match_the_loop(kernels):
    for lengths in [[1], [0, 4, 0], [], [127, 128, 129], [1] * 20]:
        lam = torch.linspace(0.1, 1.0, len(lengths), dtype=torch.float64)
        check(kernels, with_tokens(batch(lengths, seed=3)), gamma=1.0, lam_policy=lam, lam_value=1.0)


def test_without_a_difference_they_change_no_bit(kernels):
    inputs = on(kernels, batch([40, 1, 90], seed=6))
    plain, nothing = token_advantages(**inputs, kl_coef=0.1), torch.zeros(131, device=kernels)
    one = torch.ones(131, dtype=torch.float64, device=kernels)
    for same in ({"token_reward": nothing}, {"steps": nothing == 0}, {"weight": one}, {"trace": one}):
        assert all(torch.equal(a, b) for a, b in zip(plain, token_advantages(**inputs, kl_coef=0.1, **same))), same.keys()


def test_what_is_no_step_is_read_for_its_reward_alone(kernels):
    clean = with_tokens(batch([5, 8, 3, 70], seed=3))
    mask, step = clean["response_mask"], clean["response_mask"] & clean["steps"]
    dirty = dict(clean)
    for name, kept in (("value", step), ("weight", step), ("trace", step), ("token_reward", mask), ("logprob", mask)):
        dirty[name] = torch.where(kept, clean[name], torch.nan)
    for a, b in zip(token_advantages(**on(kernels, clean)), token_advantages(**on(kernels, dirty))):
        assert torch.equal(a, b)


def test_steps_are_gae_over_the_steps_of_summed_rewards(kernels):
    inputs = with_tokens(batch([40, 70], seed=8, mask="all"), ("token_reward", "steps"))
    inputs["steps"][[0, 40]] = True  # no reward is before the first step
    reward, advantage, returns, _ = (x.cpu() for x in token_advantages(**on(kernels, inputs)))
    of_step = inputs["steps"].long().cumsum(0) - 1
    sums = torch.zeros(int(inputs["steps"].sum()), dtype=torch.float64).index_add_(0, of_step, reward.double())
    summed = torch.zeros(110).masked_scatter(inputs["steps"], sums.float())
    plain = {**inputs, "ref_logprob": None, "score": torch.zeros(2), "token_reward": summed}
    _, *want, _ = token_advantages(**{**plain, "response_mask": inputs["steps"], "steps": None})
    for mine, other in zip((advantage, returns), want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


WRONG_TOKENS = [
    ({"token_reward": torch.zeros(3)}, "token_reward .* for each of 8 tokens"),
    ({"token_reward": torch.zeros(8, dtype=torch.long)}, "token_reward must be floating-point"),
    ({"steps": torch.ones(8)}, "steps must be bool"),
    ({"weight": torch.ones(2)}, "weight .* for each of 8 tokens"),
    ({"trace": torch.ones(8, device="meta")}, "trace is on meta"),
]


@pytest.mark.parametrize("change, text", WRONG_TOKENS, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments_of_tokens_are_named(change, text):
    with pytest.raises(ValueError, match=text):
        token_advantages(**{**batch([5, 3]), **change})


def loses_rewards_between_steps(**kw):
    kept = kw["token_reward"] * kw["steps"]
    return token_advantages(**{**kw, "token_reward": kept})


def traces_by_the_token_before(**kw):
    return token_advantages(**{**kw, "trace": kw["trace"].roll(-1)})


def weighs_what_follows_alone(**kw):
    return token_advantages(**{**kw, "weight": torch.ones_like(kw["weight"]), "trace": kw["trace"] * kw["weight"]})


def decays_at_every_token(**kw):
    return token_advantages(**{**kw, "steps": kw["response_mask"]})


@pytest.mark.parametrize(
    "broken", [loses_rewards_between_steps, traces_by_the_token_before, weighs_what_follows_alone, decays_at_every_token]
)
def test_an_injected_fault_of_tokens_is_noticed(broken):
    inputs = with_tokens(batch([12, 9], seed=4, mask="all"))
    check(CPU, inputs)
    with pytest.raises(AssertionError):
        check(CPU, inputs, call=broken)


# ------------------------------------------------------------------------------------------------------- negative controls


def decays_over_masked_tokens(**kw):
    everything = {**kw, "response_mask": torch.ones_like(kw["response_mask"])}
    mask = kw["response_mask"]
    return tuple(x * mask for x in token_advantages(**everything)[:3]) + (token_advantages(**kw)[3],)


def score_on_the_last_token_of_the_sequence(**kw):
    none = torch.zeros_like(kw["score"])
    reward, _, _, _ = token_advantages(**{**kw, "score": none})
    ends = kw["cu_seqlens"][1:].long() - 1
    reward[ends] += kw["score"] * kw["response_mask"][ends]
    return token_advantages(**{**kw, "ref_logprob": None, "score": none, "token_reward": reward})


def ignores_sequence_borders(**kw):
    total = kw["value"].numel()
    one = {**kw, "cu_seqlens": torch.tensor([0, total]), "score": kw["score"][-1:], "bootstrap": kw["bootstrap"][-1:]}
    return token_advantages(**one)


def one_lambda_for_both(**kw):
    return token_advantages(**{**kw, "lam_value": kw["lam_policy"]})


def moments_of_masked_tokens_too(**kw):
    *outputs, moments = token_advantages(**kw)
    moments[0] = kw["value"].numel()
    return *outputs, moments


@pytest.mark.parametrize(
    "broken",
    [
        decays_over_masked_tokens,
        score_on_the_last_token_of_the_sequence,
        ignores_sequence_borders,
        one_lambda_for_both,
        moments_of_masked_tokens_too,
    ],
)
def test_an_injected_fault_is_noticed(broken):
    inputs = batch([12, 9], seed=4)
    inputs["response_mask"][-1] = False
    check(CPU, inputs)
    with pytest.raises(AssertionError):
        check(CPU, inputs, call=broken)
