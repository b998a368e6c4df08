"""Progress of a run. Everything else that a resume needs keeps its own state (engines, loader cursor, KL controller, RNG)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TrainerState:
    """Counters of a run. step: PPO steps done. episodes: responses trained on, to their end. tokens: sampled tokens trained on.

    policy_updates, critic_updates (of all critics): optimizer steps taken; policy_skipped, critic_skipped: those left out, as the
    gradients were not finite. warmup_ended: step after which the critics' warm-up ended early, or 0. entropy_coef: of the next
    step, if it is steered (`entropy.py`). best: metric, mode, step and value of the best step, or None (`best.py`). unfinished:
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

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])
