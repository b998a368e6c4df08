"""Report of a step, against sums written out by hand over two responses."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.data.prompts import Prompt
from megappo.engine.base import PassResult, StepResult
from megappo.telemetry.timers import StageTimers
from megappo.trainer.roles import UpdateResult
from megappo.trainer.rounds import Rollout
from megappo.trainer.sampler_check import Agreement
from megappo.trainer.scoring import Scored
from megappo.trainer.step_record import StepRecord
from megappo.trainer.updates import UpdateSummary
from tests.telemetry.catalogue import metric_of
from tests.trainer.experiences import dealt

# two prompt tokens and two sampled ones, then one and three; 99 stands where nothing may be read
MASK = [False, False, True, True, False, True, True, True]
FIELDS = {
    "logprob": [99.0, 99, -1.0, -2.0, 99, -0.5, -0.5, -1.0],
    "ref_logprob": [50.0, 99, -1.5, -1.0, 70, -1.0, -1.0, -1.0],
    "entropy": [99.0, 99, 1.0, 2.0, 99, 3.0, 4.0, 5.0],
    "value": [99.0, 99, 0.1, 0.2, 99, 0.3, 0.4, 0.5],
    "returns": [0.0, 0, 1.0, 1.0, 0, 0.0, 0.0, 0.5],
    "reward": [0.0, 0, -0.1, 0.9, 0, 0.0, 0.1, 0.2],
    "advantage": [0.0, 0, 1.0, -1.0, 0, 2.0, 0.0, -2.0],
    "raw_advantage": [0.0, 0, 0.5, -0.5, 0, 1.0, 0.0, -1.0],
}
PROMPTS = [Prompt("f#0", (1, 2), "q0", "a0", {}), Prompt("f#1", (5,), "q1", "a1", {})]


def updates(sums, denominator=2.0):
    summary = UpdateSummary()
    summary.add(UpdateResult(PassResult({}, sums, {"ratio_max": 1.5}, 1), StepResult(0.7, True), 1e-3), denominator)
    return summary


def record(policy_sums=None, fields=FIELDS, kl_estimator="k1"):
    batch = PackedBatch(
        tokens=torch.arange(8),
        cu_seqlens=cu_seqlens_of([4, 4]),
        token_fields={"response_mask": torch.tensor(MASK), **{name: torch.tensor(x) for name, x in fields.items()}},
        sequence_fields={"truncated": torch.tensor([False, True])},
    )
    scored = Scored(["r0", "r1"], [1.0, 0.5], {"exact_match": [1.0, 0.0]}, retries={"rm": 3, "other": 0})
    policy = UpdateSummary() if policy_sums is None else updates(policy_sums)
    critic = updates({"tokens_sum": 5.0, "loss_sum": 4.0})
    return StepRecord(
        rollout=Rollout(step=3, experience=dealt(batch, version=2), scored=scored, prompt_of=PROMPTS.__getitem__),
        kl=kl_estimator,
        kl_coef=0.02,
        agreement=Agreement(0.001, 0.01),
        critics={"critic": critic},
        policy=policy,
        pushed={"seconds": 0.5},
    )


def changed(record: StepRecord, **rollout: Any) -> StepRecord:
    return replace(record, rollout=replace(record.rollout, **rollout))


def metrics_of(step_record):
    timers = StageTimers()
    with timers.stage("generate"):
        pass
    return step_record.metrics(timers)


POLICY_SUMS = {
    "surrogate_sum": 3.0,
    "tokens_sum": 5.0,
    "clip_low_sum": 1.0,
    "clip_high_sum": 0.0,
    "dual_clip_sum": 0.0,
    "approx_kl_sum": 0.5,
    "ratio_sum": 5.5,
}
WANT = {
    "reward/rm/retries": 3,
    "reward/other/retries": 0,
    "reward/score_mean": 0.75,
    "reward/score_std": 0.25,
    "reward/shaped_mean": (0.8 + 0.3) / 2,
    "reward/shaped_min": 0.3,
    "reward/exact_match": 0.5,
    "reward/exact_match/std": 0.5,
    "reward/exact_match/min": 0.0,
    "reward/exact_match/max": 1.0,
    "reward/without_verdict": 0.0,
    "policy/entropy": 3.0,
    "policy/loss": 1.5,
    "policy/clip_low": 0.2,
    "policy/approx_kl": 0.1,
    "policy/advantage_mean": 0.0,
    "policy/advantage_std": 0.5**0.5,
    "policy/advantage_min": -1.0,
    "policy/advantage_max": 1.0,
    "critic/loss": 2.0,
    "critic/value_mean": 0.3,
    "critic/return_max": 1.0,
    "kl/per_token": (0.5 - 1.0 + 0.5 + 0.5 + 0.0) / 5,
    "kl/per_response": (0.5 - 1.0 + 0.5 + 0.5 + 0.0) / 2,
    "kl/coef": 0.02,
    "lengths/response_mean": 2.5,
    "lengths/response_std": 0.5,
    "lengths/response_min": 2.0,
    "lengths/response_max": 3.0,
    "lengths/prompt_mean": 1.5,
    "lengths/total_mean": 4.0,
    "lengths/total_std": 0.0,
    "lengths/total_max": 4.0,
    "lengths/truncated": 0.5,
    "rollout/age_mean": 0.0,
    "rollout/age_max": 0,
    "rollout/prob_diff_max": 0.01,
    "rollout/push_seconds": 0.5,
}


def wrong(metrics):
    return {name for name, value in WANT.items() if metrics[name] != pytest.approx(value, abs=1e-6)}


def test_metrics_are_the_sums_over_sampled_tokens():
    assert not wrong(metrics_of(record(POLICY_SUMS)))


def test_ages_count_steps_from_the_oldest_weights_of_a_response():
    """Step 3 starts with the weights of step 2; the first response was begun by those of step 0 and ended by those of step 1."""
    made = record()
    table = replace(made.experience.table, oldest=torch.tensor([0, 1], dtype=torch.int32), newest=torch.tensor([1, 1]))
    metrics = metrics_of(changed(made, experience=replace(made.experience, table=table)))
    assert (metrics["rollout/age_mean"], metrics["rollout/age_max"]) == (1.5, 2)


def test_explained_variance_is_of_values_against_returns():
    values, returns = (torch.tensor(FIELDS[name])[torch.tensor(MASK)].double() for name in ("value", "returns"))
    want = 1 - (returns - values).var() / returns.var()
    assert metrics_of(record())["critic/explained_variance"] == pytest.approx(float(want), abs=1e-6)


def test_figures_of_the_critic_are_over_the_tokens_that_it_learns_at():
    """With turns as steps: the first sampled token of each response."""
    of_turns = metrics_of(record(fields={**FIELDS, "value_mask": [place in (2, 5) for place in range(8)]}))
    assert of_turns["critic/value_mean"] == pytest.approx(0.2) and of_turns["critic/value_max"] == pytest.approx(0.3)
    assert of_turns["critic/return_mean"] == pytest.approx(0.5)
    assert of_turns["critic/explained_variance"] == pytest.approx(1 - (0.9 + 0.3) ** 2 / 4 / 0.25)
    assert of_turns["policy/entropy"] == 3.0, "those of the policy are over all sampled tokens"


@pytest.mark.parametrize(
    "name, noticed",
    [
        ("entropy", "policy/entropy"),
        ("logprob", "kl/per_token"),
        ("value", "critic/value_mean"),
        ("raw_advantage", "policy/advantage_mean"),
    ],
)
def test_a_field_that_is_one_token_off_is_noticed(name, noticed):
    shifted = {**FIELDS, name: [FIELDS[name][-1], *FIELDS[name][:-1]]}
    assert noticed in wrong(metrics_of(record(POLICY_SUMS, shifted)))


def test_every_name_is_in_the_catalogue_and_every_value_finite():
    metrics = metrics_of(record({**POLICY_SUMS, "kl_loss_sum": 2.0}))
    assert all(metric_of(name) for name in metrics) and all(math.isfinite(value) for value in metrics.values())


def test_a_step_without_a_sampled_token_has_no_loss_and_only_moments_of_nothing_are_nan():
    whole = record(dict.fromkeys(POLICY_SUMS, 0.0))
    fields = whole.batch.token_fields | {"response_mask": torch.zeros(8, dtype=torch.bool)}
    metrics = metrics_of(changed(whole, experience=dealt(replace(whole.batch, token_fields=fields))))
    undefined = {name for name, value in metrics.items() if not math.isfinite(value)}  # logged as null
    moments = {
        f"{name}_{what}" for name in ("policy/advantage", "critic/value", "critic/return") for what in ("mean", "std", "min", "max")
    }
    assert undefined <= moments | {"critic/explained_variance"}
    assert metrics["lengths/response_mean"] == metrics["kl/per_token"] == metrics["policy/loss"] == 0.0


def test_what_did_not_happen_is_not_reported():
    without = metrics_of(record(fields={name: x for name, x in FIELDS.items() if name != "ref_logprob"}))
    assert not [name for name in without if name.startswith("kl/")]
    taught = {name: x for name, x in FIELDS.items() if name != "ref_logprob"} | {"teacher_logprob": FIELDS["ref_logprob"]}
    assert {name for name in metrics_of(record(fields=taught)) if name.startswith("kl/")} == {
        "kl/teacher_per_token",
        "kl/teacher_per_response",
    }
    assert "policy/loss" not in without and without["policy/updates"] == 0, "a critic warm-up step"
    assert "policy/kl_loss" not in metrics_of(record(POLICY_SUMS))
    assert metrics_of(record({**POLICY_SUMS, "kl_loss_sum": 2.0}))["policy/kl_loss"] == pytest.approx(0.4)
    texts = {"ptx_sum": 21.0, "ptx_tokens_sum": 6.0}  # of their own number of tokens
    assert metrics_of(record({**POLICY_SUMS, **texts}))["policy/ptx_loss"] == pytest.approx(3.5)


def test_the_kl_to_the_teacher_is_the_log_ratio_beside_that_to_the_reference():
    metrics = metrics_of(record(fields={**FIELDS, "teacher_logprob": [0.0, 0, -3.0, -2.5, 0, -0.5, -1.0, -1.5]}, kl_estimator="k2"))
    assert metrics["kl/teacher_per_token"] == pytest.approx((2.0 + 0.5 + 0.0 + 0.5 + 0.5) / 5)
    assert metrics["kl/teacher_per_response"] == pytest.approx(3.5 / 2)
    assert metrics["kl/per_token"] == pytest.approx((3 * 0.125 + 0.5) / 5) and metrics["kl/per_response"] == pytest.approx(0.25)


K3 = [math.expm1(-d) + d for d in (0.5, -1.0, 0.5, 0.5, 0.0)]


@pytest.mark.parametrize("kl_estimator, per_token", [("k1", 0.1), ("k2", (3 * 0.125 + 0.5) / 5), ("k3", sum(K3) / 5)])
def test_kl_per_token_is_that_of_the_configured_estimator_and_per_response_the_log_ratio(kl_estimator, per_token):
    metrics = metrics_of(record(kl_estimator=kl_estimator))
    assert metrics["kl/per_token"] == pytest.approx(per_token)
    assert metrics["kl/per_token_k3"] == pytest.approx(sum(K3) / 5)
    assert metrics["kl/per_response"] == pytest.approx(0.25), "what the adaptive controller gets does not change"


def test_the_logged_kl_is_capped_as_the_trained_one_is():
    far = {**FIELDS, "logprob": [99.0, 99, -200.0, -2.0, 99, -0.5, -0.5, -1.0]}
    want = (math.expm1(20.0) - 198.5 + sum(K3[1:])) / 5
    metrics = metrics_of(record(fields=far, kl_estimator="k3"))
    assert metrics["kl/per_token"] == metrics["kl/per_token_k3"] == pytest.approx(want)
    assert math.isfinite(want) and not math.isfinite(float(torch.tensor(198.5).expm1())), "uncapped it is inf"


def test_a_part_counts_over_the_samples_that_have_it_and_models_beside_the_rest():
    whole = record()
    scored = replace(whole.scored, parts={"rule": [0.5, math.nan], "absent": [math.nan] * 2}, model_total=[0.25, 0.5])
    metrics = metrics_of(changed(whole, scored=scored))
    assert (metrics["reward/rule"], metrics["reward/rule/min"], metrics["reward/rule/share"]) == (0.5, 0.5, 0.5)
    assert not [name for name in metrics if "absent" in name]
    assert (metrics["reward/models_mean"], metrics["reward/models_max"]) == (0.375, 0.5)
    assert (metrics["reward/rules_mean"], metrics["reward/rules_min"]) == (0.375, 0.0), "score 1.0 and 0.5 less the models"
    assert all(metric_of(name) for name in metrics)
    assert not [name for name in metrics_of(whole) if "models" in name or "rules" in name or "share" in name]
