"""Stage 5 with a critic beyond plain GAE - turns as steps, V-trace, cut responses that go on with their last value - against loops
in Python floats, on responses with gaps, cuts and rewards of tokens; and the critic's loss over turns. Several ranks:
test_estimators.py."""

import math

import pytest
import torch

from megappo.config.batch import UpdateSchedule
from megappo.config.schema import AlgorithmConfig
from megappo.parallel.shares import Shares
from megappo.trainer.advantages import add_advantages
from megappo.trainer.experience.experience import Experience
from megappo.trainer.updates import Counting, mini_batches, order_of_epoch, targets_of, update_reads
from tests.trainer.multi_turn import GAMMA, KL, PER_TOKEN, SCORE, TURNS, shaped, whole_batch

BY_TURNS = {"type": "gae", "level": "turn"}


def algorithm(placement="reward", **changes):
    plain = {"gamma": GAMMA, "lam": 0.8, "whiten_advantages": False}
    return AlgorithmConfig(kl={"placement": placement}, **(plain | changes))


def turns():
    """Positions of each turn, for each sample."""
    found, start = [], 0
    for sample in TURNS:
        found.append([])
        for given, sampled in sample:
            found[-1].append(list(range(start + given, start + given + sampled)))
            start += given + sampled
        found[-1] = [turn for turn in found[-1] if turn]
    return found


def rewards_by_hand(asked, per_token):
    """[T], as fp64 lists."""
    batch = whole_batch()
    reward = [0.0] * batch.num_tokens
    for b, sample in enumerate(turns()):
        places = [t for turn in sample for t in turn]
        for k, t in enumerate(places):
            kl = float(batch["logprob"][t]) - float(batch["ref_logprob"][t])
            of_token = 0.0 if per_token is None or per_token[b] is None else per_token[b][k]
            score = SCORE[b] if k == len(places) - 1 else 0.0
            reward[t] = (-KL * kl if asked.kl.placement == "reward" else 0.0) + of_token + score
    return reward


def by_hand(asked, per_token=None):
    """(reward, advantage, returns): the recurrence from the last step of each response to its first."""
    batch, reward = whole_batch(), rewards_by_hand(asked, per_token)
    advantage, returns = [0.0] * batch.num_tokens, [0.0] * batch.num_tokens
    for b, sample in enumerate(turns()):
        steps = sample if asked.by_turns else [[t] for turn in sample for t in turn]
        alpha = asked.lam_length_alpha
        lams = (
            asked.lam if alpha is None else max(0.0, 1 - 1 / (alpha * max(1, len(steps)))),
            asked.lam if asked.lam_value is None else asked.lam_value,
        )
        values = [float(batch["value"][step[0]]) for step in steps]
        after = 0.0
        if batch["truncated"][b] and asked.bootstrap_truncated:
            after = values[-1] if asked.bootstrap_truncated == "last" else float(batch["bootstrap"][b])
        carried = [0.0, 0.0]  # v_t - V_t of the step after, under the policy's and the critic's lambda
        for k in reversed(range(len(steps))):
            rho = c = 1.0
            if asked.estimator.type == "vtrace":
                (t,) = steps[k]
                ratio = math.exp(float(batch["logprob"][t]) - float(batch["rollout_logprob"][t]))
                rho, c = min(asked.estimator.rho_bar, ratio), min(asked.estimator.c_bar, ratio)
            delta = math.fsum(reward[t] for t in steps[k]) + asked.gamma * after - values[k]
            for t in steps[k]:
                advantage[t] = rho * (delta + asked.gamma * lams[0] * carried[0])
            carried = [rho * delta + asked.gamma * lam * c * x for lam, x in zip(lams, carried)]
            for t in steps[k]:
                returns[t] = values[k] + carried[1]
            after = values[k]
    return tuple(torch.tensor(x) for x in (reward, advantage, returns))


def error(found, wanted):
    names = ("reward", "raw_advantage", "returns")
    return max(float((found[name] - want).abs().max()) for name, want in zip(names, wanted, strict=True))


CASES = [
    {"bootstrap_truncated": "last"},
    *({"estimator": BY_TURNS, "bootstrap_truncated": kind} for kind in (False, True, "last")),
    {"estimator": BY_TURNS, "placement": "none", "lam_value": 1.0, "gamma": 1.0},
    {"estimator": BY_TURNS, "lam_value": 0.95, "lam_length_alpha": 0.5, "bootstrap_truncated": True},
    {"estimator": {"type": "vtrace"}},
    {"estimator": {"type": "vtrace", "rho_bar": 1.5, "c_bar": 0.8}, "lam_value": 1.0, "bootstrap_truncated": True},
    {"estimator": {"type": "vtrace"}, "placement": "loss", "lam_length_alpha": 0.5, "bootstrap_truncated": "last"},
]


