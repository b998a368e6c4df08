"""GSPO, CISPO and DIS against their papers' formulas in loops of Python floats, with gradients; the k-th largest of several ranks.

Derived by hand from the papers, as in verl 0.8.0.dev (`core_algos.compute_policy_loss_gspo`, `compute_policy_loss_cispo`), TRL
1.10.0.dev0 (`importance_sampling_level: sequence`; its `cispo` has no lower bound) and NeMo-RL 0.6.0
(`sequence_level_importance_ratios`): all take the mean of the token log-ratios under the mask. DIS is that of GLM-5
(arXiv:2602.15763) and SAO (arXiv:2607.07508).
"""

import math
import random

import pytest
import torch

from megappo.algo.aggregation import token_weights
from megappo.algo.importance_sampling import kth_largest
from megappo.algo.objectives import cispo_loss, dis_loss, sequence_log_ratio
from megappo.config.schema import AlgorithmConfig
from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.trainer.roles import fields_of_sequences, surrogate

# Lengths of the sequences, one empty and one without a sampled token; gaps in the masks.
LENGTHS = [5, 0, 7, 2, 9, 3]
MASKS = [[0, 1, 1, 0, 1], [], [0, 0, 1, 1, 1, 0, 1], [0, 0], [1, 0, 0, 1, 1, 1, 1, 0, 1], [0, 0, 1]]
CLIP = {"clip_low": 0.1, "clip_high": 0.15}


def case(seed, per_token_advantages=False):
    """(logprob, old, advantage, mask, cu_seqlens); NaN where the mask is false."""
    draw = random.Random(seed)
    mask = torch.tensor([bool(flag) for one in MASKS for flag in one])
    old = torch.tensor([-draw.random() - 0.1 for _ in range(len(mask))])
    logprob = old + torch.tensor([draw.gauss(0, 0.3) for _ in range(len(mask))])
    advantage = torch.tensor([a if not per_token_advantages else draw.gauss(0, 1) for n in LENGTHS for a in [draw.gauss(0, 1)] * n])
    nan = torch.full((len(mask),), torch.nan)
    logprob, old, advantage = (torch.where(mask, x, nan) for x in (logprob, old, advantage))
    return logprob, old, advantage, mask, cu_seqlens_of(LENGTHS)


def sequences(mask):
    start = 0
    for length in LENGTHS:
        yield [t for t in range(start, start + length) if mask[t]]
        start += length


def gspo_by_hand(logprob, old, advantage, mask, clip_low, clip_high):
    """(loss, gradient): mean over responses of -min(s A, clip(s) A), by eq. 5 and 10 of the paper, one response at a time."""
    loss, gradient, count = 0.0, [0.0] * len(mask), sum(1 for places in sequences(mask) if places)
    for places in sequences(mask):
        if not places:
            continue
        s = math.exp(math.fsum(float(logprob[t]) - float(old[t]) for t in places) / len(places))
        for t in places:  # the advantage is one number of the response, or GSPO-token's
            a, clipped = float(advantage[t]), min(max(s, 1 - clip_low), 1 + clip_high)
            loss -= min(s * a, clipped * a) / len(places) / count
            if s * a <= clipped * a:
                gradient[t] -= s * a / len(places) / count
    return loss, gradient


def cispo_by_hand(logprob, old, advantage, mask, clip_low, clip_high):
    tokens = [t for places in sequences(mask) for t in places]
    loss, gradient = 0.0, [0.0] * len(mask)
    for t in tokens:
        r = math.exp(float(logprob[t]) - float(old[t]))
        w = min(max(r, 1 - clip_low), 1 + clip_high) * float(advantage[t]) / len(tokens)
        loss -= w * float(logprob[t])
        gradient[t] = -w
    return loss, gradient


BOUNDS = {"low": 0.8, "high": 1.25}


def dis_by_hand(logprob, rollout, advantage, mask, low, high):
    """(loss, gradient): mean over sampled tokens of -f(r) A log pi, f(r) without gradient; r in bounds or the token has none."""
    tokens = [t for places in sequences(mask) for t in places]
    loss, gradient = 0.0, [0.0] * len(mask)
    for t in tokens:
        r = math.exp(float(logprob[t]) - float(rollout[t]))
        if not low < r < high:
            continue
        loss -= r * float(advantage[t]) * float(logprob[t]) / len(tokens)
        gradient[t] = -r * float(advantage[t]) / len(tokens)
    return loss, gradient


def found(objective, batch, aggregation, **changes):
    """(loss, gradient, metrics) of the trainer's surrogate; the field of log-probs that it does not read is NaN."""
    logprob, old, advantage, mask, cu = batch
    settings = BOUNDS if objective == "dis" else CLIP
    algorithm = AlgorithmConfig(loss={"type": objective, **settings, **changes})
    weight, count = token_weights(aggregation, mask, cu)
    leaf = logprob.clone().requires_grad_()
    nan = torch.full_like(old, torch.nan)
    fields = {"logprob": nan, "rollout_logprob": nan, "advantage": advantage, "weight": weight} | {algorithm.old_logprob: old}
    if objective == "gspo":
        fields |= fields_of_sequences(algorithm, PackedBatch(torch.arange(len(mask)), cu), fields, leaf)
    loss, metrics = surrogate(algorithm, fields, leaf)
    (loss / count).backward()
    return float(loss.detach()) / count, leaf.grad, metrics


