"""Catalogue of a run's metrics: every name, once, with its meaning and unit. A name is `group/metric`, and the group is
TensorBoard's section. Names that depend on the configuration (parts of the reward, stages) end in `*` here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Self

from megappo.config.role_sections import is_critic

GROUPS = {
    "reward": "Scores of the step's responses.",
    "eval": "Held-out prompts, in the steps that evaluate ([evaluation](evaluation.md)).",
    "policy": "Updates of the policy, and the advantages that they use.",
    "critic": "Updates of the critic, and its values. Not in runs without one.",
    "critics": "Two critics beside each other ([several critics](algorithms.md#several-critics)).",
    "kl": "Distance of the policy from the reference, and from the teacher of `algorithm.distillation`.",
    "lengths": "Prompts and responses.",
    "rollout": "How responses were drawn, and how far sampler and trainer agree ([agreement](agreement.md)).",
    "timing": "Seconds.",
    "throughput": "Rates over the whole step, all ranks together.",
    "memory": "Peaks, the largest over all ranks ([telemetry](telemetry.md)).",
    "perf": "FLOPs and rates of the stages ([telemetry](telemetry.md#flops-tflops-and-mfu)).",
    "checkpoint": "Saves.",
    "telemetry": "The log itself.",
    "sft": "Runs of `megappo sft`.",
    "reward_model": "Runs of `megappo train-reward-model`; also those of `sft` that are not about tokens.",
    "dpo": "Runs of `megappo dpo`; also those of `sft` that are not about tokens.",
}
"""Group -> its line in docs/metrics.md, in the order of the page."""

STAGES = (
    "prompts",
    "generate",
    "score",
    "logprobs",
    "advantages",
    "update_critic",
    "update_policy",
    "check_replicas",
    "push_weights",
    "evaluate",
)
"""Stages of a step in their order (`trainer/ppo.py`); checks and evaluations do not run in every step."""
MODEL_STAGES = ("generate", "logprobs", "update_critic", "update_policy")
"""Stages that consist of passes of models, whose FLOPs are counted."""
REWARD_MODEL_STAGE = "score"
"""Stage that counts as one of MODEL_STAGES too in a run with a reward model."""
MOMENTS = ("mean", "std", "min", "max")


class _Named(StrEnum):
    """Name in JSONL and trackers, with a one-line meaning for the documentation."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.meaning = meaning
        return member

    def of(self, tail: str) -> str:
        """Return the name of one member of a family: `Metric.STAGE_SECONDS.of("generate_s")`."""
        assert self.value.endswith("*"), f"{self.value} is one metric"
        return self.value[:-1] + tail


class Distribution(_Named):
    """Histograms that trackers show."""

    ADVANTAGE = "policy/advantage", "advantages of the sampled tokens before whitening"
    RATIO = "policy/ratio", "probability ratios of updated and sampling policy, sampled tokens of all updates of the step"
    VALUE = "critic/value", "values of the sampled tokens before the updates"
    RETURN = "critic/return", "returns of the sampled tokens"
    KL = "kl/token", "KL to the reference per sampled token, by the estimator of algorithm.kl, nats"
    SCORE = "reward/score", "scores of the responses"
    RESPONSE = "lengths/response", "response lengths, tokens"


