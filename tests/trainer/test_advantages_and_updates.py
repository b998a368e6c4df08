"""Stages of a step that need no model: requests, scores, agreement with the sampler, shaped rewards, mini-batches, updates."""

import hashlib
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist

from megappo.commands.generate.answer import Texts, answer
from megappo.config.batch import UpdateSchedule
from megappo.config.reward_sections import LengthPenaltyConfig, RewardConfig, RewardPart
from megappo.config.role_sections import CriticConfig, PolicyConfig
from megappo.config.schema import AlgorithmConfig, DataConfig, MISConfig, NoImportanceSamplingConfig, TrainConfig
from megappo.data.packing import PackedBatch, Ragged, cu_seqlens_of
from megappo.data.prompts import Prompt
from megappo.data.token_texts import response_text
from megappo.engine.base import PassResult, StepResult
from megappo.parallel.shares import Shares
from megappo.rewards.base import RewardError, RewardInput
from megappo.rollout.megatron_engine import truncated_logprobs
from megappo.rollout.types import Response, SamplingParams
from megappo.trainer.advantages import advantages_of
from megappo.trainer.build_roles import Roles
from megappo.trainer.experience.collect import make_requests, pack_experience, sample_seed
from megappo.trainer.prepare.reward_parts import load_parts
from megappo.trainer.roles import UpdateResult
from megappo.trainer.sampler_check import Agreement, SamplerMismatch, compare_with_sampler, require_agreement
from megappo.trainer.sampling import scorer_of
from megappo.trainer.updates import UpdateResult, Updates, first_epoch, mini_batches, run_updates
from tests.rewards.samples import scorer_with, scores
from tests.rollout.responses import answered, kept_of, segment
from tests.trainer.experiences import dealt, score

# (prompt tokens, sampled tokens, cut by the length limit); the second response was never started
SAMPLES = [(2, 3, False), (3, 0, False), (1, 4, True), (2, 1, False), (1, 2, True)]


def experience():
    """A packed batch with every field that shaping reads; numbers in no relation to each other."""
    generator = torch.Generator().manual_seed(5)
    lengths = [prompt + sampled for prompt, sampled, _ in SAMPLES]
    mask = torch.tensor([place >= prompt for prompt, sampled, _ in SAMPLES for place in range(prompt + sampled)])
    fields = {name: torch.randn(sum(lengths), generator=generator) for name in ("logprob", "ref_logprob", "value")}
    return PackedBatch(
        tokens=torch.arange(sum(lengths)),
        cu_seqlens=cu_seqlens_of(lengths),
        token_fields={"response_mask": mask, **fields},
        sequence_fields={
            "truncated": torch.tensor([cut for _, _, cut in SAMPLES]),
            "bootstrap": torch.randn(5, generator=generator),
        },
    )


SCORE = torch.tensor([1.0, 7.0, -0.5, 0.25, 2.0])


def algorithm(placement="none", estimator="k1", **changes):
    """Without whitening, and with the KL nowhere unless it is placed."""
    plain = {"gamma": 0.9, "lam": 0.8, "whiten_advantages": False}
    return AlgorithmConfig(
        kl={"placement": placement, **({"estimator": estimator} if placement == "reward" else {})}, **(plain | changes)
    )


def shaped_by_hand(batch, algorithm, kl_coef, per_token=None):
    """(reward, advantage, returns) as lists: the recurrences of the papers, token by token from the end, in Python floats."""
    reward, advantage, returns = ([0.0] * batch.num_tokens for _ in range(3))
    start = 0
    for b, (prompt, sampled, cut) in enumerate(SAMPLES):
        places = range(start + prompt, start + prompt + sampled)
        for t in places:
            kl = float(batch["logprob"][t]) - float(batch["ref_logprob"][t])
            kl = {"k1": kl, "k2": kl * kl / 2, "k3": math.exp(-kl) - 1 + kl}[algorithm.kl.estimator]
            reward[t] = (-kl_coef * kl if algorithm.kl.placement == "reward" else 0.0) + (
                float(SCORE[b]) if t == places[-1] else 0.0
            )
            if per_token is not None and per_token[b] is not None:
                reward[t] += per_token[b][t - places[0]]
        alpha = algorithm.lam_length_alpha
        lam_policy = algorithm.lam if alpha is None else max(0.0, 1 - 1 / (alpha * max(1, sampled)))
        lam_value = algorithm.lam if algorithm.lam_value is None else algorithm.lam_value
        for out, lam, base in ((advantage, lam_policy, 0.0), (returns, lam_value, 1.0)):
            after, carried = float(batch["bootstrap"][b]) if algorithm.bootstrap_truncated and cut else 0.0, 0.0
            for t in reversed(places):
                value = float(batch["value"][t])
                carried = reward[t] + algorithm.gamma * after - value + algorithm.gamma * lam * carried
                out[t], after = carried + base * value, value
        start += prompt + sampled
    return reward, advantage, returns


