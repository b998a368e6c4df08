"""Stage 5 without a critic: each estimator against loops in Python floats, on responses with gaps, cuts and rewards of tokens; and
on three ranks of which one has no sample."""

import math
from dataclasses import replace

import pytest
import torch

from megappo.config import schema
from megappo.config.batch import shared_schedule
from megappo.config.schema import AlgorithmConfig
from megappo.parallel.shares import Shares
from megappo.trainer.advantages import add_advantages
from megappo.trainer.experience.experience import Experience
from megappo.trainer.updates import Counting, left_out_of, mini_batches, order_of_epoch, rejected_of, update_reads
from tests.trainer.multi_turn import GAMMA, GREEDY, GROUP, KL, ON_RANKS, PER_TOKEN, SCORE, TURNS, shaped, whole_batch
from tests.worlds import spawn_world

ESTIMATORS = tuple(name for name, one in schema.ESTIMATORS.items() if not one.has_critic)
COMPARED = tuple(name for name, one in schema.ESTIMATORS.items() if one.compares_groups)


def algorithm(estimator, placement="reward", own=None, **changes):
    keys = {"estimator": {"type": estimator, **(own or {})}, "kl": {"placement": placement}}
    if estimator in ESTIMATORS and schema.ESTIMATORS[estimator].discounts:
        keys["gamma"] = GAMMA
    return AlgorithmConfig.model_validate({**keys, **changes})


def _grpo(asked, own, rewards):
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1))
    return (own - mean) / ((std + 1e-6) if asked.estimator.divide_by_group_std else 1.0)


def _rloo(asked, own, rewards):
    return own - (math.fsum(rewards) - own) / (len(rewards) - 1)


# Advantage of a response by its reward and those of its group, itself included.
COMPARED_BY_HAND = {"grpo": _grpo, "rloo": _rloo}


def by_hand(asked, per_token=None, group=GROUP):
    """(reward, advantage) of all tokens, before whitening."""
    batch, reward, places = whole_batch(), [], []
    cuts = batch.cu_seqlens.tolist()
    for b in range(len(TURNS)):
        sampled = [t for t in range(cuts[b], cuts[b + 1]) if batch["response_mask"][t]]
        kl = [float(batch["logprob"][t]) - float(batch["ref_logprob"][t]) for t in sampled]
        one = [-KL * x if asked.kl.placement == "reward" else 0.0 for x in kl]
        if per_token is not None and per_token[b] is not None:
            one = [a + c for a, c in zip(one, per_token[b], strict=True)]
        if one:
            one[-1] += SCORE[b]
        reward.append(one)
        places.append(sampled)
    whole = [math.fsum(one) if one else SCORE[b] for b, one in enumerate(reward)]
    rewards, advantages = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    for b, one in enumerate(reward):
        of_group = [whole[i] for i in range(len(TURNS)) if group[i] == group[b]]
        for k, t in enumerate(places[b]):
            rewards[t] = one[k]
            if asked.compares_groups:
                advantages[t] = COMPARED_BY_HAND[asked.estimator.type](asked, whole[b], of_group)
            elif asked.estimator.type == "reinforce_plus_plus":
                advantages[t] = math.fsum(x * asked.gamma**j for j, x in enumerate(one[k:]))
            else:
                advantages[t] = math.fsum(one[k:]) - GREEDY[group[b]]
    return rewards, advantages


CASES = [
    *((name, {"placement": placement}) for name in ESTIMATORS for placement in ("none", "reward", "loss")),
    ("grpo", {"own": {"divide_by_group_std": False}}),
]


@pytest.mark.parametrize("estimator, changes", CASES)
def test_advantages_are_those_of_the_loops(estimator, changes):
    for per_token in [None, PER_TOKEN]:
        asked = algorithm(estimator, **changes)
        found, _ = shaped(asked, per_token=per_token)
        reward, advantage = by_hand(asked, per_token)
        torch.testing.assert_close(found["reward"], reward, rtol=0, atol=1e-6)
        torch.testing.assert_close(found["raw_advantage"], advantage, rtol=0, atol=1e-5)


