"""Trajectories of several turns over any rollout engine: an environment answers each turn, and long contexts are compacted. The
environment takes and returns ids (`environment.py` makes one of text). Only trajectories that wait for its answer stop. A compacted
trajectory continues in a new sequence; the old one becomes a `Context` of the response (advantages: `algo/chains.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy
import torch
import torch.distributed as dist

from megappo.data.pictures import Pictures
from megappo.parallel.consensus import gathered
from megappo.rollout.turn import Turn
from megappo.rollout.types import (
    BATCH,
    Context,
    EnvironmentFault,
    Ids,
    KeptIds,
    Played,
    Replica,
    Request,
    Response,
    RolloutEngine,
    SamplingParams,
    Segment,
)
from megappo.runtime.user_code import NoVerdict

ROUND_S = 1.0
"""Seconds for which an idle rank waits for answers before it tells the others of its replica what it has."""

Environment = Callable[[Turn], Sequence[int] | None]
"""Returns the ids of the observation after a turn, or None to end the trajectory. A trajectory asks on one rank for all its turns.
A `NoVerdict` ends the trajectory without a score; an `EnvironmentFault` is raised on all ranks after the generation."""


@dataclass(frozen=True)
class Answer:
    """Reply of the environment to a turn."""

    observation: Sequence[int] | None
    """Ids that follow the turn; None ends the trajectory."""
    seconds: float | None = 0.0
    """None if the environment was not asked."""
    is_late: bool = False
    """The answer took too long."""
    no_verdict: str = ""
    """Why the trajectory ends here without a score (`NoVerdict`); "" if it does not."""
    fault: str | None = None
    """The environment's failure (`EnvironmentFault`), which ends the trajectory."""


UNASKED = Answer(None, None)


class Asked(NamedTuple):
    """A turn that another process answers. Once `future` is done, `take` reads the answer; it may raise as an `Environment`."""

    future: Future[Any]
    take: Callable[[], Answer]


@runtime_checkable
class SideEnvironment(Protocol):
    """An environment that answers several turns at once, beside generation and in any order."""

    def start(self, turn: Turn) -> Asked:
        """Start on a turn. A trajectory asks one turn at a time, always on the same rank."""
        ...

    def close(self) -> None: ...


class Left(NamedTuple):
    """The context that compaction replaces: all ids of the sequence, the request's prompt among them."""

    prompt: Ids
    context: Ids
    summary: Ids
    """Ids of the last turn if the policy was asked there for a summary, else empty."""
    observation: Ids
    """Ids that were to follow."""


@dataclass(frozen=True)
class Compaction:
    """Rule by which contexts are compacted."""

    max_tokens: int
    """A sequence that would be longer with the next observation is compacted."""
    prompt: Callable[[Left], Sequence[int]]
    """Returns the ids that the next sequence starts with, at most the longest prompt."""
    ask: tuple[int, ...] = ()
    """Ids that ask the policy for a summary, which is trained as any other turn; empty asks for none."""


@dataclass
class Trajectory:
    """A request and its trajectory so far; prompt, segments and kept belong to the current sequence."""

    request: Request
    sampling: SamplingParams
    prompt: Ids
    segments: list[Segment] = field(default_factory=list)
    kept: list[KeptIds] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    turns: int = 0
    observation: Ids | None = None
    """Ids that follow the summary that was asked for; None if none was."""
    memo: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    """One per call of the environment; memo is kept by the rank that asks it."""
    is_late: bool = False
    no_verdict: str = ""
    fault: str | None = None

    @property
    def ids(self) -> Ids:
        return numpy.concatenate([self.prompt, *(segment.tokens for segment in self.segments)]).astype(numpy.int32)

    @property
    def all_kept(self) -> KeptIds | None:
        return KeptIds.joined(self.kept)

    def give(self, ids: Sequence[int] | Ids, version: int) -> None:
        self.segments.append(Segment(numpy.asarray(ids, numpy.int32), None, version))

    def leave(self, prompt: Sequence[int]) -> None:
        self.contexts.append(Context(self.prompt, tuple(self.segments), self.all_kept))
        self.prompt, self.segments, self.kept = numpy.asarray(prompt, numpy.int32), [], []