SHAPINGS = [
    {},
    {"placement": "loss"},
    *({"placement": "reward", "estimator": kind} for kind in ("k1", "k2", "k3")),
    {"bootstrap_truncated": True},
    {"lam_value": 1.0},
    {"lam_value": 0.95, "lam_length_alpha": 0.5},
    {"gamma": 1.0, "placement": "reward", "bootstrap_truncated": True, "lam_value": 1.0},
]


def differs_by_hand(batch, algorithm, shaped, kl_coef=0.3, per_token=None):
    want = shaped_by_hand(batch, algorithm, kl_coef, per_token)
    # fp32 outputs of fp64 sums of at most 4 tokens with numbers below 10
    names = ("reward", "raw_advantage", "returns")
    return any((shaped[name] - torch.tensor(x)).abs().max() > 1e-5 for name, x in zip(names, want))


@pytest.mark.parametrize("changes", SHAPINGS, ids=range(len(SHAPINGS)))
def test_rewards_advantages_and_returns_follow_the_recurrences(changes):
    batch, asked = experience(), algorithm(**changes)
    assert not differs_by_hand(batch, asked, advantages_of(batch, SCORE, 0.3, asked))


# Rewards of tokens in the middle, at the first and at the last; None for samples without.
PER_TOKEN = [None if b % 3 == 2 else [(-1) ** b * (t + 1) / 4 for t in range(sampled)] for b, (_, sampled, _) in enumerate(SAMPLES)]


TEACHER = -torch.rand(20, generator=torch.Generator().manual_seed(6))


def with_teacher(batch, shift=0):
    """Log-probs of a teacher, NaN outside the mask; shift: places by which they are wrong."""
    own = TEACHER[: batch.num_tokens].roll(shift)
    return batch.with_fields({"teacher_logprob": torch.where(batch["response_mask"], own, torch.nan)})


def rewards_of_teacher(batch, coef, per_token):
    """Minus coef times the log-ratio of every sampled token, and rewards of tokens where a sample has some."""
    found, start = [], 0
    for b, (prompt, sampled, _) in enumerate(SAMPLES):
        places = range(start + prompt, start + prompt + sampled)
        own = per_token[b] if per_token is not None and per_token[b] is not None else [0.0] * sampled
        found.append([x - coef * (float(batch["logprob"][t]) - float(TEACHER[t])) for x, t in zip(own, places)])
        start += prompt + sampled
    return found


@pytest.mark.parametrize("changes", SHAPINGS, ids=range(len(SHAPINGS)))
def test_a_teachers_kl_is_a_reward_of_tokens_for_advantages_and_returns(changes):
    batch, asked = experience(), algorithm(distillation={"coef": 0.7}, **changes)
    for per_token in (None, PER_TOKEN):
        want = rewards_of_teacher(batch, 0.7, per_token)
        assert not differs_by_hand(batch, asked, advantages_of(with_teacher(batch), SCORE, 0.3, asked, per_token), per_token=want)
        shifted = advantages_of(with_teacher(batch, shift=1), SCORE, 0.3, asked, per_token)
        assert differs_by_hand(batch, asked, shifted, per_token=want), "log-probs of the neighbours"


@pytest.mark.parametrize("changes", SHAPINGS, ids=range(len(SHAPINGS)))
def test_rewards_of_tokens_enter_where_they_stand(changes):
    batch, asked = experience(), algorithm(**changes)
    shaped = advantages_of(batch, SCORE, 0.3, asked, PER_TOKEN)
    assert not differs_by_hand(batch, asked, shaped, per_token=PER_TOKEN)
    assert differs_by_hand(batch, asked, shaped), "they count"


@pytest.mark.parametrize("changes", SHAPINGS, ids=range(len(SHAPINGS)))
def test_a_score_on_the_last_token_is_the_score_bit_for_bit(changes):
    batch, asked = experience(), algorithm(**changes, whiten_advantages=True)
    at_end = [[0.0] * (sampled - 1) + [float(score)] if sampled else [] for (_, sampled, _), score in zip(SAMPLES, SCORE)]
    want, found = (advantages_of(batch, *given) for given in ((SCORE, 0.3, asked), (torch.zeros_like(SCORE), 0.3, asked, at_end)))
    assert all(torch.equal(want[name], found[name]) for name in ("reward", "advantage", "raw_advantage", "returns"))


@pytest.mark.parametrize(
    "broken",
    [
        {"placement": "none"},
        {"bootstrap_truncated": False},
        {"lam_value": None},
        {"gamma": 0.99},
        {"estimator": "k2"},
    ],
)
def test_shaping_that_ignores_a_setting_is_noticed(broken):
    batch, wanted = experience(), SHAPINGS[-1]
    shaped = advantages_of(batch, SCORE, 0.3, algorithm(**(wanted | broken)))
    assert differs_by_hand(batch, algorithm(**wanted), shaped)