@pytest.mark.parametrize("estimator", schema.ESTIMATORS)
def test_a_teachers_kl_may_join_the_advantages_alone(estimator):
    """After the estimator and whitening; rewards and returns are those without it."""
    batch, plain = whole_batch(), shaped(algorithm(estimator))[0]
    found, _ = shaped(algorithm(estimator, distillation={"placement": "advantage", "coef": 0.7}))
    kl = torch.where(batch["response_mask"], batch["logprob"] - batch["teacher_logprob"], 0.0)
    assert found.keys() == plain.keys() and float(kl.abs().max()) > 0.3
    for name in found:
        want = plain[name] - 0.7 * kl if name in ("advantage", "raw_advantage") else plain[name]
        torch.testing.assert_close(found[name], want, rtol=0, atol=1e-6)


def test_a_teacher_alone_is_the_kl_of_each_token():
    """Two ways to write it: discount 0 of a reward, or beside the advantages of a reward of 0."""
    batch, none = whole_batch(), torch.zeros(len(TURNS))
    want = torch.where(batch["response_mask"], batch["teacher_logprob"] - batch["logprob"], 0.0)
    undiscounted = {"placement": "none", "gamma": 0.0, "whiten_advantages": False, "distillation": {"placement": "reward"}}
    beside = {"placement": "none", "distillation": {"placement": "advantage"}}
    for changes in (undiscounted, beside):
        found = add_advantages(Experience.of_whole(batch), none, 0.0, algorithm("reinforce_plus_plus", **changes)).experience.batch
        torch.testing.assert_close(found["advantage"], want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("estimator", COMPARED)
def test_advantages_of_the_wrong_group_are_noticed(estimator):
    found, _ = shaped(algorithm(estimator))
    _, advantage = by_hand(algorithm(estimator), group=[i // 4 for i in range(len(TURNS))])
    assert (found["raw_advantage"] - advantage).abs().max() > 0.1


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_whitening_is_reinforces_own_and_a_choice_elsewhere(estimator):
    mask = whole_batch()["response_mask"]
    found, _ = shaped(algorithm(estimator))
    assert torch.equal(found["advantage"], found["raw_advantage"]) == (not schema.ESTIMATORS[estimator].whitens)
    whitened, _ = shaped(algorithm(estimator, whiten_advantages=True))
    assert float(whitened["advantage"][mask].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(whitened["advantage"][mask].std()) == pytest.approx(1.0, abs=1e-5)


def test_metrics_of_the_comparison():
    batch = whole_batch()
    assert shaped(algorithm("grpo"))[1] == {"reward/equal_groups": 0.0}
    same = torch.tensor([1.0 if name == 0 else float(i) for i, name in enumerate(GROUP)])
    assert add_advantages(Experience.of_whole(batch), same, KL, algorithm("rloo")).metrics == {"reward/equal_groups": 0.5}
    greedy = sum(GREEDY[name] for name in GROUP) / len(GROUP)
    assert shaped(algorithm("remax"))[1] == {"reward/greedy_score": pytest.approx(greedy)}
    assert shaped(algorithm("reinforce_plus_plus"))[1] == {}


@pytest.mark.parametrize("estimator", COMPARED)
def test_a_sample_without_a_group_is_refused(estimator):
    batch = whole_batch()
    alone = replace(batch, sequence_fields={"truncated": batch["truncated"]})
    with pytest.raises(AssertionError, match="without a group"):
        add_advantages(Experience.of_whole(alone), torch.tensor(SCORE), KL, algorithm(estimator))


# ------------------------------------------------------------------------------------------------------- tokens reweighted


def plain_advantages(**changes):
    """Of REINFORCE++, which differ between the tokens of a response."""
    return shaped(algorithm("reinforce_plus_plus", **changes))


def responses():
    batch = whole_batch()
    cuts = batch.cu_seqlens.tolist()
    for begin, end in zip(cuts, cuts[1:]):
        yield [t for t in range(begin, end) if batch["response_mask"][t]]


def test_advantages_of_sequences_are_means_over_sampled_tokens():
    found, _ = plain_advantages(loss={"type": "gspo", "sequence_advantages": True})
    plain, _ = plain_advantages()
    want = torch.zeros_like(plain["advantage"])
    for places in responses():
        for t in places:
            want[t] = math.fsum(float(plain["advantage"][s]) for s in places) / len(places)
    torch.testing.assert_close(found["advantage"], want, rtol=0, atol=1e-6)
    assert torch.equal(found["raw_advantage"], plain["raw_advantage"]) and (want - plain["advantage"]).abs().max() > 0.1


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_correction_weighs_the_gradient_by_the_samplers_log_probs(level):
    batch = whole_batch()
    found, metrics = plain_advantages(importance_sampling={"type": "mis", "level": level, "high": 1.2})
    plain, _ = plain_advantages()
    want, weights = torch.zeros_like(plain["advantage"]), []
    for places in responses():
        each = {t: float(batch["logprob"][t]) - float(batch["rollout_logprob"][t]) for t in places}
        for t in places:
            whole = math.fsum(each.values())
            ratio = math.exp({"token": each[t], "sequence": whole, "geometric": whole / len(places)}[level])
            weights.append(ratio if ratio <= 1.2 else 0.0)
            want[t] = plain["advantage"][t] * weights[-1]
    torch.testing.assert_close(found["advantage"], want, rtol=1e-5, atol=1e-6)
    assert metrics["policy/correction_mean"] == pytest.approx(sum(weights) / len(weights))
    assert metrics["policy/correction_cut"] == pytest.approx(weights.count(0.0) / len(weights)) and 0 < weights.count(0.0) < len(
        weights
    )
    assert metrics["policy/correction_max"] > 1.2


def test_high_entropy_tokens_alone_are_trained_on():
    batch = whole_batch()
    found, metrics = plain_advantages(high_entropy_token_ratio=0.3)
    plain, _ = plain_advantages()
    sampled = [t for places in responses() for t in places]
    highest = sorted(sampled, key=lambda t: float(batch["entropy"][t]))[-math.ceil(0.3 * len(sampled)) :]
    kept = torch.zeros(batch.num_tokens, dtype=torch.bool)
    kept[highest] = True
    assert torch.equal(found["advantage"], torch.where(kept, plain["advantage"], 0.0))
    assert metrics["policy/high_entropy_threshold"] == min(float(batch["entropy"][t]) for t in highest)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length"])
def test_cut_responses_count_neither_in_the_loss_nor_in_its_denominator(mode):
    asked = algorithm("rloo", mask_truncated=True, loss_aggregation=mode, mini_batch_size=4)
    experience, alone = Experience.of_whole(whole_batch()), Shares.of_ranks([0])
    assert left_out_of("critic", experience.table, asked) is None
    left_out = left_out_of("policy", experience.table, asked)
    counts = {tokens: sum(s for _, s in turns) for tokens, turns in zip(range(len(TURNS)), TURNS)}
    seen = 0
    minis = mini_batches(experience, alone, None, shared_schedule(asked), 9, 7, Counting(left_out))
    for chosen, mini in zip(order_of_epoch(experience.table.num_samples, 7).split(4), minis, strict=True):
        lengths = [0 if i % 2 else counts[i] for i in chosen.tolist()]  # every other response is cut
        sequences = sum(n > 0 for n in lengths)
        want = {"token-mean": sum(lengths), "fixed-length": 9 * sequences}.get(mode, sequences)
        assert mini.denominator == max(want, 1)
        weights = mini.share["weight"].split(mini.share.lengths.tolist())
        for n, weight in zip(lengths, weights, strict=True):
            assert int((weight != 0).sum()) == n
            assert float(weight.sum()) == pytest.approx(n if mode != "seq-mean-token-mean" else min(n, 1))
        seen += sum(lengths)
    assert 0 < seen < sum(counts.values())


@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length"])
def test_rejected_tokens_leave_the_denominator_if_asked(mode, mask_truncated):
    """icepop by loops: weights of the kept tokens alone, counts of them alone. With `count_rejected` they stay in both."""
    batch, bounds = whole_batch(), {"type": "icepop", "low": 0.8, "high": 1.2}
    ratio = [math.exp(float(new) - float(old)) for new, old in zip(batch["logprob"], batch["rollout_logprob"])]
    sampled = [len(places) for places in responses()]
    kept = [sum(bounds["low"] <= ratio[t] <= bounds["high"] for t in places) for places in responses()]
    changes = {"mask_truncated": mask_truncated, "loss_aggregation": mode, "mini_batch_size": 4}
    denominators: dict[bool, list[float]] = {}
    for counts_all in (False, True):
        asked = algorithm("rloo", importance_sampling={**bounds, "count_rejected": counts_all}, **changes)
        experience = add_advantages(Experience.of_whole(batch), torch.tensor(SCORE), KL, asked).experience
        rejected, left_out = (None if counts_all else rejected_of(experience)), left_out_of("policy", experience.table, asked)
        assert ("rejected" in update_reads("policy", asked)) == (not counts_all) and "rejected" not in update_reads("critic", asked)
        denominators[counts_all] = []
        minis = mini_batches(experience, Shares.of_ranks([0]), None, shared_schedule(asked), 9, 7, Counting(left_out, rejected))
        for chosen, mini in zip(order_of_epoch(experience.table.num_samples, 7).split(4), minis, strict=True):
            counted = sampled if counts_all else kept
            sizes = [0 if mask_truncated and i % 2 else counted[i] for i in chosen.tolist()]
            sequences = sum(n > 0 for n in sizes)
            want = {"token-mean": sum(sizes), "fixed-length": 9 * sequences}.get(mode, sequences)
            assert mini.denominator == max(want, 1)
            for n, weight in zip(sizes, mini.share["weight"].split(mini.share.lengths.tolist()), strict=True):
                each = 1 / max(n, 1) if mode == "seq-mean-token-mean" else 1.0
                assert weight[weight != 0].tolist() == pytest.approx([each] * n)
            if not counts_all:
                assert not mini.share["weight"][mini.share["rejected"]].any() and mini.share["rejected"].any()
            denominators[counts_all].append(mini.denominator)
    if mode == "token-mean":
        assert all(few < all_ for few, all_ in zip(*denominators.values())), "the case rejects some of each mini-batch"


ON_THREE_RANKS = [
    *(algorithm(name) for name in ESTIMATORS),
    algorithm("rloo", high_entropy_token_ratio=0.3),
    algorithm("grpo", importance_sampling={"type": "icepop", "low": 0.8, "high": 1.2, "count_rejected": False}),
    algorithm(
        "remax", importance_sampling={"type": "tis", "level": "geometric"}, loss={"type": "gspo", "sequence_advantages": True}
    ),  # with a critic: oracles in test_critic_estimators.py
    algorithm("vtrace", gamma=GAMMA, bootstrap_truncated=True),
    algorithm("gae", own={"level": "turn"}, gamma=GAMMA, lam_length_alpha=0.5, bootstrap_truncated="last"),
]


def shape_all(rank):
    return [shaped(asked, ON_RANKS, PER_TOKEN) for asked in ON_THREE_RANKS]


def test_three_ranks_of_which_one_has_nothing_give_the_numbers_of_one():
    ranks = spawn_world(shape_all, 3)
    for of_rank in ranks:
        for asked, (found, metrics) in zip(ON_THREE_RANKS, of_rank, strict=True):
            alone, figures = shaped(asked, per_token=PER_TOKEN)
            # whitening sums in another order
            tolerance = 1e-6 if asked.whitens else 0.0
            assert all((found[name] - alone[name]).abs().max() <= tolerance for name in alone), asked
            assert metrics == pytest.approx(figures)
