"""Rules about `rollout.push_every`: steps in which the sampler holds older weights than the policy. Imports no torch."""

from __future__ import annotations

from megappo.config.errors import problem
from megappo.config.evaluations import DEFAULT, evaluation_sets
from megappo.config.schema import TrainConfig


def push_problem(config: TrainConfig) -> str | None:
    """Weights that would be gone between two pushes, or evaluations of older weights than those of their step."""
    every = config.rollout.push_every
    if every == 1 or config.rollout.engine == "megatron":
        return None
    if config.rollout.sleep == "all":
        fix = f"vLLM would lose its weights after each step, and rollout.push_every = {every} pushes none for the next; use cache"
        return problem("rollout.sleep", "all", fix)
    for name, one in evaluation_sets(config).items():
        interval = one.every or 0
        if interval % every:
            written = name != DEFAULT and config.evaluations[name].every is not None
            key = f"evaluations.{name}.every" if written else "trainer.eval_every"
            below = interval - interval % every
            nearest = f"{below} or {below + every}" if below else str(every)
            fix = f"would evaluate older weights than those of the step; use a multiple of rollout.push_every = {every}: {nearest}"
            return problem(key, interval, fix)
    return None


def push_steps_problem(config: TrainConfig) -> str | None:
    """A push after which no step samples. trainer.steps: of the run, or None if the data will tell."""
    every, steps = config.rollout.push_every, config.trainer.steps
    if every > 1 and steps is not None and every >= steps:
        fix = f"the run has {steps} steps, so none would sample from trained weights; use less than {steps}"
        return problem("rollout.push_every", every, fix)
    return None