def test_bootstrap_touches_cut_responses_only():
    batch = experience()
    without, bootstrapped = (advantages_of(batch, SCORE, 0.0, algorithm(bootstrap_truncated=on)) for on in (False, True))
    changed = [bool((without["returns"] != bootstrapped["returns"])[batch.token_index([b])].any()) for b in range(5)]
    assert changed == [cut for _, _, cut in SAMPLES]


def test_the_reference_is_not_asked_for_where_the_kl_is_not_in_the_reward():
    batch = experience()
    fields = {name: values for name, values in batch.token_fields.items() if name != "ref_logprob"}
    without = replace(batch, token_fields=fields)
    want = advantages_of(batch, SCORE, 0.0, algorithm())["reward"]
    assert torch.equal(advantages_of(without, SCORE, 5.0, algorithm())["reward"], want)
    with pytest.raises(KeyError):
        advantages_of(without, SCORE, 5.0, algorithm("reward"))


def test_whitening_takes_the_moments_of_the_sampled_tokens():
    batch = experience()
    shaped = advantages_of(batch, SCORE, 0.0, algorithm(whiten_advantages=True))
    mask, raw = batch["response_mask"], shaped["raw_advantage"]
    want = (raw[mask].double() - raw[mask].double().mean()) / raw[mask].double().std()
    torch.testing.assert_close(shaped["advantage"][mask].double(), want, rtol=1e-5, atol=1e-6)
    assert not shaped["advantage"][~mask].any()
    everywhere = (raw - raw.mean()) / raw.std()
    assert (everywhere[mask] - want).abs().max() > 1e-2, "moments over prompt tokens too would be noticed"
    plain = advantages_of(batch, SCORE, 0.0, algorithm())
    assert torch.equal(shaped["returns"], plain["returns"]), "the critic's returns are not whitened"


@pytest.mark.parametrize("placement", ["none", "reward"])
def test_a_step_without_a_sampled_token_is_zero_and_not_nan(placement):
    """Every response is empty: the model ended each at once, and the end was cut off as a stop string."""
    batch = experience()
    fields = batch.token_fields | {"response_mask": torch.zeros_like(batch["response_mask"])}
    shaped = advantages_of(replace(batch, token_fields=fields), SCORE, 0.1, algorithm(placement, whiten_advantages=True))
    assert all(not shaped[name].any() for name in ("reward", "advantage", "raw_advantage", "returns"))


# ----------------------------------------------------------------------------------------------------------- mini-batches


def numbered(count):
    """`count` sequences of one prompt token and 1 to 4 sampled ones; the tokens of sequence b are all b."""
    lengths = [2 + b % 4 for b in range(count)]
    tokens = torch.arange(count).repeat_interleave(torch.tensor(lengths))
    mask = torch.cat([torch.arange(n) > 0 for n in lengths])
    return PackedBatch(tokens, cu_seqlens_of(lengths), {"response_mask": mask})


def cut(batch, seed, epochs=1, mode="token-mean"):
    """Mini-batches of 4; the longest response has 9 tokens."""
    schedule = UpdateSchedule(epochs, 4, mode)
    data, shares = dealt(batch), Shares.of_ranks([0])
    sent = first_epoch(data, shares, (), schedule.mini_batch_size, seed)
    return list(mini_batches(sent, shares, dist.group.WORLD, schedule, 9, seed))


def order_of(batch, seed, epochs=1):
    return [share.tokens[share.cu_seqlens[:-1].long()].tolist() for share, *_ in cut(batch, seed, epochs)]


def visits_all_once(minis, count, epochs):
    per_epoch = len(minis) // epochs
    passes = [sum(minis[e * per_epoch : (e + 1) * per_epoch], []) for e in range(epochs)]
    return all(sorted(visited) == list(range(count)) for visited in passes)


def test_every_epoch_visits_every_sample_once_in_an_order_of_its_own():
    minis = order_of(numbered(12), seed=11, epochs=3)
    assert [len(mini) for mini in minis] == [4] * 9 and visits_all_once(minis, 12, epochs=3)
    first, second, third = ([*minis[i], *minis[i + 1], *minis[i + 2]] for i in (0, 3, 6))
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    assert not visits_all_once([minis[0], *minis[:2], *minis[3:]], 12, epochs=3), "a mini-batch that is drawn twice is noticed"


def test_the_order_is_a_function_of_the_seed():
    batch = numbered(12)
    assert order_of(batch, 2**63 - 1) == order_of(batch, 2**63 - 1)
    assert order_of(batch, 1) != order_of(batch, 2)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    order_of(batch, 1)
    assert torch.equal(before, torch.get_rng_state()), "the global generator, part of a checkpoint, stays where it is"


