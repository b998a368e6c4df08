"""Progress of a run. Engines, loader cursor, KL controller and RNG keep their own state for a resume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megappo.trainer.experience.table import SampleTable
from megappo.trainer.updates import UpdateSummary


@dataclass
class TrainerState:
    """Counters of a run."""

    step: int = 0
    """PPO steps done."""
    episodes: int = 0
    """Responses trained on to their end."""
    tokens: int = 0
    """Sampled tokens trained on."""
    policy_updates: int = 0
    """Optimizer steps of the policy."""
    critic_updates: int = 0
    """Optimizer steps of all critics."""
    policy_skipped: int = 0
    """Updates of the policy without an optimizer step, because gradients were not finite."""
    critic_skipped: int = 0
    """Updates of all critics without an optimizer step."""
    warmup_ended: int = 0
    """Step after which the critics' warm-up ended early, or 0."""
    entropy_coef: float | None = None
    """Coefficient of the next step, if `extras.EntropyTarget` steers it."""
    best: dict[str, Any] | None = None
    """Metric, mode, step and value of the best step (`save_schedule.py`)."""
    unfinished: str | None = None
    """Responses that the next step continues (`partial_rollouts.py`)."""

    def count(self, table: SampleTable, critics: Iterable[UpdateSummary], policy: UpdateSummary | None = None) -> None:
        """Count a step. table: of all its samples. critics, policy: their updates."""
        critics = list(critics)
        self.step += 1
        self.episodes += int(table.ends.sum())
        self.tokens += int(table.sampled.sum())
        self.critic_updates += sum(critic.num_updates for critic in critics)
        self.critic_skipped += sum(critic.skipped for critic in critics)
        if policy is not None:
            self.policy_updates += policy.num_updates
            self.policy_skipped += policy.skipped

    def count_examples(self, examples: int, tokens: int, *, applied: bool) -> None:
        """Count a step of a supervised run. tokens: learned. applied: the optimizer took its step."""
        self.step += 1
        self.episodes += examples
        self.tokens += tokens
        self.policy_updates += applied
        self.policy_skipped += not applied

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])
