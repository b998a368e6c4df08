"""Trajectories of several turns around any rollout engine: an environment answers each turn, and contexts that grow too long are
compacted.

The environment is the user's: ids in, ids out (`environment.py` makes one of text). A compacted trajectory goes on in a new
sequence, and the one before it becomes a `Context` of its response (`algo/chains.py` has what that means for advantages).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy
import torch.distributed as dist

from megappo.rollout.types import (
    Context,
    EnvironmentFault,
    Ids,
    KeptIds,
    Replica,
    Request,
    Response,
    RolloutEngine,
    SamplingParams,
    Segment,
)

if TYPE_CHECKING:
    from megappo.data.prompts import Prompt


@dataclass(frozen=True, eq=False)
class Turn:
    """A turn of the policy, as the environment sees it. number, group: of the request. index: of the turn, from 0. tokens: int32
    ids that the policy sampled. context: ids before them in the sequence.

    seed: of the trajectory, 63 bits, the same after a resume. prompt: of the data; None if the request has none. memo: the
    trajectory's own, empty at its first turn: what the environment wants to find again at the next.
    """

    number: int
    group: int
    index: int
    tokens: Ids
    context: Ids
    seed: int = 0
    prompt: Prompt | None = None
    memo: dict[str, Any] = field(default_factory=dict)


Environment = Callable[[Turn], Sequence[int] | None]
"""Ids of the observation that follows a turn, or None: the trajectory ends. All turns of a trajectory are asked about on one rank.
An `EnvironmentFault` ends it, and is raised on all ranks after the generation."""


class Left(NamedTuple):
    """A context that is left. prompt: of the request. context: all ids of the sequence. summary: ids of its last turn, in which the
    policy was asked for a summary; empty if it was not. observation: ids that were to follow."""

    prompt: Ids
    context: Ids
    summary: Ids
    observation: Ids


@dataclass(frozen=True)
class Compaction:
    """max_tokens: of a sequence with the next observation, above which its context is compacted. prompt: ids that the next sequence
    begins with; it may be as long as prompts may be. ask: ids that ask the policy for a summary, which it is trained to write as
    any other turn; empty to ask for none."""

    max_tokens: int
    prompt: Callable[[Left], Sequence[int]]
    ask: tuple[int, ...] = ()


def keep_ends(first: int, last: int) -> Callable[[Left], list[int]]:
    """For `Compaction.prompt`: the first and the last ids of what is left, the observation included."""

    def prompt(left: Left) -> list[int]:
        ids = [*left.context.tolist(), *left.observation.tolist()]
        return ids if len(ids) <= first + last else [*ids[:first], *ids[len(ids) - last :]]

    return prompt


@dataclass
class _Trajectory:
    """A request and what there is of its trajectory. prompt, segments, kept: of the sequence at hand. observation: what follows the
    summary that the policy was asked for, None if it was not asked. memo, fault: of the environment, on the rank that asks it."""

    request: Request
    prompt: Ids
    segments: list[Segment] = field(default_factory=list)
    kept: list[KeptIds] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    turns: int = 0
    observation: Ids | None = None
    memo: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None

    @property
    def ids(self) -> Ids:
        return numpy.concatenate([self.prompt, *(segment.tokens for segment in self.segments)]).astype(numpy.int32)

    @property
    def num_behind_prompt(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def all_kept(self) -> KeptIds | None:
        if not self.kept:
            return None
        return KeptIds(*(numpy.concatenate([getattr(one, name) for one in self.kept]) for name in ("counts", "ids")))

    def give(self, ids: Sequence[int] | Ids, version: int) -> None:
        self.segments.append(Segment(numpy.asarray(ids, numpy.int32), None, version))

    def leave(self, prompt: Sequence[int]) -> None:
        """Go on in a new sequence."""
        self.contexts.append(Context(self.prompt, tuple(self.segments), self.all_kept))
        self.prompt, self.segments, self.kept = numpy.asarray(prompt, numpy.int32), [], []


class TurnsRollout:
    """A rollout engine whose responses have several turns. engine: samples them.

    environment: called once for each turn, on the rank that answers for it. max_turns: of a trajectory, summaries not counted.
    turn_tokens: most tokens of a turn. A sequence has at most `SamplingParams.max_tokens` tokens behind its prompt, given ones
    included; a trajectory that reaches them ends, cut. max_prompt_tokens: of compacted prompts.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Environment,
        *,
        max_turns: int,
        turn_tokens: int,
        max_prompt_tokens: int,
        compaction: Compaction | None = None,
    ) -> None:
        self.name, self._engine, self._environment = engine.name, engine, environment
        self._max_turns, self._turn_tokens, self._max_prompt = max_turns, turn_tokens, max_prompt_tokens
        self._compaction = compaction
        self._group = None if engine.replica is None else engine.replica.group
        self._open: dict[int, _Trajectory] = {}
        self._sampling: SamplingParams | None = None

    @property
    def replica(self) -> Replica | None:
        return self._engine.replica

    def meet(self, before: str) -> None:
        """See `rollout.types.RolloutEngine`."""
        self._engine.meet(before)

    def serving(self) -> AbstractContextManager[None]:
        """See `rollout.types.RolloutEngine`."""
        return self._engine.serving()

    @property
    def num_unfinished(self) -> int:
        return self._engine.num_unfinished

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """See `rollout.types.RolloutEngine`."""
        if any(request.goes_on for request in requests):
            raise ValueError("rollout.window_tokens: trajectories of several turns do not go on in later steps; use null")
        self._sampling = sampling
        for request in requests:
            self._open[request.number] = _Trajectory(request, numpy.asarray(request.prompt, numpy.int32))
        self._ask_for([self._open[request.number] for request in requests])

    def poll(self) -> list[Response]:
        """See `rollout.types.RolloutEngine`."""
        before = self._engine.num_unfinished
        responses = self._engine.poll()
        if self._engine.num_unfinished == before:  # equal on all ranks of the replica
            return []
        answered = [(one, self._observed(one)) for one in responses]
        mine = {one.number for one in responses}
        # All ranks of a replica submit the same requests in the same order.
        if self._group is not None and dist.get_world_size(self._group) > 1:
            everywhere: list[list[tuple[Response, Ids | None]]] = [[]] * dist.get_world_size(self._group)
            dist.all_gather_object(everywhere, answered, group=self._group)  # turns, not tokens: few and small
            answered = [pair for theirs in everywhere for pair in theirs]
        ended, further = [], []
        for response, observation in sorted(answered, key=lambda pair: pair[0].number):
            trajectory = self._open[response.number]
            finish = self._take(trajectory, response, observation)
            if finish is None:
                further.append(trajectory)
                continue
            del self._open[response.number]
            if response.number in mine:
                ended.append(_response(trajectory, finish))
        self._ask_for(further)
        return ended

    def push_weights(self, version: int) -> dict[str, float]:
        """See `rollout.types.RolloutEngine`."""
        return self._engine.push_weights(version)

    def sleep(self) -> None:
        """See `rollout.types.RolloutEngine`."""
        self._engine.sleep()

    def close(self) -> None:
        """See `rollout.types.RolloutEngine`."""
        self._engine.close()

    def _observed(self, response: Response) -> Ids | None:
        """Observation after a turn; None where the environment is not asked, or ends the trajectory."""
        trajectory = self._open[response.number]
        if trajectory.observation is not None or response.finish == "length" or trajectory.turns + 1 >= self._max_turns:
            return None
        request = trajectory.request
        of_trajectory = request.seed, request.source, trajectory.memo
        turn = Turn(request.number, request.group, trajectory.turns, response.tokens, trajectory.ids, *of_trajectory)
        try:
            observation = self._environment(turn)
        except EnvironmentFault as fault:
            # Raised here it would leave the other ranks in the middle of a generation.
            trajectory.fault = str(fault)
            return None
        return None if observation is None else numpy.asarray(observation, numpy.int32)

    def _take(self, trajectory: _Trajectory, response: Response, observation: Ids | None) -> Literal["stop", "length"] | None:
        """Add a turn and what follows it; how the trajectory ends if it ends with it."""
        trajectory.segments += response.segments
        if response.kept is not None:
            trajectory.kept.append(response.kept)
        version = response.newest_version
        if trajectory.observation is not None:  # the turn is the summary, cut or not
            self._compact(trajectory, response.tokens, trajectory.observation)
            trajectory.observation = None
            return None
        trajectory.turns += 1
        if observation is None:
            return response.finish
        compaction = self._compaction
        if compaction is not None and len(trajectory.ids) + len(observation) > compaction.max_tokens:
            if not compaction.ask:
                self._compact(trajectory, numpy.empty(0, numpy.int32), observation)
            else:
                trajectory.observation = observation
                trajectory.give(compaction.ask, version)
        else:
            trajectory.give(observation, version)
        if self._room(trajectory) > 0:
            return None
        del trajectory.segments[-1]  # an observation that nothing can follow
        return "length"

    def _compact(self, trajectory: _Trajectory, summary: Ids, observation: Ids) -> None:
        assert self._compaction is not None
        given = numpy.asarray(trajectory.request.prompt, numpy.int32)
        prompt = self._compaction.prompt(Left(given, trajectory.ids, summary, observation))
        if not 0 < len(prompt) <= self._max_prompt:
            raise ValueError(f"compaction: a prompt of {len(prompt)} tokens, not of 1 to {self._max_prompt} as prompts may have")
        trajectory.leave(prompt)

    def _room(self, trajectory: _Trajectory) -> int:
        assert self._sampling is not None
        return self._sampling.max_tokens - trajectory.num_behind_prompt

    def _ask_for(self, trajectories: Sequence[_Trajectory]) -> None:
        """Submit the next turn of each."""
        requests = []
        for one in trajectories:
            drawn = one.turns + sum(len(context.segments) for context in one.contexts) + len(one.segments)
            limit = min(self._turn_tokens, self._room(one))
            # A turn drawn by the seed of another would repeat its draws.
            seed = (one.request.seed + 0x9E3779B97F4A7C15 * drawn) % 2**63
            requests.append(replace(one.request, prompt=one.prompt, before=tuple(one.segments), seed=seed, max_tokens=limit))
        if requests:
            assert self._sampling is not None
            self._engine.submit(requests, self._sampling)


def _response(trajectory: _Trajectory, finish: Literal["stop", "length"]) -> Response:
    return Response(
        trajectory.request.number,
        tuple(trajectory.segments),
        finish,
        trajectory.all_kept,
        contexts=tuple(trajectory.contexts),
        prompt=trajectory.prompt if trajectory.contexts else None,
        fault=trajectory.fault,
    )