# mode -> (weight of a token of a response of n tokens, share of that response in the denominator)
MODES = {
    "token-mean": (lambda n: 1.0, lambda n: n),
    "seq-mean-token-mean": (lambda n: 1.0 / n, lambda n: 1),
    "seq-mean-token-sum": (lambda n: 1.0, lambda n: 1),
    "fixed-length": (lambda n: 1.0, lambda n: 9),
}


def wrong_weights(mode, minis):
    weight_of, share_of = MODES[mode]
    wrong = []
    for mini, denominator, lengths, _ in minis:
        assert torch.equal(lengths, mini.lengths), "alone, a rank has all samples"
        sampled = [int(n) - 1 for n in mini.lengths]
        want = [0.0 if place == 0 else weight_of(n) for n in sampled for place in range(n + 1)]
        wrong.append(denominator != sum(map(share_of, sampled)) or not torch.allclose(mini["weight"], torch.tensor(want)))
    return wrong


@pytest.mark.parametrize("mode", MODES)
def test_weights_and_denominators_are_those_of_the_whole_mini_batch(mode):
    assert wrong_weights(mode, cut(numbered(12), 3, 2, mode)) == [False] * 6


@pytest.mark.parametrize("mode", MODES)
def test_the_weights_of_another_mode_are_noticed(mode):
    others = [other for other in MODES if other != mode]
    assert all(any(wrong_weights(mode, cut(numbered(12), 3, 1, other))) for other in others)


def test_a_mini_batch_without_sampled_tokens_has_a_denominator():
    batch = numbered(4)
    empty = batch.with_fields({"response_mask": torch.zeros_like(batch["response_mask"])})
    assert [(float(mini["weight"].sum()), d) for mini, d, *_ in cut(empty, 0)] == [(0.0, 1.0)]


class Counting:
    """A role whose mini-batch k gives gradient norm k; it declines from `stop_at` on, as the policy does above the target KL."""

    def __init__(self, stop_at=None):
        self.engine, self.calls, self.stop_at, self.training = self, 0, stop_at, False

    def train_mode(self):
        return self

    def __enter__(self):
        self.training = True

    def __exit__(self, *_):
        self.training = False

    def update(self, mini, denominator):
        assert self.training
        self.calls += 1
        result = PassResult({}, {"tokens_sum": 2.0, "loss_sum": 3.0 * self.calls}, {"ratio_max": 5.0 - self.calls}, 1)
        if self.calls == self.stop_at:
            return UpdateResult(result, None, None)
        return UpdateResult(result, StepResult(float(self.calls), applied=self.calls != 2), 0.1 * self.calls)


def test_updates_are_summed_up():
    summary = run_updates(Counting(), cut(numbered(12), 0, mode="seq-mean-token-sum"))
    assert (summary.num_updates, summary.skipped, summary.stopped_early, summary.grad_norm) == (2, 1, False, 2.0)
    assert summary.lr == pytest.approx(0.3) and summary.maxima == {"ratio_max": 4.0}
    assert summary.loss("loss_sum") == pytest.approx((3 + 6 + 9) / 3 / 4) and summary.per_token("loss_sum") == 18 / 6


def test_a_declined_step_ends_the_updates_of_all_epochs():
    role = Counting(stop_at=2)
    summary = run_updates(role, cut(numbered(12), 0, epochs=2))
    assert (role.calls, summary.num_updates, summary.stopped_early, summary.lr) == (2, 1, True, 0.1)
    assert run_updates(Counting(), cut(numbered(12), 0, epochs=2)).num_updates == 5
    assert not role.training


class Recording(Counting):
    """Notes the samples of its mini-batches, the sums of their weights over the denominators, and these."""

    counts_ratios = False
    host_group = None

    def __init__(self):
        super().__init__()
        self.seen, self.weights, self.denominators = [], [], []

    def update(self, mini, denominator):
        self.seen.append(mini.tokens[mini.cu_seqlens[:-1].long()].tolist())
        self.weights.append(float(mini["weight"].sum()) / denominator)
        self.denominators.append(denominator)
        return super().update(mini, denominator)


def updated(correction=NoImportanceSamplingConfig(), rejected=None, **critic):
    """Policy and critic after the updates of a step of 12 samples, 6 a mini-batch and one epoch but for the critic's own keys.

    rejected: [T] bool, the field of that name.
    """
    fields = dict.fromkeys(("logprob", "advantage", "value", "returns"), torch.zeros(numbered(12).num_tokens))
    fields |= {} if rejected is None else {"rejected": rejected}
    config = TrainConfig(
        policy=PolicyConfig(model="m"),
        critic=CriticConfig(**critic),
        data=DataConfig(train="t"),
        algorithm=AlgorithmConfig(mini_batch_size=6, importance_sampling=correction),
    )
    models, shares = {"policy": Recording(), "critic": Recording()}, Shares.of_ranks([0])
    roles = Roles(models, {}, tuple(models), dict.fromkeys(models, shares))
    updates = Updates(dealt(numbered(12).with_fields(fields)), roles, tuple(models), config, 5)
    for name in models:
        updates.run(name)
    return models["policy"], models["critic"], updates.summary("critic").num_updates


