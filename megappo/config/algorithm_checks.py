"""Rules about keys of `algorithm` that belong together, mini-batches included (see `checks.py`). Imports no torch."""

from __future__ import annotations

from megappo.config.batch import nearest_divisors, step_arithmetic, update_schedule
from megappo.config.errors import problem
from megappo.config.role_sections import key_of_role
from megappo.config.schema import TrainConfig

MAX_ADAPTIVE_STEP = 0.2  # clip of the error in the adaptive KL controller (Ziegler et al. 2019, section 2.2)
_OF_FEWER_TOKENS = "the sampler's log-probs are of fewer tokens than the trainer's; set rollout.sampling.replay_top_k_ids to true"


def group_problem(config: TrainConfig) -> str | None:
    """Refuse an estimator that compares the responses to a prompt when a prompt has only one."""
    if config.algorithm.compares_groups and config.rollout.samples_per_prompt == 1:
        fix = (
            "a prompt with one response has nothing to compare it with; set rollout.samples_per_prompt to 2 or more, "
            "or use remax or reinforce_plus_plus"
        )
        return problem("algorithm.estimator.type", config.algorithm.estimator.type, fix)
    return None


def critics_problem(config: TrainConfig) -> str | None:
    """Refuse samples that do not divide among several critics, and comparisons per token where the critics learn per turn."""
    a, samples, parts = config.algorithm, step_arithmetic(config).samples, len(config.critics_in_use)
    if parts < 2:
        return None
    for key in ("disagreement_mask_ratio", "disagreement_entropy_ratio"):
        if a.by_turns and (ratio := getattr(a, key)) is not None:
            fix = "it compares values of tokens, and critics learn those of turns (algorithm.estimator.level)"
            return problem(f"algorithm.{key}", ratio, f"{fix}; remove it, or use token")
    if samples % parts:
        fix = f"with {parts} critics the {samples} samples of a step must divide by {parts}, as each trains on its own part"
        return problem("data.prompts_per_step", config.data.prompts_per_step, f"{fix}; change it, or rollout.samples_per_prompt")
    shared = any(critic.mini_batch_size is None for critic in config.critics_in_use.values())
    if shared and a.mini_batch_size % parts:
        fix = f"does not divide by the {parts} critics, each of which trains on its own part; use a multiple of {parts}"
        return problem("algorithm.mini_batch_size", a.mini_batch_size, f"{fix}, or set mini_batch_size of every critic")
    return None


def sequence_loss_problem(config: TrainConfig) -> str | None:
    """Refuse per-token settings under GSPO, whose loss is one number per response."""
    a = config.algorithm
    if a.loss.type != "gspo":
        return None
    if a.loss_aggregation != "seq-mean-token-mean":
        fix = "gspo's loss is one number of each response; set it to seq-mean-token-mean, or algorithm.loss to ppo"
        return problem("algorithm.loss_aggregation", a.loss_aggregation, fix)
    for key in ("high_entropy_token_ratio", "disagreement_mask_ratio"):
        if (ratio := getattr(a, key)) is not None:
            fix = "it chooses tokens, and gspo's ratio is of whole responses; remove it, or set algorithm.loss to ppo or cispo"
            return problem(f"algorithm.{key}", ratio, fix)
    return None


def importance_sampling_problem(config: TrainConfig) -> str | None:
    """Refuse a correction whose bounds leave nothing, that is made twice, or that compares log-probs of two distributions."""
    a, sampling = config.algorithm, config.rollout.sampling
    c = a.importance_sampling
    if c.type == "icepop" and c.low >= c.high:
        fix = f"leaves nothing below algorithm.importance_sampling.high = {c.high:g}; lower it"
        return problem("algorithm.importance_sampling.low", c.low, fix)
    if c.type != "none" and a.old_logprob == "rollout_logprob":
        of = "dis" if a.loss.type == "dis" else "proximal behaviour"
        fix = f"algorithm.loss ({of}) has the ratio to the sampler already, and {c.type} would weigh it twice; set it to none"
        return problem("algorithm.importance_sampling.type", c.type, fix)
    reads_sampler = c.type != "none" or a.old_logprob == "rollout_logprob"
    if reads_sampler and sampling.truncates and not sampling.replay_top_k_ids:
        if c.type != "none":
            return problem("algorithm.importance_sampling.type", c.type, _OF_FEWER_TOKENS)
        key, value = ("type", "dis") if a.loss.type == "dis" else ("proximal", "behaviour")
        return problem(f"algorithm.loss.{key}", value, _OF_FEWER_TOKENS)
    return None