@pytest.mark.parametrize("per_token", [False, True], ids=["one advantage", "gspo-token"])
@pytest.mark.parametrize("seed", range(4))
def test_gspo_is_the_papers(seed, per_token):
    batch = case(seed, per_token)
    loss, gradient, metrics = found("gspo", batch, "seq-mean-token-mean")
    want, wanted = gspo_by_hand(*batch[:4], **CLIP)
    assert loss == pytest.approx(want, abs=1e-5)
    torch.testing.assert_close(gradient, torch.tensor(wanted), rtol=1e-4, atol=1e-6)
    assert float(metrics["tokens_sum"]) == int(batch[3].sum())
    cut = float(metrics["clip_low_sum"] + metrics["clip_high_sum"])
    assert cut == sum(g == 0.0 for g, m in zip(wanted, batch[3]) if m), "whole responses, not tokens, are cut"


def test_cases_cut_some_responses_and_not_others():
    shares = [sum(g == 0.0 for g, m in zip(gspo_by_hand(*case(seed)[:4], **CLIP)[1], case(seed)[3]) if m) for seed in range(4)]
    assert any(shares) and not all(share == int(case(0)[3].sum()) for share in shares)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("clip_low", [0.1, 1.0])
def test_cispo_is_the_papers(seed, clip_low):
    batch = case(seed, per_token_advantages=True)
    loss, gradient, metrics = found("cispo", batch, "token-mean", clip_low=clip_low)
    want, wanted = cispo_by_hand(*batch[:4], clip_low, CLIP["clip_high"])
    assert loss == pytest.approx(want, abs=1e-5)
    torch.testing.assert_close(gradient, torch.tensor(wanted), rtol=1e-4, atol=1e-6)
    assert (float(metrics["clip_low_sum"]) == 0) == (clip_low == 1.0) and float(metrics["clip_high_sum"]) > 0
    assert all(g != 0 for g, m in zip(wanted, batch[3]) if m), "no token is left out"


@pytest.mark.parametrize("seed", range(4))
def test_dis_is_the_papers(seed):
    batch = case(seed, per_token_advantages=True)
    loss, gradient, metrics = found("dis", batch, "token-mean")
    want, wanted = dis_by_hand(*batch[:4], **BOUNDS)
    assert loss == pytest.approx(want, abs=1e-5)
    torch.testing.assert_close(gradient, torch.tensor(wanted), rtol=1e-4, atol=1e-6)
    ratios = [math.exp(float(new) - float(old)) for new, old, m in zip(*batch[:2], batch[3]) if m]
    assert float(metrics["clip_low_sum"]) == sum(r < BOUNDS["low"] for r in ratios)
    assert float(metrics["clip_high_sum"]) == sum(r > BOUNDS["high"] for r in ratios)
    assert float(metrics["ratio_max"]) == pytest.approx(max(ratios), rel=1e-5)


def test_dis_leaves_out_tokens_on_both_sides_whatever_the_advantage():
    """PPO's clip, in contrast, keeps the gradient of those that it would bring back."""
    batches = [case(seed, per_token_advantages=True) for seed in range(4)]
    kinds = {
        (r < 1, a > 0)
        for logprob, old, advantage, mask, _ in batches
        for r, a in zip((logprob - old).exp()[mask].tolist(), advantage[mask].tolist())
        if not BOUNDS["low"] < r < BOUNDS["high"]
    }
    assert kinds == {(below, positive) for below in (True, False) for positive in (True, False)}, "every case is there"
    clipped = {"clip_low": 1 - BOUNDS["low"], "clip_high": BOUNDS["high"] - 1, "proximal": "behaviour"}
    for batch in batches:
        masked, ppo = (found(kind, batch, "token-mean", **more)[1][batch[3]] for kind, more in (("dis", {}), ("ppo", clipped)))
        assert int((masked == 0).sum()) > int((ppo == 0).sum()), "the same ratio, more tokens left out"
        both = (masked != 0) & (ppo != 0)
        torch.testing.assert_close(masked[both], ppo[both])  # inside the bounds it is the importance-weighted gradient


def test_the_bounds_themselves_are_outside():
    """f(x) = x for low < x < high: a ratio of 0.5 or 2, exact in binary, is left out by bounds of 0.5 and 2."""
    old = torch.zeros(3, dtype=torch.float64)
    logprob = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64).log().requires_grad_()
    assert logprob.detach().exp().tolist() == [0.5, 1.0, 2.0]
    loss, metrics = dis_loss(logprob, old, torch.ones_like(old), torch.ones_like(old), 0.5, 2.0)
    loss.backward()
    assert logprob.grad.tolist() == [0.0, -1.0, 0.0]
    assert (float(metrics["clip_low_sum"]), float(metrics["clip_high_sum"])) == (1, 1)