def test_the_critic_is_updated_by_its_own_schedule():
    policy, critic, _ = updated()
    assert policy.seen == critic.seen and [len(one) for one in policy.seen] == [6, 6]
    own, twice, steps = updated(ppo_epochs=2, mini_batch_size=4)
    assert own.seen == policy.seen, "the policy keeps the shared schedule"
    assert [len(one) for one in twice.seen] == [4] * 6 and visits_all_once(twice.seen, 12, epochs=2)
    assert steps == 5, "of six, as the second is skipped"


def test_the_critics_loss_is_aggregated_in_its_own_way():
    policy, critic, _ = updated(loss_aggregation="seq-mean-token-sum")
    assert policy.weights == pytest.approx([1.0, 1.0]), "a mean over tokens"
    assert sum(critic.weights) == pytest.approx(sum(len_of - 1 for len_of in numbered(12).lengths.tolist()) / 6)


def test_rejected_tokens_count_nowhere_in_the_policys_loss_and_as_ever_in_the_critics():
    mask = numbered(12)["response_mask"]
    rejected = mask & (torch.arange(len(mask)) % 3 == 0)
    asked = MISConfig(count_rejected=False)
    policy, critic, _ = updated(asked, rejected)
    assert policy.seen == critic.seen and policy.weights == critic.weights == pytest.approx([1.0, 1.0])
    assert sum(policy.denominators) == int((mask & ~rejected).sum()) < sum(critic.denominators) == int(mask.sum())
    counting, _, _ = updated(MISConfig(), rejected)
    assert counting.denominators == critic.denominators


# -------------------------------------------------------------------------------------------------------------- agreement


def sampled(trainer, sampler):
    """One prompt token, whose numbers must not count, and then tokens of these probabilities."""
    mask = torch.tensor([False] + [True] * len(trainer))
    fields = {name: torch.tensor([0.123, *p]).log() for name, p in (("logprob", trainer), ("rollout_logprob", sampler))}
    fields["rollout_logprob"][0] = 0.0
    return PackedBatch(torch.zeros(len(mask), dtype=torch.long), cu_seqlens_of([len(mask)]), {"response_mask": mask, **fields})


WHOLE = SamplingParams(8)
UNREPLAYED = SamplingParams(8, top_p=0.5)
REPLAYED = SamplingParams(8, top_k=2, record_top_k_ids=True)
SAMPLINGS = [WHOLE, UNREPLAYED, REPLAYED]


def drawn_with(sampling, batch):
    """The batch as the trainer has it after this sampling: what was recorded stands beside the log-probs."""
    if not sampling.record_top_k_ids:
        return batch
    kept = torch.tensor([[-1] * 3] + [[0, 5, 7], [0, -1, -1]][: batch.num_tokens - 1], dtype=torch.int32)
    return batch.with_fields(ragged_fields={"kept": Ragged.of_table(kept)})


@pytest.mark.parametrize(
    "trainer, sampler, sampling, mean, maximum",
    [
        ([0.5, 0.5], [0.5, 0.5], WHOLE, 0.0, 0.0),
        ([0.5, 0.2], [0.4, 0.4], WHOLE, 0.15, 0.2),
        ([0.5, 0.2], [0.4, 0.4], UNREPLAYED, 0.05, 0.1),
        ([0.5, 0.2], [0.9, 0.8], UNREPLAYED, 0.0, 0.0),
        ([0.5, 0.2], [0.4, 0.4], REPLAYED, 0.15, 0.2),
        ([0.5, 0.2], [0.9, 0.8], REPLAYED, 0.5, 0.6),
        ([], [], WHOLE, 0.0, 0.0),
    ],
)
def test_agreement_is_the_difference_of_probabilities(trainer, sampler, sampling, mean, maximum):
    got = compare_with_sampler(drawn_with(sampling, sampled(trainer, sampler)), sampling)
    assert (got.mean, got.max) == pytest.approx((mean, maximum), abs=1e-7)
    assert (got.kept is None) == (not sampling.record_top_k_ids)


def test_the_limit_holds_for_new_data_alone_and_nothing_that_is_not_finite_passes():
    far = compare_with_sampler(sampled([0.5, 0.2], [0.4, 0.4]), WHOLE)
    require_agreement(far, 0.2, 3, "vllm")
    with pytest.raises(SamplerMismatch, match=r"step 3: vllm .* 0\.1500 .* rollout\.max_prob_diff = 0\.1"):
        require_agreement(far, 0.1, 3, "vllm")
    require_agreement(far, 0.1, 3, "vllm", age=1)
    for broken in (Agreement(math.nan, 0.1), Agreement(0.0, math.nan), Agreement(0.0, math.inf)):
        for age in (0, 2):
            with pytest.raises(SamplerMismatch):
                require_agreement(broken, 0.1, 3, "vllm", age)


