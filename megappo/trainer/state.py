"""Progress of a run. Everything else that a resume needs keeps its own state (engines, loader cursor, KL controller, RNG)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megappo.trainer.experience.table import SampleTable
from megappo.trainer.updates import UpdateSummary


@dataclass
class TrainerState:
    """Counters of a run. step: PPO steps done. episodes: responses trained on, to their end. tokens: sampled tokens trained on.

    policy_updates, critic_updates (of all critics): optimizer steps taken; policy_skipped, critic_skipped: those left out, as the
    gradients were not finite. warmup_ended: step after which the critics' warm-up ended early, or 0. entropy_coef: of the next
    step, if `extras.EntropyTarget` steers it. best: metric, mode, step and value of the best step, or None (`best.py`). unfinished:
    responses that go on in the next step, or None (`windows.py`).
    """

    step: int = 0
    episodes: int = 0
    tokens: int = 0
    policy_updates: int = 0
    critic_updates: int = 0
    policy_skipped: int = 0
    critic_skipped: int = 0
    warmup_ended: int = 0
    entropy_coef: float | None = None
    best: dict[str, Any] | None = None
    unfinished: dict[str, Any] | None = None

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

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])