class Metric(_Named):
    """Numbers of a step."""

    SCORE_MEAN = "reward/score_mean", "mean score of the responses, penalties included"
    SCORE_STD = "reward/score_std", "standard deviation of the scores"
    SCORE_MIN = "reward/score_min", "smallest score"
    SCORE_MAX = "reward/score_max", "largest score"
    SHAPED = (
        "reward/shaped_*",
        "mean, std, min, max of a response's summed per-token rewards: score and per_token minus KL penalty",
    )
    WITHOUT_VERDICT = "reward/without_verdict", "share of responses without a score, which are left out"
    NO_VERDICT = (
        "reward/no_verdict/*",
        "responses left out: undecided (out of time, None), unusable (reference answer), unreachable (server), died, "
        "a reason of your own, baseline (remax), group (fewer than two others), redrawn (above_max)",
    )
    REWARD_PART = (
        "reward/*",
        "mean of a part of the reward over the samples that have it, before its weight; PART/std, /min, /max, /share; "
        "/retries: requests sent again to its server",
    )
    RULES = "reward/rules_*", "mean, std, min, max of the score without reward models, if there are any"
    MODELS = "reward/models_*", "mean, std, min, max of the weighted sum of the reward models"
    REWARD_ROUTE = "reward/route/*", "mean score of the responses of a recipe (LABEL/mean), and their number (LABEL/count)"

    EQUAL_GROUPS = "reward/equal_groups", "share of the prompts whose responses all score the same (grpo, rloo)"
    GREEDY_SCORE = "reward/greedy_score", "mean score of the greedy responses of remax"

    EVAL_SCORE = "eval/score", "mean score of greedy answers"
    EVAL_LOSS = "eval/loss", "loss on the held-out data of a supervised run (`sft/loss`), eval/SET/loss of a named set"
    EVAL_LENGTH = "eval/length", "mean response length, tokens"
    EVAL_TRUNCATED = "eval/truncated", "share of responses cut by the length limit"
    EVAL_PART = (
        "eval/*",
        "mean of a rule, or a figure of a supervised run (`dpo/accuracy`); eval/SET/...: mean@N, pass@K, maj@N, rules of a set",
    )

    POLICY_LOSS = "policy/loss", "clipped surrogate loss, mean over updates"
    POLICY_KL_LOSS = "policy/kl_loss", "KL in the loss per token, before its factor (kl.placement: loss), nats"
    POLICY_ENTROPY = "policy/entropy", "mean entropy at sampled tokens, nats"
    POLICY_ENTROPY_COEF = ("policy/entropy_coef", "factor of the entropy bonus (algorithm.entropy: target)")
    POLICY_POSITIVE_NLL = "policy/positive_nll", "mean negative log-likelihood of correct responses, nats"
    POLICY_PTX_LOSS = "policy/ptx_loss", "mean negative log-likelihood of algorithm.ptx, before its factor, nats"
    POLICY_CLIP_LOW = "policy/clip_low", "share of tokens that the lower clip cut"
    POLICY_CLIP_HIGH = "policy/clip_high", "share of tokens that the upper clip cut"
    POLICY_DUAL_CLIP = "policy/dual_clip", "share of tokens that the dual clip cut"
    POLICY_APPROX_KL = "policy/approx_kl", "k3 estimate of KL(sampling policy || updated policy) per token, nats"
    POLICY_RATIO_MEAN = "policy/ratio_mean", "mean probability ratio of updated and sampling policy"
    POLICY_RATIO_MAX = "policy/ratio_max", "largest probability ratio"
    POLICY_GRAD_NORM = "policy/grad_norm", "global gradient norm before clipping, mean over updates"
    POLICY_LR = "policy/lr", "learning rate of the last update"
    POLICY_UPDATES = "policy/updates", "optimizer steps taken"
    POLICY_SKIPPED = "policy/skipped_updates", "updates left out because a gradient was not finite"
    POLICY_STOPPED = "policy/stopped_early", "1 if target_kl ended the step's updates"
    POLICY_EXPERT_VIOLATION = "policy/expert_max_violation", "busiest expert of any layer above its even share, relative to it"
    POLICY_EXPERTS_IDLE = "policy/experts_idle", "share of the experts that no token of the updates chose"
    POLICY_REROUTED = "policy/rerouted", "share of replayed routes (token and layer) unlike the policy's own (replay_experts)"
    POLICY_BALANCE_LOSS = "policy/balance_loss", "routers' balancing loss per sequence, all layers, before router_aux_coef"
    ADVANTAGE = "policy/advantage_*", "mean, std, min, max of the advantages before whitening"
    CORRECTION_MEAN = ("policy/correction_mean", "mean importance weight of a sampled token (importance_sampling, vtrace)")
    CORRECTION_CUT = "policy/correction_cut", "share of the sampled tokens out of its bounds"
    CORRECTION_MAX = "policy/correction_max", "largest ratio of trainer and sampler before the bounds"
    HIGH_ENTROPY = ("policy/high_entropy_threshold", "least entropy of a trained token (high_entropy_token_ratio), nats")

    CRITIC_LOSS = "critic/loss", "value loss (critic.loss), mean over updates"
    CRITIC_EXPLAINED_VARIANCE = "critic/explained_variance", "1 - Var(return - value) / Var(return) before the updates"
    CRITIC_VALUE_CLIP = "critic/value_clip", "share of tokens that the value clip cut"
    CRITIC_RETURN_OUTSIDE = "critic/return_outside", "share of tokens whose return lies outside of the bins"
    CRITIC_VALUE_ERROR_MAX = "critic/value_error_max", "largest |value - return|"
    CRITIC_GRAD_NORM = "critic/grad_norm", "global gradient norm before clipping, mean over updates"
    CRITIC_LR = "critic/lr", "learning rate of the last update"
    CRITIC_UPDATES = "critic/updates", "optimizer steps taken"
    CRITIC_SKIPPED = "critic/skipped_updates", "updates left out because a gradient was not finite"
    CRITIC_EXPERT_VIOLATION = "critic/expert_max_violation", "busiest expert of any layer above its even share, relative to it"
    CRITIC_EXPERTS_IDLE = "critic/experts_idle", "share of the experts that no token of the updates chose"
    CRITIC_BALANCE_LOSS = "critic/balance_loss", "routers' balancing loss per sequence, all layers, before router_aux_coef"
    VALUE = "critic/value_*", "mean, std, min, max of the values"
    RETURN = "critic/return_*", "mean, std, min, max of the returns"

    DISAGREEMENT = "critics/disagreement", "standard deviation of the critics' values, mean over sampled tokens"
    DISAGREEMENT_MASKED = (
        "critics/masked_advantages",
        "share of the sampled tokens of advantage 0 (algorithm.disagreement_mask_ratio)",
    )
    DISAGREEMENT_FILTERED = (
        "critics/filtered_entropy",
        "share of the sampled tokens without entropy bonus (algorithm.disagreement_entropy_ratio)",
    )

    KL_TOKEN = "kl/per_token", "mean KL per sampled token, by the estimator of algorithm.kl, nats"
    KL_TOKEN_K3 = "kl/per_token_k3", "the same by the k3 estimator, nats"
    KL_RESPONSE = ("kl/per_response", "summed log-ratio of a response (k1), mean, nats; what the controller sees")
    KL_COEF = "kl/coef", "factor of the KL penalty used in this step"
    KL_TEACHER_TOKEN = "kl/teacher_per_token", "mean of log policy - log teacher over the sampled tokens (k1), nats"
    KL_TEACHER_RESPONSE = "kl/teacher_per_response", "the same summed over a response, mean, nats"

    RESPONSE_MEAN = "lengths/response_mean", "mean response length, tokens"
    RESPONSE_STD = "lengths/response_std", "standard deviation of the responses' lengths, tokens"
    RESPONSE_MIN = "lengths/response_min", "shortest response, tokens"
    RESPONSE_MAX = "lengths/response_max", "longest response, tokens"
    PROMPT_MEAN = "lengths/prompt_mean", "mean prompt length, tokens"
    PROMPT_MAX = "lengths/prompt_max", "longest prompt, tokens"
    TOTAL_LENGTH = "lengths/total_*", "mean, std, min, max of the lengths of prompt and response together, tokens"
    TRUNCATED = "lengths/truncated", "share of responses cut by the length limit"

    PROB_DIFF_MEAN = "rollout/prob_diff_mean", "mean |probability difference| of sampler and trainer"
    PROB_DIFF_MAX = "rollout/prob_diff_max", "largest such difference"
    CANARY_MEAN = "rollout/canary_prob_diff_mean", "mean of a few sequences drawn right after the push (rollout.max_staleness)"
    CANARY_MAX = "rollout/canary_prob_diff_max", "their largest difference"
    AGE_MEAN = "rollout/age_mean", "mean age of the weights that drew a response, in steps"
    AGE_MAX = "rollout/age_max", "oldest such weights, steps"
    KEPT_IDS = "rollout/top_k_ids", "mean number of ids that top-k and top-p left"
    KEPT_OVERFLOW = "rollout/top_k_overflow", "share of tokens with more such ids, tied with the last, than are recorded"
    ROUNDS = "rollout/rounds", "rounds of generation and scoring (dynamic_sampling)"
    PROMPTS_DRAWN = "rollout/prompts_drawn", "prompts of all rounds"
    PROMPTS_REPLACED = "rollout/prompts_replaced", "those whose responses scored alike, not trained on"
    EQUAL_LEFT = "rollout/equal_left", "prompts of equal scores that were trained on (max_rounds)"
    TOKENS_REPLACED = "rollout/tokens_replaced", "response tokens generated and not trained on"
    PROMPTS_SEEN = "rollout/prompts_seen", "prompts with a pass rate so far (data.curriculum)"
    PROMPTS_SKIPPED = "rollout/prompts_skipped", "prompts passed over so far, by their pass rate"
    GOING_ON = "rollout/going_on", "share of responses begun in earlier steps (rollout.partial_rollout_tokens)"
    UNFINISHED = "rollout/unfinished", "share of responses that the next step goes on with"
    PROMPTS_BEGUN = "rollout/prompts_begun", "prompts whose first response began in the step"
    WINDOWS_MEAN = "rollout/windows_mean", "mean number of steps of a response that ended in this one; null if none did"
    WINDOWS_MAX = "rollout/windows_max", "most steps of such a response"
    TOKEN_AGE_MEAN = (
        "rollout/token_age_mean",
        "mean age of the weights that drew a token, those of earlier steps included, in steps",
    )
    TOKEN_AGE_MAX = "rollout/token_age_max", "oldest such weights, steps"
    TOKEN_AGE_SHARE = "rollout/token_age_share/*", "share of the tokens by weights of this age: 0 to rollout.max_staleness"
    REPLICAS = "rollout/replicas", "replicas of the sampler that drew the step (rollout.max_staleness); fewer once some were lost"
    RUNNING = "rollout/running", "responses that had begun and not ended when the step was handed over (rollout.max_staleness)"
    TOKENS_IN_FLIGHT = "rollout/tokens_in_flight", "tokens that had been drawn then for later steps, earlier turns left out"
    REQUESTS_CUT = "rollout/requests_cut", "responses that the push before found half drawn"
    TOKENS_RECOMPUTED = "rollout/tokens_recomputed", "their tokens, prompts included, that vLLM passed again"
    SEQUENCES = "rollout/sequences", "mean number of sequences of a trajectory (compaction)"
    TURNS_MEAN = "rollout/turns_mean", "mean number of turns of a trajectory (rollout.environment)"
    TURNS_MAX = "rollout/turns_max", "most turns of a trajectory"
    TURNS_LIMITED = ("rollout/turns_limited", "share of trajectories that max_turns ended")
    TURNS_LATE = "rollout/turns_late", "share of trajectories without a score, as the environment did not answer within timeout_s"
    PUSH = "rollout/push_*", "figures of the weight push: bytes, seconds, checks"

    STEP_SECONDS = "timing/step_s", "wall time of the step, s"
    STAGE_SECONDS = "timing/*", "wall time of one stage of the step, s"
    REWARD_SECONDS = "timing/reward/*", "seconds of a part of the reward for a response: PART/mean_s, PART/max_s"
    REWARD_EARLY = (
        "timing/reward/during_generation_s",
        "seconds of generate with rewards beside, on the rank with most; score_s is what was left",
    )
    ENVIRONMENT_MEAN = ("timing/environment/mean_s", "mean seconds of an environment's answer, without the wait for a free worker")
    ENVIRONMENT_MAX = "timing/environment/max_s", "seconds of the slowest answer"
    ENVIRONMENT_SECONDS = "timing/environment/total_s", "seconds of all answers of the step, over ranks and workers"
    ENVIRONMENT_OF_SET = ("timing/environment/*", "the same of an evaluation: eval/mean_s of data.eval, eval/SET/mean_s of a set")
    WAITED = "timing/wait_for_rollout_s", "seconds of generate that training waited for the rollout half (rollout.max_staleness)"
    ROLLOUT_IDLE = "timing/rollout_idle_s", "mean seconds that a replica had nothing to draw since the step before"
    SAVE_SECONDS = "timing/checkpoint_s", "time that saving held training after the previous step, not in step_s, s"
    TOKENS_PER_S = "throughput/tokens_per_s", "prompt and response tokens per second of the step"
    GENERATED_PER_S = ("throughput/generated_tokens_per_s", "response tokens per second of generation, replaced ones included")
    SAMPLES_PER_S = "throughput/samples_per_s", "responses per second of the step"
    HOST_PEAK = "memory/host_peak_gib", "largest resident memory of a rank since this start, GiB"
    DEVICE_PEAK = "memory/device_peak_gib", "largest memory that torch allocated on a rank's GPU since this start, GiB"
    STAGE_MEMORY = "memory/*", "in one stage: STAGE_peak_gib, or STAGE_end_gib where no peak can be reset, GiB"

    TFLOP = "perf/work_tflop/*", "model FLOPs of a role in a stage, over all ranks, 1e12"
    TFLOPS = "perf/tflops/*", "model TFLOP/s per rank in a stage, and in the whole step"
    MFU = "perf/mfu/*", "model FLOPs of a stage over the ranks' peak in its time, 0 to 1"
    HFU = "perf/hfu/*", "the same with the FLOPs of recomputed activations"
    STAGE_TOKENS = "perf/tokens_per_s/*", "tokens that a stage passes, prompts included, per second and rank"

    FAILED_SAVES = "checkpoint/failed_saves", "checkpoints not written since this start"

    LOST_RECORDS = ("telemetry/lost_records", "records of files, trackers and console lost since this start")

    SFT_LOSS = "sft/loss", "mean negative log-prob of response tokens, or divergence from the teacher, nats"
    SFT_NLL = "sft/nll", "that negative log-prob, where `distillation.coef` mixes both"
    SFT_DIVERGENCE = "sft/divergence", "that divergence, where `distillation.coef` mixes both"
    SFT_GRAD_NORM = "sft/grad_norm", "global gradient norm before clipping"
    SFT_LR = "sft/lr", "learning rate"
    SFT_SKIPPED = "sft/skipped_updates", "1 if the update was left out because a gradient was not finite"
    SFT_EXPERT_VIOLATION = "sft/expert_max_violation", "busiest expert of any layer above its even share, relative to it"
    SFT_EXPERTS_IDLE = "sft/experts_idle", "share of the experts that no token of the update chose"
    SFT_BALANCE_LOSS = "sft/balance_loss", "routers' balancing loss per sequence, summed over layers, before router_aux_coef"

    REWARD_MODEL_LOSS = "reward_model/loss", "mean negative log-likelihood of a preference, nats"
    REWARD_MODEL_ACCURACY = "reward_model/accuracy", "share of pairs whose better response has the higher score"
    REWARD_MODEL_MARGIN = "reward_model/margin", "mean score of the better response beyond that of the worse one"
    REWARD_MODEL_CALIBRATION = (
        "reward_model/calibration_error",
        "expected calibration error: distance of the model's probability of an order from the share of such orders, over 10 bins",
    )
    REWARD_MODEL_MEAN = "reward_model/score_mean", "mean score of all responses"
    REWARD_MODEL_STD = "reward_model/score_std", "its standard deviation"

    DPO_LOSS = "dpo/loss", "loss of a preference, and `loss.nll_coef` times `dpo/nll`"
    DPO_ACCURACY = (
        "dpo/accuracy",
        "share of pairs with the higher reward for the better response; kto: of rewards on the right side",
    )
    DPO_MARGIN = "dpo/margin", "`dpo/chosen` - `dpo/rejected`"
    DPO_CHOSEN = "dpo/chosen", "mean reward of the better responses: beta times their log-prob beyond the reference's, where one is"
    DPO_REJECTED = "dpo/rejected", "the same of the worse responses"
    DPO_NLL = "dpo/nll", "mean negative log-prob of the better responses' tokens, nats"
    DPO_KL = "dpo/kl", "estimate of the divergence from the reference that kto subtracts, nats"