@pytest.mark.parametrize("width, ids, overflow", [(1, 1.0, 1.0), (17, 17.0, 0.0), (18, 9.5, 0.5), (20, 10.5, 0.5)])
def test_tokens_with_as_many_ids_as_are_recorded_are_counted(width, ids, overflow):
    """The first token was drawn from `width` ids, the second from 1 (from `width` where all rows are equal); 18 are recorded."""
    sampling = SamplingParams(8, top_k=2, record_top_k_ids=True)
    assert sampling.top_k_width == 18
    batch = sampled([0.5, 0.5], [0.5, 0.5])
    kept = torch.full((3, width), -1, dtype=torch.int32)
    kept[1], kept[2, 0] = torch.arange(width, dtype=torch.int32), 3
    if width == 17:
        kept[2] = kept[1]
    got = compare_with_sampler(batch.with_fields(ragged_fields={"kept": Ragged.of_table(kept)}), sampling).kept
    assert got is not None and got.ids == ids and got.overflow == (0.0 if width < 18 else overflow)


def test_a_mean_above_the_limit_stops_the_run_and_says_why():
    message = r"step 7: vllm .* mean .*0\.0300 .*max 0\.5000.* rollout\.max_prob_diff = 0\.02.*stale prefix cache"
    with pytest.raises(SamplerMismatch, match=message):
        require_agreement(Agreement(0.03, 0.5), 0.02, step=7, engine="vllm")
    require_agreement(Agreement(0.02, 0.5), 0.02, step=7, engine="vllm")


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("trainer, sampler", [([math.nan, 0.5], [0.5, 0.5]), ([0.5, 0.5], [0.5, math.nan])])
def test_nan_is_not_agreement(trainer, sampler, sampling):
    with pytest.raises(SamplerMismatch):
        require_agreement(compare_with_sampler(drawn_with(sampling, sampled(trainer, sampler)), sampling), 1.0, 1, "vllm")


# ------------------------------------------------------------------------------------------------- requests and experience


def test_seeds_are_those_of_every_rank_and_every_start():
    # the definition, written out: a change of it would break the resume of older runs
    digest = hashlib.sha256(b"3/14/159").digest()
    assert sample_seed(3, 14, 159) == int.from_bytes(digest[:8], "little") // 2 < 2**63
    seeds = {sample_seed(run, step, sample) for run in range(3) for step in range(20) for sample in range(-1, 50)}
    assert len(seeds) == 3 * 20 * 51, "neither run, step nor sample may be ignored"


def test_samples_of_one_prompt_are_neighbours_with_seeds_of_their_own():
    requests = make_requests([[1, 2], [3]], samples_per_prompt=3, run_seed=0, step=1)
    assert [request.prompt.tolist() for request in requests] == [[1, 2]] * 3 + [[3]] * 3
    assert [request.number for request in requests] == list(range(6)) and requests[0].prompt.dtype == numpy.int32
    seeds = [[request.seed for request in make_requests([[1, 2], [3]], 3, 0, step)] for step in (1, 1, 2)]
    assert len(set(seeds[0])) == 6 and seeds[0] == seeds[1] and not set(seeds[0]) & set(seeds[2])


def test_experience_lays_prompt_and_response_end_to_end():
    requests = make_requests([[1, 2], [3]], 1, 0, 1)
    responses = [answered((8, 9), (-0.5, -1.5)), answered((7,), (-2.5,), "length", 1)]
    batch = pack_experience(requests, responses)
    assert batch.tokens.tolist() == [1, 2, 8, 9, 3, 7] and batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch["response_mask"].tolist() == [False, False, True, True, False, True]
    assert batch["rollout_logprob"].tolist() == [0.0, 0.0, -0.5, -1.5, 0.0, -2.5] and batch["truncated"].tolist() == [False, True]
    assert "kept" not in batch
    with pytest.raises(ValueError):
        pack_experience(requests, responses[:1])


def test_experience_holds_the_ids_that_each_token_was_drawn_from():
    requests = make_requests([[1, 2], [3], [4]], 1, 0, 1)
    responses = [
        answered((8, 9), kept=[[8, 1], [9]]),
        answered((), number=1, kept=[]),
        answered((7,), number=2, kept=[[5, 6, 7]]),
    ]
    kept = pack_experience(requests, responses, with_top_k_ids=True).ragged("kept")
    none = [-1, -1, -1]
    assert kept.ids.dtype == kept.counts.dtype == torch.int32 and kept.ids.tolist() == [8, 1, 9, 5, 6, 7]
    assert kept.padded().tolist() == [none, none, [8, 1, -1], [9, -1, -1], none, none, [5, 6, 7]]
    assert pack_experience([requests[1]], responses[1:2], with_top_k_ids=True).ragged("kept").padded().shape == (1, 0)
    assert pack_experience([], [], with_top_k_ids=True).ragged("kept").padded().shape == (0, 0), "a rank that drew nothing"


