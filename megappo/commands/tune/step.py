"""Length of a PPO step whose roles take turns on the same ranks, work at the same time on ranks of their own, or both.

All ranks enter each stage of a step together (trainer/ppo.py). Within a stage a role begins as soon as all of its ranks are done
with the roles before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megappo.parallel.placement import Placement, ranks_by_roles

SCORES = "reward_model"  # its results are shared before any other role begins


class Work(NamedTuple):
    """A pass or the updates of a role in a step."""

    role: str
    phase: str
    """`forward` or `update`."""
    begin: float
    """Seconds after generation."""
    seconds: float

    @property
    def end(self) -> float:
        return self.begin + self.seconds


class Timetable:
    """Order of work in a step. placements: of every role and `rollout`. order: roles in the order of their passes."""

    def __init__(self, placements: Mapping[str, Placement], order: Sequence[str]) -> None:
        self.ranks = ranks_by_roles(placements)
        self._order = order
        # Ranks with the same roles are free at the same times: one number stands for all of them.
        self._places = {role: [at for at, names in enumerate(self.ranks) if role in names] for role in order}

    @property
    def takes_turns(self) -> bool:
        """True if no two roles ever work at the same time, so that the length of a step is a sum."""
        return len({tuple(places) for places in self._places.values()}) == 1

    def works(self, phases: Mapping[str, Mapping[str, float]]) -> list[Work]:
        """Passes and updates of a step, in order. phases: role -> seconds of `forward` and, if it trains, `update`."""
        done: list[Work] = []
        begin = 0.0
        for stage in self._stages(phases):
            free = [begin] * len(self.ranks)
            for role, phase, seconds in stage:
                work = Work(role, phase, max(free[at] for at in self._places[role]), seconds)
                for at in self._places[role]:
                    free[at] = work.end
                done.append(work)
            begin = max(free)  # an exchange over all ranks ends the stage
        return done

    def step_s(self, phases: Mapping[str, Mapping[str, float]]) -> float:
        """Seconds from the end of generation to the last update."""
        return max((work.end for work in self.works(phases)), default=0.0)

    def _stages(self, phases: Mapping[str, Mapping[str, float]]) -> Iterator[list[tuple[str, str, float]]]:
        forward = [(role, "forward", phases[role]["forward"]) for role in self._order if role in phases]
        yield [one for one in forward if one[0] == SCORES]
        yield [one for one in forward if one[0] != SCORES]
        updated = [role for role in self._order if "update" in phases.get(role, ())]
        updated.sort(key=lambda role: role == "policy")  # PPO's order: the critics first
        yield [(role, "update", phases[role]["update"]) for role in updated]