def vtrace_problem(config: TrainConfig) -> str | None:
    """Refuse V-trace with bounds out of order, with a second weight of the same ratio, or with log-probs of two distributions."""
    a, sampling, bounds = config.algorithm, config.rollout.sampling, config.algorithm.estimator
    if bounds.type != "vtrace":
        return None
    if bounds.c_bar > bounds.rho_bar:
        fix = f"is above algorithm.estimator.rho_bar = {bounds.rho_bar:g}, which V-trace's fixed point needs as its bound; lower it"
        return problem("algorithm.estimator.c_bar", bounds.c_bar, fix)
    if a.importance_sampling.type != "none":
        fix = "vtrace weighs advantages by the same ratio already; set it to none, or algorithm.estimator to gae"
        return problem("algorithm.importance_sampling.type", a.importance_sampling.type, fix)
    if a.old_logprob == "rollout_logprob":
        key, value, other = ("type", "dis", "ppo") if a.loss.type == "dis" else ("proximal", "behaviour", "recomputed")
        fix = f"its ratio is against the sampler's policy, by which vtrace weighs advantages already; set it to {other}"
        return problem(f"algorithm.loss.{key}", value, fix)
    if sampling.truncates and not sampling.replay_top_k_ids:
        return problem("algorithm.estimator.type", bounds.type, _OF_FEWER_TOKENS)
    return None


def dynamic_sampling_problem(config: TrainConfig) -> str | None:
    """Refuse dynamic sampling where groups cannot differ, where differences do not matter, or by an unknown part of the reward."""
    section, key = config.algorithm.dynamic_sampling, "algorithm.dynamic_sampling"
    if section is None:
        return None
    if config.rollout.samples_per_prompt == 1:
        fix = "one response to a prompt has none to differ from; set rollout.samples_per_prompt to 2 or more, or this to null"
        return problem(key, section.model_dump(exclude_unset=True), fix)
    if config.algorithm.estimator.type == "remax":
        fix = "remax compares with a greedy response, from which equal ones differ too; set this to null, or use grpo or rloo"
        return problem(key, section.model_dump(exclude_unset=True), fix)
    labels = config.reward.all_parts
    if section.metric is not None and section.metric not in labels:
        return problem(f"{key}.metric", section.metric, f"no part of the reward has this label; name one of {', '.join(labels)}")
    return None


def distillation_problem(config: TrainConfig) -> str | None:
    """Refuse distillation without a teacher, and rewards of tokens that an estimator would add up over the response."""
    distillation, estimator = config.algorithm.distillation, config.algorithm.estimator
    if distillation is None:
        return None
    if config.teacher.model is None:
        return problem("teacher.model", None, "algorithm.distillation needs a teacher; name its checkpoint, or remove that section")
    if distillation.placement == "reward" and estimator.compares_groups:
        fix = f"{estimator.type} compares whole responses, so what the teacher says of each token would be lost; use advantage"
        return problem("algorithm.distillation.placement", distillation.placement, fix)
    return None


def mini_batch_problem(config: TrainConfig) -> str | None:
    return _mini_batch_divides("algorithm.mini_batch_size", config.algorithm.mini_batch_size, config)


def critic_mini_batch_problem(config: TrainConfig) -> str | None:
    """Refuse a critic's own mini-batch that does not divide its share of the samples."""
    for role, critic in config.critics_in_use.items():
        if critic.mini_batch_size is not None:
            key, parts = f"{key_of_role(role)}.mini_batch_size", update_schedule(config, role).part.count
            if (message := _mini_batch_divides(key, critic.mini_batch_size, config, parts)) is not None:
                return message
    return None


def _mini_batch_divides(key: str, size: int, config: TrainConfig, parts: int = 1) -> str | None:
    samples = step_arithmetic(config).samples // parts
    if samples % size == 0:
        return None
    product = (
        f"data.prompts_per_step {config.data.prompts_per_step} x rollout.samples_per_prompt {config.rollout.samples_per_prompt}"
        + (f" / {parts} critics" if parts > 1 else "")
    )
    left = f"{samples % size} would be dropped" if size < samples else "not one mini-batch would be full"
    nearest = " or ".join(str(d) for d in nearest_divisors(samples, size))
    return problem(key, size, f"must divide the {samples} samples of a step ({product}): {left}; use {nearest}")


def adaptive_kl_problem(config: TrainConfig) -> str | None:
    """Refuse a KL factor that stays 0 under the adaptive controller, or a horizon so short that one step may flip its sign."""
    kl, samples = config.algorithm.kl, step_arithmetic(config).samples
    if kl.placement != "reward" or kl.controller.type != "adaptive":
        return None
    if kl.coef == 0:
        fix = "the adaptive controller multiplies it and 0 stays 0; use a start value such as 0.001"
        return problem("algorithm.kl.coef", 0.0, fix)
    # The controller multiplies by 1 + error * samples / horizon, with the error clipped to +-MAX_ADAPTIVE_STEP.
    least, horizon = int(samples * MAX_ADAPTIVE_STEP) + 1, kl.controller.horizon
    if horizon < least:
        fix = f"with {samples} samples per step the KL factor could fall to 0 or below; use at least {least}"
        return problem("algorithm.kl.controller.horizon", horizon, fix)
    return None