def test_given_tokens_are_of_the_sample_and_not_of_the_policy():
    """The output of a tool between two sampled parts, of which the second is by newer weights."""
    parts = (segment((8, 9), (-0.5, -1.5), 3), segment((4, 5, 6), None, 3), segment((7,), (-2.5,), 4))
    answer = Response(0, parts, "stop", kept_of([[8, 1], [9], [7, 2]]))
    batch = pack_experience(list(make_requests([[1, 2]], 1, 0, 1)), [answer], with_top_k_ids=True)
    assert batch.tokens.tolist() == [1, 2, 8, 9, 4, 5, 6, 7]
    assert batch["response_mask"].tolist() == [False] * 2 + [True] * 2 + [False] * 3 + [True]
    assert batch["rollout_logprob"].tolist() == [0.0, 0.0, -0.5, -1.5, 0.0, 0.0, 0.0, -2.5]
    none = [-1, -1]
    assert batch.ragged("kept").padded().tolist() == [none, none, [8, 1], [9, -1], none, none, none, [7, 2]]
    assert (answer.oldest_version, answer.newest_version) == (3, 4)


def test_ids_can_be_recorded_only_where_their_number_is_bounded():
    assert [
        SamplingParams(8, temperature, p, k, record_top_k_ids=True).top_k_width
        for temperature, p, k in ((1.0, 1.0, -1), (0.0, 0.9, 5), (1.0, 1.0, 8), (0.5, 0.9, 50), (1.0, 0.9, 128))
    ] == [0, 0, 25, 72, 160]
    assert SamplingParams(8, top_p=0.9).top_k_width == 0
    with pytest.raises(ValueError, match="top_p 0.9 .*set top_k too"):
        SamplingParams(8, top_p=0.9, record_top_k_ids=True)


# ---------------------------------------------------------------------------------------------------------------- scoring


def _letters(ids):
    return "".join(chr(96 + i) for i in ids)


LETTERS = SimpleNamespace(eos_ids=(0, 1), decode=_letters, decode_all=_letters)


@pytest.fixture
def alone():
    """A world of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "tokens, text", [((2, 3, 0), "bc"), ((2, 3, 1), "bc"), ((2, 3), "bc"), ((2, 1, 3), "bac"), ((0,), ""), ((), "")]
)
def test_only_the_last_end_of_sequence_token_is_left_out_of_the_text(tokens, text):
    assert response_text(tokens, LETTERS) == text


def test_rules_see_the_text_before_the_first_stop_string():
    tokens = (2, 3, 4, 3, 5)
    whole = response_text(tokens, LETTERS)
    assert response_text(tokens, LETTERS, (whole[3:], whole[1])) == whole[0]
    assert response_text(tokens, LETTERS, ("absent",)) == whole


def asked(answers):
    return [Prompt(f"file#{i}", (1,), "?", answer, {}) for i, answer in enumerate(answers)]


def test_scores_come_in_the_order_of_the_responses(alone):
    ends = (((2, 0), "stop"), ((3,), "length"), ((4, 0), "stop"))
    responses = [answered(tokens, finish=finish) for tokens, finish in ends]
    scored = score(asked("bcx"), responses, LETTERS, scorer_with({"exact_match": 2.0}, {}, 0.5))
    assert scored.texts == ["b", "c", "d"] and scored.total == [2.0, 1.5, 0.0] and scored.no_verdict == []
    assert scored.parts == {"exact_match": [1.0, 1.0, 0.0], "missing_eos_penalty": [0.0, -0.5, 0.0]}


def test_own_code_sees_the_whole_response_and_names_the_rank_that_failed(alone, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(s):\n    return {'score': len(s.tokens), 'parts': {'end': s.full_response != s.response}}\n")
    reward = RewardConfig(parts=(RewardPart(path=str(file), function="score"),))
    responses = [answered((2, 0)), answered((3,), finish="length")]
    scored = score(asked("bc"), responses, LETTERS, scorer_of(reward, load_parts(reward)))
    assert scored.total == [2.0, 1.0] and scored.parts == {"mine.score": [2.0, 1.0], "mine.score.end": [1.0, 0.0]}
    file.write_text("def score(s):\n    return 1 / (s.answer != 'c')\n")
    with pytest.raises(
        RewardError, match=r"^rank 0: reward rule mine.score raised ZeroDiv.*\(mine.py:2\); sample file#1 \(sample 1\)"
    ):
        score(asked("bc"), responses, LETTERS, scorer_of(reward, load_parts(reward)))


def test_a_rule_sees_each_turn_and_the_sampled_ids_alone(alone, tmp_path):
    """The stop string e ends both turns; of the first it stays in the whole text, as the policy went on behind it."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(s):\n"
        "    assert s.turns == ('bc', 'd') and s.response == 'bceghd' and s.full_response == 'bceghde', s\n"
        "    return {'score': s.num_tokens, 'per_token': [float(token) for token in s.tokens]}\n"
    )
    reward = RewardConfig(parts=(RewardPart(path=str(file), function="score"),))
    turns = (segment((2, 3, 5), (-1.0,) * 3), segment((7, 8), None), segment((4, 5), (-1.0,) * 2))
    scored = score(asked("b"), [Response(0, turns, "stop")], LETTERS, scorer_of(reward, load_parts(reward)), ("e",))
    assert scored.total == [5.0] and scored.per_token == [[2.0, 3.0, 5.0, 4.0, 5.0]]


