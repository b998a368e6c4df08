"""Trajectories of several turns in an asynchronous run (`server.py`): each goes on as soon as its turn is answered. A push in the
middle of a turn is the engine's affair. Answers, and the engine steps at which they came, are in the event log.

What is kept of a trajectory is what was drawn and answered. One that goes on from a checkpoint, or behind the end of a log, has its
environment asked for the earlier turns again before the next: this builds its state anew, wherever that lives. The answers on
record stand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy
import torch
import torch.distributed as dist

from megappo.parallel.consensus import gathered
from megappo.parallel.device import ranks_of_run, world_group
from megappo.rollout.turn import Turn
from megappo.rollout.turns import UNASKED, Answer, Asked, Environment, SideEnvironment, Trajectories, Trajectory, settled
from megappo.rollout.types import Request, Response, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from megappo.rollout.vllm_outputs import Drawn, Episode


@dataclass
class _Question:
    """A turn that waits for its answer. On the rank that asks, turns: earlier ones that the environment does not know, and this
    one, as far as they were not asked; asked: the one that is being answered."""

    response: Response
    turns: deque[Turn] = field(default_factory=deque)
    asked: Asked | Answer | None = None


class Episodes(Trajectories):
    """Plays turns between the server's loop and the engine. All ranks of a replica hold all trajectories of it, and the one that
    answers for a request asks the environment. settings: as of `TurnsRollout`, but for `together`. A request without a record of
    the data has one turn."""

    def __init__(self, vllm: VllmEngine, environment: Environment | SideEnvironment, **settings: Any) -> None:
        super().__init__(environment, **settings)
        self.vllm = vllm
        self._questions: dict[int, _Question] = {}
        self._known: dict[int, int] = {}  # trajectory -> turns that its environment was asked for here

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, requests: Sequence[Request], sampling: SamplingParams, drawn: Mapping[int, Drawn] = {}) -> None:
        """Begin trajectories, or go on with what `drawn` has returned in another engine, by number."""
        for request in requests:
            trajectory, (segments, kept, episode) = self._opened(request, sampling), drawn.get(request.number, Drawn())
            if episode is not None:
                _restore(trajectory, episode)
            if episode is not None and episode.turn is not None:
                self._questions[request.number] = _Question(episode.turn)
            else:
                self.vllm.submit([self._request(trajectory)], sampling, {request.number: Drawn(segments, kept)})

    def drawn(self) -> dict[int, Drawn]:
        """Return what was drawn and answered of each trajectory. Right after a push this is all there is to know of them."""
        found = self.vllm.drawn() | dict.fromkeys(self._questions, Drawn())
        return {number: one._replace(episode=self._episode(number)) for number, one in found.items()}

    def take(self, turns: Sequence[Response]) -> list[Response]:
        """Take the turns that the engine has drawn; return the trajectories that end. turns: of the whole replica."""
        for one in turns:
            if not self._ends(one):
                self._questions[one.number] = _Question(one)
        return self._go_on([(one, UNASKED) for one in turns if one.number not in self._questions])

    def answers(self) -> dict[int, Answer]:
        """Ask the environment; return the answers that have come since the last call, by number. Collective over the replica."""
        found = {number: answer for number, one in self._questions.items() if (answer := self._answer(number, one)) is not None}
        group = self.vllm.replica.group
        if group is None or not self._questions:
            return found
        count = torch.tensor([len(found)])
        dist.all_reduce(count, group=group)
        parts = gathered(found, group) if int(count) else []
        return {number: answer for part in parts for number, answer in part.items()}

    def waits_for(self, number: int) -> bool:
        """True if a turn of this trajectory waits for its answer."""
        return number in self._questions

    def go_on(self, answers: Mapping[int, Answer]) -> list[Response]:
        """Let trajectories go on with these answers, in this order; return those that end."""
        return self._go_on([(self._questions.pop(number).response, answer) for number, answer in answers.items()])

    def drop(self) -> None:
        """Forget all trajectories."""
        for kept in (self._open, self._questions, self._known):
            kept.clear()

    def close(self) -> None:
        if isinstance(self._environment, SideEnvironment):
            self._environment.close()
        self.vllm.close()

    def _ends(self, response: Response) -> bool:
        return super()._ends(response) or self._open[response.number].request.source is None

    def _go_on(self, answered: Sequence[tuple[Response, Answer]]) -> list[Response]:
        further, ended = self._gone_on(answered)
        for one in further:
            self.vllm.submit([self._request(one)], one.sampling)
        for one in ended:
            self._known.pop(one.number, None)
        return ended

    def _answer(self, number: int, question: _Question) -> Answer | None:
        """Return the answer to a turn; None while there is none, and on ranks that do not ask."""
        if not self.vllm.replica.answers(number):
            return None
        if question.asked is None:
            question.turns += self._unknown(self._open[number], question.response)
        while True:
            if question.asked is None:
                turn = question.turns.popleft()
                question.asked, self._known[number] = self._asked(turn), turn.index + 1
            if isinstance(question.asked, Asked) and not question.asked.future.done():
                return None
            answer = question.asked if isinstance(question.asked, Answer) else settled(question.asked.take)
            if answer.fault is not None:
                rank = ranks_of_run(world_group())[dist.get_rank()]
                return replace(answer, fault=f"rank {rank} of the rollout half: {answer.fault}")
            if not question.turns or answer.no_verdict:
                return answer
            question.asked = None

    def _unknown(self, trajectory: Trajectory, response: Response) -> Iterator[Turn]:
        """Yield the turns that the environment was not asked for here, the last one among them."""
        known = self._known.get(response.number, 0)
        if known < trajectory.turns:
            yield from (turn for turn in self._earlier(trajectory) if turn.index >= known)
        yield self._turn_of(trajectory, trajectory.turns, response.tokens, trajectory.ids)

    def _earlier(self, trajectory: Trajectory) -> Iterator[Turn]:
        sequences = [(one.prompt, one.segments) for one in trajectory.contexts] + [(trajectory.prompt, trajectory.segments)]
        has_summaries, index = self._compaction is not None and bool(self._compaction.ask), 0
        for place, (ids, segments) in enumerate(sequences):
            runs = [(given, list(run)) for given, run in groupby(segments, key=lambda one: one.logprobs is None)]
            for number, (given, run) in enumerate(runs, 1):
                tokens = numpy.concatenate([one.tokens for one in run])
                is_summary = has_summaries and place < len(trajectory.contexts) and number == len(runs)
                if not given and not is_summary:
                    yield self._turn_of(trajectory, index, tokens, ids)
                    index += 1
                ids = numpy.concatenate([ids, tokens])

    def _episode(self, number: int) -> Episode:
        trajectory, question = self._open[number], self._questions.get(number)
        before, turn = self._response(trajectory, "length"), None if question is None else question.response
        return Episode(before, turn, trajectory.observation)


def _restore(trajectory: Trajectory, episode: Episode) -> None:
    before, played = episode.before, episode.before.played
    assert played is not None, "an episode has turns"
    trajectory.segments, trajectory.contexts = list(before.segments), list(before.contexts)
    trajectory.kept = [] if before.kept is None else [before.kept]
    if before.prompt is not None:
        trajectory.prompt = before.prompt
    trajectory.turns, trajectory.seconds, trajectory.observation = played.turns, list(played.seconds), episode.observation