class Trajectories:
    """Trajectories in work, and the rules by which they go on: the arguments of `TurnsRollout` with the same names."""

    def __init__(
        self,
        environment: Environment | SideEnvironment,
        *,
        max_turns: int,
        turn_tokens: int,
        max_prompt_tokens: int,
        compaction: Compaction | None = None,
    ) -> None:
        self._environment, self._compaction = environment, compaction
        self._max_turns, self._turn_tokens, self._max_prompt = max_turns, turn_tokens, max_prompt_tokens
        self._open: dict[int, Trajectory] = {}

    def _opened(self, request: Request, sampling: SamplingParams) -> Trajectory:
        trajectory = Trajectory(request, sampling, numpy.asarray(request.prompt, numpy.int32))
        self._open[request.number] = trajectory
        return trajectory

    def _ends(self, response: Response) -> bool:
        """True for a summary, and for a turn that ends its trajectory whatever an environment would say: none is asked."""
        trajectory = self._open[response.number]
        is_last = response.finish == "length" or trajectory.turns + 1 >= self._max_turns
        return trajectory.observation is not None or is_last

    def _turn(self, response: Response) -> Turn:
        trajectory = self._open[response.number]
        return self._turn_of(trajectory, trajectory.turns, response.tokens, trajectory.ids)

    def _turn_of(self, trajectory: Trajectory, index: int, tokens: Ids, context: Ids) -> Turn:
        request = trajectory.request
        of_trajectory = request.seed, request.source, trajectory.memo
        return Turn(request.number % BATCH, request.group, index, tokens, context, *of_trajectory)

    def _asked(self, turn: Turn) -> Asked | Answer:
        """Ask the environment about a turn; the answer may come later."""
        if isinstance(self._environment, SideEnvironment):
            return self._environment.start(turn)
        environment, start = self._environment, time.perf_counter()
        return settled(lambda: Answer(environment(turn), time.perf_counter() - start))

    def _gone_on(self, answered: Sequence[tuple[Response, Answer]]) -> tuple[list[Trajectory], list[Response]]:
        """Add answered turns to their trajectories; return those that go on, and the responses of those that end."""
        further, ended = [], []
        for response, answer in answered:
            trajectory = self._open[response.number]
            finish = self._take(trajectory, response, answer)
            if finish is None:
                further.append(trajectory)
            else:
                del self._open[response.number]
                ended.append(self._response(trajectory, finish))
        return further, ended

    def _take(self, trajectory: Trajectory, response: Response, answer: Answer) -> Literal["stop", "length"] | None:
        """Add a turn and what follows it; return how the trajectory ends, None if it goes on."""
        trajectory.segments += response.segments
        if response.kept is not None:
            trajectory.kept.append(response.kept)
        version = response.newest_version
        if answer.seconds is not None:
            trajectory.seconds.append(answer.seconds)
        if trajectory.observation is not None:  # the turn is the summary, cut or not
            self._compact(trajectory, response.tokens, trajectory.observation)
            trajectory.observation = None
            return None
        trajectory.turns += 1
        trajectory.is_late, trajectory.no_verdict, trajectory.fault = answer.is_late, answer.no_verdict, answer.fault
        if answer.observation is None:
            return "length" if answer.is_late else response.finish
        observation, compaction = numpy.asarray(answer.observation, numpy.int32), self._compaction
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

    def _compact(self, trajectory: Trajectory, summary: Ids, observation: Ids) -> None:
        assert self._compaction is not None
        given = numpy.asarray(trajectory.request.prompt, numpy.int32)
        prompt = self._compaction.prompt(Left(given, trajectory.ids, summary, observation))
        if not 0 < len(prompt) <= self._max_prompt:
            raise ValueError(f"compaction: a prompt of {len(prompt)} tokens, not of 1 to {self._max_prompt} as prompts may have")
        trajectory.leave(prompt)

    def _room(self, trajectory: Trajectory) -> int:
        return trajectory.sampling.max_tokens - sum(len(segment.tokens) for segment in trajectory.segments)

    def _request(self, trajectory: Trajectory) -> Request:
        """Return the request of the next turn."""
        one = trajectory
        drawn = one.turns + sum(len(context.segments) for context in one.contexts) + len(one.segments)
        limit = min(self._turn_tokens, self._room(one))
        # 2^64 over the golden ratio: every turn has a seed of its own, far from the others; the same seed would repeat draws.
        seed = (one.request.seed + 0x9E3779B97F4A7C15 * drawn) % 2**63
        return replace(one.request, prompt=one.prompt, before=tuple(one.segments), seed=seed, max_tokens=limit)

    def _response(self, trajectory: Trajectory, finish: Literal["stop", "length"]) -> Response:
        reached_limit = finish == "stop" and trajectory.turns == self._max_turns
        return Response(
            trajectory.request.number,
            tuple(trajectory.segments),
            finish,
            trajectory.all_kept,
            contexts=tuple(trajectory.contexts),
            prompt=trajectory.prompt if trajectory.contexts else None,
            fault=trajectory.fault,
            played=Played(trajectory.turns, tuple(trajectory.seconds), reached_limit, trajectory.is_late, trajectory.no_verdict),
        )