@pytest.mark.parametrize("per_token", [None, PER_TOKEN], ids=["score", "per token"])
@pytest.mark.parametrize("changes", CASES, ids=range(len(CASES)))
def test_advantages_and_returns_are_those_of_the_loops(changes, per_token):
    asked = algorithm(**changes)
    found, _ = shaped(asked, per_token=per_token)
    assert error(found, by_hand(asked, per_token)) < 1e-5


BROKEN = [
    (CASES[0], {"bootstrap_truncated": True}),
    (CASES[0], {"bootstrap_truncated": False}),
    (CASES[3], {"estimator": {"type": "gae"}}),
    (CASES[3], {"gamma": 0.99}),
    (CASES[5], {"lam_length_alpha": None}),
    (CASES[5], {"lam_value": None}),
    (CASES[7], {"estimator": {"type": "gae"}}),
    (CASES[7], {"estimator": {"type": "vtrace", "rho_bar": 1.0, "c_bar": 0.8}}),
    (CASES[7], {"estimator": {"type": "vtrace", "rho_bar": 1.5, "c_bar": 1.0}}),
]


@pytest.mark.parametrize("wanted, broken", BROKEN, ids=range(len(BROKEN)))
def test_a_setting_that_is_ignored_is_noticed(wanted, broken):
    found, _ = shaped(algorithm(**(wanted | broken)))
    assert error(found, by_hand(algorithm(**wanted))) > 1e-2


def test_whitening_of_turns_counts_tokens():
    found, _ = shaped(algorithm(estimator=BY_TURNS, whiten_advantages=True))
    kept = found["raw_advantage"][whole_batch()["response_mask"]].double()
    want = (kept - kept.mean()) / kept.std()
    torch.testing.assert_close(found["advantage"][whole_batch()["response_mask"]].double(), want, rtol=1e-5, atol=1e-5)


def test_figures_of_the_ratios_of_vtrace():
    batch = whole_batch()
    places = [t for sample in turns() for turn in sample for t in turn]
    ratios = [math.exp(float(batch["logprob"][t]) - float(batch["rollout_logprob"][t])) for t in places]
    _, metrics = shaped(algorithm(estimator={"type": "vtrace", "rho_bar": 1.2}))
    assert metrics == {
        "policy/correction_mean": pytest.approx(sum(min(x, 1.2) for x in ratios) / len(ratios)),
        "policy/correction_cut": pytest.approx(sum(x > 1.2 for x in ratios) / len(ratios)),
        "policy/correction_max": pytest.approx(max(ratios)),
    }


@pytest.mark.parametrize("changes", [{"estimator": BY_TURNS}, {"estimator": {"type": "vtrace"}}, {"bootstrap_truncated": "last"}])
def test_a_step_without_a_sampled_token_is_zero_and_not_nan(changes):
    batch = whole_batch()
    batch = batch.with_fields({"response_mask": torch.zeros_like(batch["response_mask"])})
    found = add_advantages(Experience.of_whole(batch), torch.tensor(SCORE), KL, algorithm(**changes)).experience.batch
    assert all(not found[name].any() for name in ("reward", "advantage", "raw_advantage", "returns"))


# ------------------------------------------------------------------------------------------------------ the critic's targets


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length"])
def test_the_critic_learns_at_the_first_tokens_of_turns_and_the_policy_at_all(mode):
    asked = algorithm(estimator=BY_TURNS)
    experience = add_advantages(Experience.of_whole(whole_batch()), torch.tensor(SCORE), KL, asked).experience
    assert targets_of("policy", experience) is None and "value_mask" not in update_reads("policy", asked)
    targets, schedule = targets_of("critic", experience), UpdateSchedule(1, 4, mode)
    assert targets is not None and targets.field in update_reads("critic", asked)
    minis = mini_batches(experience, Shares.of_ranks([0]), None, schedule, 9, 7, Counting(targets=targets))
    for chosen, mini in zip(order_of_epoch(experience.table.num_samples, 7).split(4), minis, strict=True):
        samples = [turns()[i] for i in chosen.tolist()]
        learning = sum(bool(sample) for sample in samples)
        count = {"token-mean": sum(map(len, samples)), "fixed-length": 9 * learning}.get(mode, learning)
        assert mini.denominator == count
        begin = 0
        for i, sample in zip(chosen.tolist(), samples, strict=True):
            length = sum(map(sum, TURNS[i]))
            first = [turn[0] - sum(sum(map(sum, one)) for one in TURNS[:i]) for turn in sample]
            weight = mini.share["weight"][begin : begin + length]
            assert weight.nonzero().flatten().tolist() == first
            each = 1 / max(1, len(first)) if mode == "seq-mean-token-mean" else 1.0
            assert weight[first].tolist() == pytest.approx([each] * len(first))
            begin += length


def test_without_turns_the_critic_learns_at_every_sampled_token():
    experience = add_advantages(Experience.of_whole(whole_batch()), torch.tensor(SCORE), KL, algorithm()).experience
    assert targets_of("critic", experience) is None and "value_mask" not in experience.batch
