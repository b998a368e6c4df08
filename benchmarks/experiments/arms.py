"""Arms of the experiments: keys over the baseline's, and the questions that they answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.experiments.tasks import COMMON, TASKS

if TYPE_CHECKING:
    from torch import Tensor

WARM_UP = 6  # steps
GROUP = 4  # responses to a prompt
UPDATES = 4  # of the policy in a step
APART: Mapping[str, Any] = {
    "run.num_ranks": 2,
    "rollout.ranks": "1",
    **{f"{role}.ranks": "0" for role in ("policy", "critic", "reference")},
}
"""A rank trains and a rank generates. Without staleness the runs are the baseline's (tests/trainer/test_asynchronous.py)."""
NO_CRITIC: Mapping[str, Any] = {"algorithm.lam": None, "critic": None}
"""Keys of a critic are taken back where there is none: they would have no effect, and are refused."""


def beside(max_staleness: int, correction: str) -> dict[str, Any]:
    """Keys of generation beside training."""
    return {**APART, "rollout.max_staleness": max_staleness, "algorithm.importance_sampling.type": correction}


@dataclass(frozen=True)
class Arm:
    """keys: over the baseline's; None takes a key back. group: responses to a prompt. shifted: False leaves the critic's outputs in
    their places."""

    title: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    group: int = GROUP
    shifted: bool = True


ARMS: Mapping[str, Arm] = {
    "baseline": Arm("baseline"),
    "pretrained": Arm(f"{WARM_UP} steps of value pretraining", {"critic.warmup": {"steps": WARM_UP, "lam": 1.0}}),
    "k2": Arm("K = 2", {"critic.ppo_epochs": 2}),
    "unshifted": Arm("no right shift", shifted=False),
    "n1": Arm("critic, n = 1", group=1),
    "grpo": Arm(f"GRPO, n = {GROUP}", {"algorithm.estimator": "grpo", **NO_CRITIC}),
    # In the reward, the KL of a group of equal scores is divided by its own standard deviation.
    "grpo_loss": Arm(
        f"GRPO, n = {GROUP}, KL in the loss",
        {"algorithm.estimator": "grpo", **NO_CRITIC, "algorithm.kl.placement": "loss", "algorithm.kl.estimator": "k3"},
    ),
    "age2": Arm("age 0 to 2", {"rollout.push_every": 3}),
    "age2_tis": Arm("age 0 to 2, tis", {"rollout.push_every": 3, "algorithm.importance_sampling.type": "tis"}),
    "age4": Arm("age 0 to 4", {"rollout.push_every": 5}),
    "age4_tis": Arm("age 0 to 4, tis", {"rollout.push_every": 5, "algorithm.importance_sampling.type": "tis"}),
    "stale1": Arm("max_staleness 1", beside(1, "none")),
    "stale1_tis": Arm("max_staleness 1, tis", beside(1, "tis")),
    "stale4": Arm("max_staleness 4", beside(4, "none")),
    "stale4_tis": Arm("max_staleness 4, tis", beside(4, "tis")),
    "stale8": Arm("max_staleness 8", beside(8, "none")),
    "stale8_tis": Arm("max_staleness 8, tis", beside(8, "tis")),
}
BASELINE = "baseline"


@dataclass(frozen=True)
class Experiment:
    question: str
    arms: tuple[str, ...]


EXPERIMENTS: Mapping[str, Experiment] = {
    "pretraining": Experiment("Value pretraining against none", (BASELINE, "pretrained")),
    "critic_updates": Experiment("Two critic updates to one of the policy, against one", (BASELINE, "k2")),
    "shift": Experiment("The right shift of values against none", (BASELINE, "unshifted")),
    "group": Experiment(
        "One response to a prompt and a critic against GRPO and four, at equal samples", ("n1", "grpo", "grpo_loss", BASELINE)
    ),
    "age": Experiment(
        "Responses by older weights, without and with correction", (BASELINE, "age2", "age2_tis", "age4", "age4_tis")
    ),
    "staleness": Experiment(
        "Generation beside training, without and with correction",
        (BASELINE, *(f"stale{k}{correction}" for k in (1, 4, 8) for correction in ("", "_tis"))),
    ),
}


def keys_of(task: str, arm: str) -> dict[str, Any]:
    """Keys over configs/quickstart.yaml."""
    of_task, of_arm = TASKS[task], ARMS[arm]
    sizes = {
        "rollout.samples_per_prompt": of_arm.group,
        "data.prompts_per_step": of_task.samples // of_arm.group,
        "algorithm.mini_batch_size": of_task.samples // UPDATES,
    }
    return {**COMMON, **sizes, **of_task.keys, **of_arm.keys}


def overrides(keys: Mapping[str, Any]) -> Iterator[str]:
    """`key=value` of the command line, sections that are taken back at last."""
    taken_back = [key for key, value in keys.items() if value is None]
    for key, value in keys.items():
        if not any(key.startswith(f"{section}.") for section in taken_back):
            yield f"{key}={str(value) if isinstance(value, Path) else json.dumps(value)}"


def unshifted(output: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """`algo.alignment.align_values` without the shift: value[t] = V(x_<=t), the value of the state after the token."""
    from megappo.algo.alignment import align_values

    return output, align_values(output, cu_seqlens)[1]