class TurnsRollout(Trajectories):
    """A rollout engine whose responses have several turns, sampled by `engine`.

    environment: called once for each turn, on the rank that answers for it. max_turns: per trajectory, without summaries.
    turn_tokens: most tokens of a turn. A sequence holds at most `SamplingParams.max_tokens` tokens after its prompt, observations
    included; a trajectory that reaches them ends, cut. max_prompt_tokens: of compacted prompts. together: trajectories that wait
    for a `SideEnvironment` go on together, when the engine is idle and all are answered, so batches and the last bits of log-probs
    do not depend on answer times. False: each goes on at once. pictures: where observations put images; None: they show none.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Environment | SideEnvironment,
        *,
        max_turns: int,
        turn_tokens: int,
        max_prompt_tokens: int,
        compaction: Compaction | None = None,
        together: bool = True,
        pictures: Pictures | None = None,
    ) -> None:
        limits = {"max_turns": max_turns, "turn_tokens": turn_tokens, "max_prompt_tokens": max_prompt_tokens}
        super().__init__(environment, **limits, compaction=compaction)
        self.name, self._engine, self._together, self.pictures = engine.name, engine, together, pictures
        self._group = None if engine.replica is None else engine.replica.group
        self._waiting: list[tuple[Response, Asked | Answer]] = []
        self._num_waiting = 0  # turns of all ranks of the replica that were drawn, and have not gone on or ended

    @property
    def replica(self) -> Replica | None:
        return self._engine.replica

    def meet(self, before: str) -> None:
        self._engine.meet(before)

    def serving(self) -> AbstractContextManager[None]:
        return self._engine.serving()

    @property
    def num_unfinished(self) -> int:
        return self._engine.num_unfinished + self._num_waiting

    @property
    def num_running(self) -> int:
        """Number of `rollout.types.RolloutEngine`, without trajectories that wait for the environment."""
        return self._engine.num_running

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        if any(request.goes_on for request in requests):
            raise ValueError("rollout.partial_rollout_tokens: trajectories of several turns do not go on in later steps; use null")
        self._ask_for([self._opened(request, sampling) for request in requests])

    def poll(self) -> list[Response]:
        before = self._engine.num_unfinished
        drawn = self._engine.poll() if before else []
        num_drawn = before - self._engine.num_unfinished  # equal on all ranks of the replica, as all that follows from it is
        self._num_waiting += num_drawn
        self._waiting += [(one, UNASKED if self._ends(one) else self._asked(self._turn(one))) for one in drawn]
        # Idle only if nothing ran before: the caller may have requests for an engine that has just become free.
        answered = self._answered(num_drawn, is_idle=not before)
        self._num_waiting -= len(answered)
        answered.sort(key=lambda one: one[0].number)
        mine = {response.number for response, _, is_mine in answered if is_mine}
        further, ended = self._gone_on([(response, answer) for response, answer, _ in answered])
        self._ask_for(further)
        return [one for one in ended if one.number in mine]

    def push_weights(self, version: int) -> dict[str, float]:
        return self._engine.push_weights(version)

    def sleep(self) -> None:
        self._engine.sleep()

    def close(self) -> None:
        if isinstance(self._environment, SideEnvironment):
            self._environment.close()
        self._engine.close()

    def _ask_for(self, trajectories: Sequence[Trajectory]) -> None:
        if trajectories:
            self._engine.submit([self._request(one) for one in trajectories], trajectories[0].sampling)

    def _answered(self, num_drawn: int, *, is_idle: bool) -> list[tuple[Response, Answer, bool]]:
        """Return the replica's turns that can go on or end now, the same on all its ranks; the flag marks this rank's own."""
        is_beside = isinstance(self._environment, SideEnvironment)
        if not self._num_waiting or (not num_drawn and not is_idle and (self._together or not is_beside)):
            return []
        asked = [one.future for _, one in self._waiting if isinstance(one, Asked)]
        if is_idle and asked:
            wait(asked, ROUND_S, ALL_COMPLETED if self._together else FIRST_COMPLETED)
        num_open = sum(not one.done() for one in asked)
        has_group = self._group is not None and dist.get_world_size(self._group) > 1
        if has_group and is_beside:
            counts = torch.tensor([num_open, len(self._waiting) - num_open])
            dist.all_reduce(counts, group=self._group)
            num_open, num_done = counts.tolist()
            if not num_done:
                return []
        joins = not self._together or (is_idle and not num_open)
        mine = self._take_waiting(joins)
        if not has_group:
            return [(response, answer, True) for response, answer in mine]
        # All ranks of a replica submit the same requests in the same order.
        ids, pictures = chain.from_iterable(answer.observation or () for _, answer in mine), self.pictures
        shown = {} if pictures is None else pictures.among(ids)
        everywhere = gathered((mine, shown), self._group)  # of the turns that ended now, tokens as arrays
        if pictures is not None:
            for _, theirs in everywhere:
                pictures.take(theirs)
        own = dist.get_rank(self._group)
        return [(*pair, rank == own) for rank, (theirs, _) in enumerate(everywhere) for pair in theirs]

    def _take_waiting(self, joins: bool) -> list[tuple[Response, Answer]]:
        taken: list[tuple[Response, Answer]] = []
        left: list[tuple[Response, Asked | Answer]] = []
        for response, one in self._waiting:
            if isinstance(one, Answer):
                taken.append((response, one))
            elif joins and one.future.done():
                taken.append((response, settled(one.take)))
            else:
                left.append((response, one))
        self._waiting = left
        return taken


def settled(take: Callable[[], Answer]) -> Answer:
    """Return the environment's answer, also where it fails."""
    try:
        return take()
    except EnvironmentFault as fault:
        # Raised here, it would leave the other ranks in the middle of a generation.
        return Answer(None, fault=str(fault))
    except NoVerdict as none:
        return Answer(None, no_verdict=none.reason)