@pytest.mark.parametrize(
    "objective, changes", [*((name, {"proximal": "behaviour"}) for name in ("ppo", "gspo", "cispo")), ("dis", {})]
)
def test_a_ratio_to_the_proximal_policy_in_place_of_the_samplers_is_noticed(objective, changes):
    """Negative control: the other field of log-probs is NaN in `found`, and another policy's gives another gradient."""
    logprob, rollout, advantage, mask, cu = case(2)
    proximal = torch.where(mask, rollout + 0.05, torch.nan)
    gradients = []
    for old in (rollout, proximal):
        _, gradient, metrics = found(objective, (logprob, old, advantage, mask, cu), "seq-mean-token-mean", **changes)
        assert gradient[mask].isfinite().all() and math.isfinite(float(metrics["approx_kl_sum"]))
        gradients.append(gradient)
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3


def test_at_the_sampling_policy_all_objectives_have_one_gradient():
    """The ratio is 1 there: minus weight times advantage, whatever the clip."""
    logprob, old, advantage, mask, cu = case(0)
    on_policy = (old, old, advantage, mask, cu)
    asked = [("ppo", {}), ("gspo", {}), ("cispo", {}), ("dis", {}), ("ppo", {"proximal": "behaviour"})]
    gradients = [found(name, on_policy, "seq-mean-token-mean", **changes)[1] for name, changes in asked]
    assert all(torch.allclose(gradients[0], other, atol=1e-7) for other in gradients[1:])
    assert gradients[0][mask].abs().min() > 0 and not gradients[0][~mask].any()


def test_the_ratio_of_the_wrong_sequence_is_noticed():
    """Negative control: borders moved by one sequence, and a ratio over all tokens, the masked ones too."""
    logprob, old, advantage, mask, cu = case(1)
    weight = mask.float()
    right = sequence_log_ratio(logprob, old, weight, cu)
    moved = sequence_log_ratio(logprob, old, weight, cu_seqlens_of([LENGTHS[-1], *LENGTHS[:-1]]))
    assert (right - moved).abs().max() > 1e-2
    filled = torch.nan_to_num(logprob), torch.nan_to_num(old)
    assert (right - torch.where(mask, sequence_log_ratio(*filled, torch.ones_like(weight), cu), 0.0)).abs().max() > 1e-2


def test_tokens_of_a_sequence_have_the_same_ratio_to_the_bit():
    """Else some tokens of a response near a clip range of 3e-4 would be cut and others not."""
    logprob, old, _, mask, cu = case(2)
    far = 100.0 * torch.rand(len(mask), generator=torch.Generator().manual_seed(0))  # log-probs whose fp32 steps are 1e-5
    ratios = sequence_log_ratio(logprob - far, old - far, mask.float(), cu)
    assert all(len({float(ratios[t]) for t in places}) <= 1 for places in sequences(mask))


@pytest.mark.parametrize("cap", [0.0, 1.0])
def test_tokens_without_weight_count_nowhere_even_if_nan(cap):
    logprob, old, advantage, mask, _ = case(3)
    for surrogate_of, bounds in ((cispo_loss, (0.2, 0.2)), (dis_loss, (0.8, 1.2))):
        loss, metrics = surrogate_of(logprob, old, advantage, mask.float() * cap, *bounds)
        assert math.isfinite(float(loss)) and float(metrics["tokens_sum"]) == cap * int(mask.sum())


# ------------------------------------------------------------------------------------------------------------ k-th largest


def shares_of(values, parts):
    """What each rank would add, for one process: every exchange is the sum over the parts."""
    cut = list(values.split(-(-len(values) // parts))) if len(values) else []
    return cut + [values[:0]] * (parts - len(cut))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("parts", [1, 3])
def test_the_kth_largest_is_that_of_a_sort(seed, parts):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(200, generator=generator) * torch.tensor([1e-6, 1.0, 12.0])[torch.randint(3, (200,), generator=generator)]
    values[:20] = values[20]  # ties
    values[30:33] = 0.0
    for k in (1, 2, 17, 100, 199, 200):
        assert kth_of_ranks(shares_of(values, parts), k) == float(values.sort(descending=True).values[k - 1])


def kth_of_ranks(parts, k):
    """Run the ranks in lockstep, as threads would: each takes its turn in every exchange."""
    import threading

    barrier, counts, results = threading.Barrier(len(parts)), {}, [0.0] * len(parts)

    def run(rank):
        def add(mine):
            counts[rank] = mine
            barrier.wait()
            summed = torch.stack([counts[i] for i in range(len(parts))]).sum(0)
            barrier.wait()
            return summed

        results[rank] = kth_largest(parts[rank], k, add)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(set(results)) == 1, "every rank has the same"
    return results[0]


def test_fewer_values_than_k_choose_none():
    assert kth_largest(torch.tensor([1.0]), 2, lambda counts: counts) == math.inf
    assert kth_largest(torch.empty(0), 1, lambda counts: counts) == math.inf