def test_the_scorer_of_a_configuration_has_its_penalties():
    """As runs and examples/ppo_step_by_hand.py make it; a scorer of the parts alone gives 2.0 here."""
    reward = RewardConfig(
        parts=(RewardPart(name="exact_match", weight=2.0),),
        missing_eos_penalty=0.5,
        length_penalty=LengthPenaltyConfig(per_token=0.25, start=1),
    )
    sample = RewardInput("?", "b", "b", truncated=True, num_tokens=3, record={}, sample_id="0")
    assert scores(scorer_of(reward, load_parts(reward)), [sample]).total == [2.0 - 0.5 - 2 * 0.25]


@pytest.mark.parametrize("result", [math.nan, math.inf, "1", ZeroDivisionError("no")])
def test_a_rule_that_fails_names_the_sample(alone, result):
    def rule(sample):
        if sample.answer == "c" and isinstance(result, Exception):
            raise result
        return result if sample.answer == "c" else 1.0

    responses = [answered((2, 0))] * 2
    with pytest.raises(RewardError, match=r"broken .*file#1 \(sample 1\)"):
        score(asked("bc"), responses, LETTERS, scorer_with({"broken": 1.0}, {"broken": rule}))
    assert score(asked("bb"), responses, LETTERS, scorer_with({"broken": 1.0}, {"broken": rule})).total == [1.0, 1.0]


# ----------------------------------------------------------------------------------------------------- truncated sampling


def truncated_by_hand(logits, top_p, top_k):
    """Probabilities of one row in Python floats: the k best, of those the smallest set with top_p of their mass, renormalised."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = order if top_k < 1 else [i for i in order if logits[i] >= logits[order[min(top_k, len(order)) - 1]]]
    mass = {i: math.exp(logits[i] - logits[order[0]]) for i in kept}
    whole, nucleus = sum(mass.values()), []
    for i in kept:
        nucleus.append(i)
        if top_p < 1.0 and sum(mass[j] for j in nucleus) >= top_p * whole:
            break
    return [mass[i] / sum(mass[j] for j in nucleus) if i in nucleus else 0.0 for i in range(len(logits))]


def rows(count=40, vocab=7):
    generator = random.Random(1)
    return [[generator.gauss(0, 2) for _ in range(vocab)] for _ in range(count)]


def largest_error(got, top_p, top_k):
    want = torch.tensor([truncated_by_hand(row, top_p, top_k) for row in rows()], dtype=torch.float64)
    return float((got.exp() - want).abs().max())


def test_truncated_distribution_is_the_one_defined():
    for top_p in [0.01, 0.5, 0.9, 1.0]:
        for top_k in [-1, 1, 3, 7, 50]:
            got = truncated_logprobs(torch.tensor(rows(), dtype=torch.float64), top_p, top_k)
            assert largest_error(got, top_p, top_k) < 1e-12


def test_truncation_that_is_off_by_one_token_is_noticed():
    logits = torch.tensor(rows(), dtype=torch.float64)
    assert largest_error(truncated_logprobs(logits, 1.0, 2), 1.0, 3) > 1e-3
    assert largest_error(truncated_logprobs(logits, 0.5, -1), 0.9, -1) > 1e-3
    # the token that crosses top_p belongs to the nucleus: here it is 0.6 of the mass for top_p 0.5
    crossing = torch.tensor([[0.6, 0.4]], dtype=torch.float64).log()
    assert truncated_logprobs(crossing, 0.5, -1).tolist() == [[0.0, -math.inf]]


def test_ties_with_the_kth_token_stay():
    got = truncated_logprobs(torch.tensor([[2.0, 1.0, 1.0, 0.0]], dtype=torch.float64), 1.0, 2).exp()[0]
    assert (got > 0).tolist() == [True, True, True, False] and float(got.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_a_temperature_that_is_none_is_refused(temperature):
    with pytest.raises(ValueError, match="--temperature .* must be 0"):
        answer(
            "absent",
            ["1+1="],
            Texts(chat_template=False),
            engine="megatron",
            max_tokens=4,
            temperature=temperature,
            dtype="fp32",
        )
