"""Rules about `rollout.window_tokens`: responses that are drawn over several steps. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megappo.config.errors import problem
from megappo.config.schema import TrainConfig


def window_problem(config: TrainConfig) -> str | None:
    """Windows that cut nothing, or beside what needs whole responses, complete groups or all turns of a response."""
    window, longest = config.rollout.window_tokens, config.rollout.max_response_tokens
    if window is None:
        return None
    if window >= longest:
        fix = f"every response ends within a step: none has more than rollout.max_response_tokens {longest}; lower it, or use null"
        return problem("rollout.window_tokens", window, fix)
    for key, value, because in _needs_whole_responses(config):
        return problem(key, value, f"{because}; change it, or set rollout.window_tokens to null")
    return None


def _needs_whole_responses(config: TrainConfig) -> Iterator[tuple[str, Any, str]]:
    """(key, value, why it has no meaning beside windows)."""
    a = config.algorithm
    if a.estimator != "gae":
        yield (
            "algorithm.estimator",
            a.estimator,
            "responses that go on have no reward yet, and windows need gae's values in its place",
        )
    if a.gae_level == "turn":
        yield "algorithm.gae_level", "turn", "a turn that goes on has its value at a token of an earlier step"
    if a.dynamic_sampling.enable:
        yield (
            "algorithm.dynamic_sampling.enable",
            True,
            "it compares the scores of all responses to a prompt, which end in other steps",
        )
    if config.critic_b is not None:
        section = config.critic_b.model_dump(mode="json", exclude_unset=True)
        yield "critic_b", section, "critics share responses by their places in a step, which change as responses go on"
    if a.objective == "gspo":
        yield "algorithm.objective", "gspo", "its ratio is of a whole response, of which a step has some tokens"
    if a.sequence_advantages:
        yield "algorithm.sequence_advantages", True, "it is the mean over a whole response, of which a step has some tokens"
    if a.correction.level != "token":
        yield "algorithm.correction.level", a.correction.level, "its ratio is of a whole response, of which a step has some tokens"
    if a.kl.placement != "none" and a.kl.controller == "adaptive":
        yield "algorithm.kl.controller", "adaptive", "it steers by the KL of whole responses, of which a step has some tokens"
    if config.reference.refresh_above_kl is not None:
        key = "reference.refresh_above_kl"
        yield key, config.reference.refresh_above_kl, "it goes by the KL of whole responses, of which a step has some tokens"
    if config.rollout.stop:
        yield "rollout.stop", list(config.rollout.stop), "a string may lie across two windows, where no step sees all of it"