def of_critic(name: str, role: str) -> str:
    """Return the name of a metric of the first critic for another one: `critic/loss` -> `critic_b/loss`."""
    return role + name.removeprefix("critic")


def of_kind(name: str, kind: str) -> str:
    """Return the name of a metric of fine-tuning for another kind of supervised training: `sft/lr` -> `dpo/lr`."""
    return kind + name.removeprefix("sft")


def figures(named: Mapping[str, float]) -> dict[str, float]:
    """Return figures of a kind of supervised training from its metrics: `dpo/loss` -> `loss`."""
    return {name.partition("/")[2]: value for name, value in named.items()}


def names_of_kind(kind: str) -> list[str]:
    """List the names of a supervised run, without those of its held-out data."""
    own = [metric.value for metric in Metric if metric.value.startswith(f"{kind}/")]
    shared = [of_kind(metric.value, kind) for metric in Metric if metric.value.startswith("sft/")]
    plain = [metric.value for metric in (*_OF_STEPS, Metric.HOST_PEAK, Metric.DEVICE_PEAK, Metric.FAILED_SAVES)]
    stages = ("prompts", "logprobs", "update_policy", "check_replicas", "evaluate")
    return [
        *dict.fromkeys((*own, *shared)),
        *plain,
        *(Metric.STAGE_SECONDS.of(f"{stage}_s") for stage in stages),
        *(metric.of("update_policy") for metric in (Metric.TFLOPS, Metric.MFU, Metric.HFU, Metric.STAGE_TOKENS)),
        Metric.TFLOPS.of("step"),
    ]


