"""The rollout half of an asynchronous run as the training half sees it: an engine on other ranks, which has begun a step's
responses before the step."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from megappo.parallel.totals import total
from megappo.rollout.build import RolloutElsewhere
from megappo.rollout.hand_over import take_responses, take_snapshots
from megappo.rollout.meetings import Hosts
from megappo.rollout.types import Response, Segment
from megappo.runtime.ending import StopRequest
from megappo.runtime.sections import ROLLOUT_HALF, Sections
from megappo.telemetry.metrics import Metric

T = TypeVar("T")
STEP, EVALUATION = "step/", "evaluation/"
"""Start of the names of a step's batches, and of an evaluation's."""
CANARY, GREEDY = "canary/", "greedy/"
"""Start of the names of batches that are drawn to be judged, and of greedy ones that a step's responses are compared with."""
IN_FLIGHT = "rollout-{}.bin"
"""File of a checkpoint with what a replica has drawn and not handed over."""


class RolloutHalf(RolloutElsewhere):
    """Stand-in for the engine on the training ranks (`rollout.types.RolloutEngine`), from which `generation.generate` takes whole
    batches. Methods are collective over the training half. meetings: of this rank. checkpoints: directory of the run's. stop: of
    this rank; rank 0's hears of rollout ranks that were asked to stop. max_staleness: in steps, no token is older. recompute_every:
    steps between pushes after which a kept cache (`rollout.cache_after_push`) is computed again; 0 for none."""

    def __init__(
        self,
        meetings: Hosts,
        sections: Sections,
        checkpoints: Path,
        stop: StopRequest,
        max_staleness: int,
        recompute_every: int = 0,
    ) -> None:
        super().__init__("vllm", None)
        self._meetings, self._channel, self._sections = meetings, meetings.channel, sections
        self._checkpoints, self._stop, self._recompute_every = checkpoints, stop, recompute_every
        self._version: int | None = None
        self._max_staleness = max_staleness
        self._drawn_again: Sequence[str] = ()
        self._begun: dict[int, Sequence[int]] = {}  # steps whose responses have begun -> rows
        self._waited_s, self._ages, self._of_replicas = 0.0, [(0, 0)], list[Mapping[str, float]]()  # of a step's batches

    def build(self, engine: Callable[[], RolloutElsewhere]) -> RolloutHalf:
        """Build the sender of the weights over all ranks."""
        with self._meetings.outside():
            self._sync = engine()._sync
        return self

    def _rebuild(self, destinations: tuple[int, ...]) -> None:
        assert self._sync is not None
        self._sync = self._sync.rerouted(destinations)

    def ask(self, step: int, rows: Sequence[int]) -> None:
        """Let the responses of a step begin. rows: its prompts in the data."""
        self._begun[step] = rows
        self._channel.tell("requests", step=step, rows=list(rows))

    def ask_refill(self, step: int, rows: Sequence[int], num_before: int) -> None:
        """Let further responses of a step begin before all that waits, once its last batch was taken: batch `step/N` again.
        num_before: samples that the step has drawn."""
        self._channel.tell("refill", step=step, rows=list(rows), before=num_before)

    def ask_beside(self, name: str, step: int, rows: Sequence[int]) -> None:
        """Let a batch beside the step's begin before all that waits, under the weights before `step`: name + step, of CANARY and
        GREEDY, with a sequence for each of `rows`."""
        self._channel.tell("beside", name=name, step=step, rows=list(rows))

    def restore(self, step: int, rows: Mapping[int, Sequence[int]], evaluated: Sequence[str]) -> None:
        """Go on with what the checkpoint of `step` has in flight, if it was made by an asynchronous run. rows: step -> its prompts
        in the data. evaluated: sets whose responses were drawn between the push and the checkpoint; they are drawn again, as the
        events of a replay go on with them."""
        folder = self._checkpoints / f"step-{step}"
        if any(folder.glob(IN_FLIGHT.format("*"))):
            self._channel.tell("restore", path=str(folder), steps={str(one): list(theirs) for one, theirs in rows.items()})
            self._begun, self._drawn_again = dict(rows), evaluated

    def push_weights(self, version: int) -> dict[str, float]:
        """Push into the running requests. Collective over all ranks."""
        recompute = self._recompute_every > 0 and version % self._recompute_every == 0
        push = super().push_weights
        self._meetings.take_in(self._rebuild, self._begun)
        found = self._held("push", lambda: push(version), version=version, recompute=recompute)
        self._version = version
        self._meetings.count(version)
        if self._stop.received is None and (asked := self._channel.asked_to_stop()) is not None:
            self._stop.received = signal.Signals[asked]
        names, self._drawn_again = self._drawn_again, ()
        for name in names:
            self.take(f"{EVALUATION}{name}")
        return found

    def take(self, batch: str) -> list[Response]:
        """Wait for a batch, and return the responses that this rank answers for. Collective over all ranks. batch: `step/N`,
        `canary/N`, `greedy/N`, or `evaluation/SET`, which begins now and is drawn by the last pushed weights alone. RankIsLate and
        HalfFailed as `Channel.wait_for`."""
        key = batch
        if batch.startswith(EVALUATION):
            name = batch.removeprefix(EVALUATION)
            key = f"{EVALUATION}{self._version}/{name}"
            self._channel.tell("evaluation", key=key, set=name)
        began, counts, found = time.perf_counter(), False, None
        while not counts:
            self._meetings.drop_lost(self._rebuild)
            with self._sections.section(ROLLOUT_HALF):
                self._channel.wait_for(key, key)
            waited = time.perf_counter() - began
            if not self._meetings.drop_lost(self._rebuild):  # else the batch is not whole any more
                counts, found = self._meetings.hold("hand_over", take_responses, key=key)
        self._meetings.count()
        if batch.startswith(STEP):
            self._begun.pop(int(batch.removeprefix(STEP)), None)
        responses, of_replicas = cast(tuple[list[Response], list[Mapping[str, float]]], found)
        if not batch.startswith((EVALUATION, CANARY, GREEDY)):
            assert self._version is not None, "weights were pushed before"
            self._ages += [(self._version - one.version, len(one.tokens)) for each in responses for one in _drawn_of(each)]
            self._waited_s, self._of_replicas = self._waited_s + waited, [*self._of_replicas, *of_replicas]
        return responses

    def figures(self) -> dict[str, float]:
        """Return metric -> value of the step whose batches were taken since the last call. Collective over the training half."""
        ages, counts = torch.tensor(self._ages).unbind(1)
        tokens = total(torch.bincount(ages, counts.double(), minlength=self._max_staleness + 1))
        shares = (tokens / tokens.sum().clamp(min=1.0)).tolist()
        found = {
            Metric.TOKEN_AGE_MEAN.value: sum(age * share for age, share in enumerate(shares)),
            Metric.TOKEN_AGE_MAX.value: float(max((age for age, share in enumerate(shares) if share), default=0)),
            **{Metric.TOKEN_AGE_SHARE.of(str(age)): share for age, share in enumerate(shares)},
            Metric.WAITED.value: self._waited_s,
            **_figures(self._of_replicas, len(self._channel.live)),
        }
        self._waited_s, self._ages, self._of_replicas = 0.0, [(0, 0)], []
        return found

    def snapshots(self) -> dict[str, bytes]:
        """Return what the rollout half had in flight at the last push: file of a checkpoint -> content, on the rank that writes
        it. Collective over all ranks."""

        def taken() -> dict[int, bytes]:
            positions = self._meetings.seats.leader_positions(self._channel.live)
            found = take_snapshots(list(positions.values()))
            return {self._channel.live[place]: content for place, content in found.items()}

        return {IN_FLIGHT.format(replica): content for replica, content in self._held("snapshot", taken).items()}

    def _held(self, kind: str, action: Callable[[], T], **fields: Any) -> T:
        """Hold a meeting until it counts; return what `action` returned."""
        while True:
            self._meetings.drop_lost(self._rebuild, by_log=kind != "snapshot")
            counts, found = self._meetings.hold(kind, action, **fields)
            if counts:
                return cast(T, found)


def _drawn_of(response: Response) -> list[Segment]:
    """Return the segments that weights have drawn; what an environment has given has no age."""
    sequences = [*(context.segments for context in response.contexts), response.segments]
    return [segment for segments in sequences for segment in segments if segment.logprobs is not None]


def _figures(of_replicas: Sequence[Mapping[str, float]], replicas: int) -> dict[str, float]:
    """Return metric -> value of what so many replicas say about each batch of a step, in the batches' order."""
    found = {name: sum(one.get(name, 0.0) for one in of_replicas) for name in ("requests_cut", "tokens_recomputed", "idle_s")}
    return {
        Metric.REPLICAS.value: float(replicas),
        Metric.RUNNING.value: sum(one.get("running", 0.0) for one in of_replicas[-replicas:]),
        Metric.TOKENS_IN_FLIGHT.value: sum(one.get("in_flight", 0.0) for one in of_replicas[-replicas:]),
        Metric.REQUESTS_CUT.value: found["requests_cut"],
        Metric.TOKENS_RECOMPUTED.value: found["tokens_recomputed"],
        Metric.ROLLOUT_IDLE.value: found["idle_s"] / replicas,
    }
