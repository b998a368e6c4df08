"""Rules about the keys of `algorithm` that belong together. Keys without effect: `dead_keys.py`. Imports no torch."""

from __future__ import annotations

from megappo.config.errors import problem
from megappo.config.schema import TrainConfig


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
    """A correction without bounds that leave anything, or of log-probs of two different distributions."""
    c, sampling = config.algorithm.correction, config.rollout.sampling
    if c.kind == "none":
        return None
    if c.kind == "icepop" and c.low is None:
        return problem("algorithm.correction.low", None, "icepop leaves out ratios below it; set it, for example to 0.5")
    if c.kind == "icepop" and c.low is not None and c.low >= c.high:
        fix = f"leaves nothing below algorithm.correction.high = {c.high:g}; lower it"
        return problem("algorithm.correction.low", c.low, fix)
    if sampling.truncates and not sampling.replay_kept_tokens:
        fix = "the sampler's log-probs are of fewer tokens than the trainer's; set rollout.sampling.replay_kept_tokens to true"
        return problem("algorithm.correction.kind", c.kind, fix)
    return None