_OF_STEPS = (Metric.STEP_SECONDS, Metric.TOKENS_PER_S, Metric.SAMPLES_PER_S, Metric.SAVE_SECONDS)


def finite_or_none(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by None, in lists and mappings too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(item) for item in value]
    return value


_OF_PART = ("", "/std", "/min", "/max", "/share")


def metric_names(parts: Sequence[str], roles: Sequence[str]) -> list[str]:
    """List the names of a run with these parts of the reward and these roles, without those of `open_beginnings`."""
    members = _members(parts, roles)
    names: list[str] = []
    critics = [role for role in roles if is_critic(role)]
    for metric in Metric:
        if metric.value.startswith("sft/") or (metric.value.startswith("critics/") and len(critics) < 2):
            continue
        found = [metric.of(one) for one in members.get(metric, ())] if metric.value.endswith("*") else [metric.value]
        if metric.value.startswith("critic/"):
            found = [of_critic(one, role) for role in critics for one in found]
        names += found
    return names


def open_beginnings(parts: Sequence[str]) -> tuple[str, ...]:
    """Return prefixes of names that are complete only when logged: numbers inside these parts, sets of evaluations, other
    families."""
    families = [metric.of("") for metric in Metric if metric.value.endswith("*") and metric not in _members((), ())]
    return (*families, *(Metric.REWARD_PART.of(f"{part}.") for part in parts))


