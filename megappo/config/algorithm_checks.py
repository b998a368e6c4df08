"""Rules about the keys of `algorithm` that belong together. Keys without effect: `dead_keys.py`. Imports no torch."""

from __future__ import annotations

from megappo.config.errors import problem
from megappo.config.schema import CorrectionConfig, TrainConfig


def group_problem(config: TrainConfig) -> str | None:
    """An estimator that compares the responses to a prompt, of which there is one."""
    if config.algorithm.compares_groups and config.rollout.samples_per_prompt == 1:
        fix = (
            "a prompt with one response has nothing to compare it with; set rollout.samples_per_prompt to 2 or more, "
            "or use remax or reinforce_plus_plus"
        )
        return problem("algorithm.estimator", config.algorithm.estimator, fix)
    return None


def sequence_loss_problem(config: TrainConfig) -> str | None:
    """Settings of tokens under GSPO, whose loss is one number of a response."""
    a = config.algorithm
    if a.objective != "gspo":
        return None
    if a.loss_aggregation != "seq-mean-token-mean":
        fix = "gspo's loss is one number of each response; set it to seq-mean-token-mean, or algorithm.objective to ppo"
        return problem("algorithm.loss_aggregation", a.loss_aggregation, fix)
    if a.high_entropy_token_ratio is not None:
        fix = "it chooses tokens, and gspo's ratio is of whole responses; remove it, or set algorithm.objective to ppo or cispo"
        return problem("algorithm.high_entropy_token_ratio", a.high_entropy_token_ratio, fix)
    return None


def correction_problem(config: TrainConfig) -> str | None:
    """A correction without bounds that leave anything, made twice, or of log-probs of two different distributions."""
    a, sampling = config.algorithm, config.rollout.sampling
    c = a.correction
    if c.has_low and (message := _bounds_problem(c)) is not None:
        return message
    if c.weighs and a.proximal == "behaviour":
        fix = f"its ratio is against the sampler's policy already, and {c.kind} would weigh it twice; set kind to none, or dis"
        return problem("algorithm.correction.kind", c.kind, f"algorithm.proximal is behaviour: {fix}")
    reads_sampler = c.weighs or a.old_logprob == "rollout_logprob"
    if reads_sampler and sampling.truncates and not sampling.replay_kept_tokens:
        key, value = ("proximal", a.proximal) if c.kind == "none" else ("correction.kind", c.kind)
        fix = "the sampler's log-probs are of fewer tokens than the trainer's; set rollout.sampling.replay_kept_tokens to true"
        return problem(f"algorithm.{key}", value, fix)
    return None


def _bounds_problem(c: CorrectionConfig) -> str | None:
    """Bounds of icepop or dis that leave no token, or none of the policy that sampled."""
    key, start = "algorithm.correction.low", 0.5 if c.kind == "icepop" else 0.7
    if c.low is None:
        return problem(key, None, f"{c.kind} leaves out ratios below it; set it, for example to {start}")
    if c.low >= c.high:
        return problem(key, c.low, f"leaves nothing below algorithm.correction.high = {c.high:g}; lower it")
    for name, bound, is_wrong, way in (("low", c.low, c.low >= 1, "lower"), ("high", c.high, c.high <= 1, "raise")):
        if c.kind == "dis" and is_wrong:
            fix = f"dis would leave out every token that is as likely as when it was sampled, of ratio 1; {way} it"
            return problem(f"algorithm.correction.{name}", bound, fix)
    return None
