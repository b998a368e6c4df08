"""Seconds for which ranks have work in a step: roles apart wait for each other at the end of every stage."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.commands.tune.candidates import ROLLOUT, Choice
from megappo.config.rank_ranges import ranges_text


@dataclass(frozen=True)
class RankUse:
    """Ranks on which the same live. names: roles and `rollout`. busy_s: seconds of a step in which one of them works."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    busy_s: float
    step_s: float

    @property
    def idle(self) -> float:
        """Share of the step without work."""
        return max(0.0, 1 - self.busy_s / self.step_s)

    def __str__(self) -> str:
        what = "rank" if len(self.ranks) == 1 else "ranks"
        return f"{what} {ranges_text(self.ranks)} ({', '.join(self.names)}) idle {self.idle:.0%}"


def rank_uses(choice: Choice) -> list[RankUse]:
    """Use of all ranks in a step, those with the same roles together."""
    phases = {role: one.cost.phases for role, one in choice.roles.items()}
    by_vllm, found = choice.rollout.tp is not None, []
    for names, ranks in choice.timetable.ranks.items():
        busy = sum(sum(phases[role].values()) for role in names if role in phases)
        busy += choice.generate_s if (ROLLOUT if by_vllm else "policy") in names else 0.0
        busy += choice.push_s if "policy" in names or ROLLOUT in names else 0.0
        # `rollout` of the policy's own engine is no other inhabitant.
        shown = tuple(name for name in names if by_vllm or name != ROLLOUT)
        found.append(RankUse(shown, ranks, busy, choice.total_s))
    return found


def idle_share(choice: Choice) -> float:
    """Share of all ranks' time in a step without work."""
    uses = rank_uses(choice)
    return sum(one.idle * len(one.ranks) for one in uses) / sum(len(one.ranks) for one in uses)