def _members(parts: Sequence[str], roles: Sequence[str]) -> dict[Metric, Sequence[str]]:
    absent = () if "critic" in roles else ("update_critic",)
    stages = [*(one for one in MODEL_STAGES if one not in absent), *([REWARD_MODEL_STAGE] if "reward_model" in roles else [])]
    timed = [one for one in STAGES if one not in absent]
    return {
        Metric.REWARD_PART: [f"{part}{end}" for part in parts for end in _OF_PART],
        Metric.RULES: MOMENTS,
        Metric.MODELS: MOMENTS,
        Metric.EVAL_PART: parts,
        Metric.SHAPED: MOMENTS,
        Metric.ADVANTAGE: MOMENTS,
        Metric.VALUE: MOMENTS,
        Metric.RETURN: MOMENTS,
        Metric.TOTAL_LENGTH: MOMENTS,
        Metric.PUSH: ("bytes_sent", "bytes_received", "bytes_local", "seconds", "verified", "version"),
        Metric.STAGE_SECONDS: [f"{stage}_s" for stage in timed],
        Metric.STAGE_MEMORY: [f"{stage}_{suffix}" for stage in timed for suffix in ("peak_gib", "end_gib")],
        Metric.TFLOP: [f"{stage}/{role}" for stage in stages for role in roles],
        Metric.TFLOPS: [*stages, "step"],
        Metric.MFU: stages[1:],  # decoding has none
        Metric.HFU: stages[1:],
        Metric.STAGE_TOKENS: stages,
    }


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """Return the known name closest to `name`, as a whole or in the part after the group; None if none is close."""
    if near := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return near[0]
    tails = {known.split("/", 1)[1]: known for known in reversed(names)}
    near = difflib.get_close_matches(name.rsplit("/", 1)[-1], tails, n=1, cutoff=0.6)
    return tails[near[0]] if near else None
