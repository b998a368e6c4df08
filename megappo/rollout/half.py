"""The rollout half of an asynchronous run as the training half sees it: an engine on other ranks, which has begun a step's
responses before the step."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from megappo.parallel.totals import total_and_largest
from megappo.rollout.build import RolloutElsewhere
from megappo.rollout.channel import Channel
from megappo.rollout.hand_over import take_responses, take_snapshots
from megappo.rollout.types import Response
from megappo.runtime.ending import StopRequest
from megappo.runtime.sections import ROLLOUT_HALF, Sections
from megappo.telemetry.metrics import Metric

EVALUATION = "evaluation/"
"""Start of the names of batches that are no step's."""
CANARY = "canary/"
"""Start of the names of batches that are drawn to be judged."""
IN_FLIGHT = "rollout-{}.bin"
"""File of a checkpoint with what a replica has drawn and not handed over."""


class RolloutHalf(RolloutElsewhere):
    """Stand-in for the engine on the training ranks (`rollout.types.RolloutEngine`), from which `generation.generate` takes whole
    batches. Methods are collective over the training half. outside: context in which all ranks are the world. checkpoints:
    directory of the run's. stop: of this rank; rank 0's hears of rollout ranks that were asked to stop. recompute_every: steps
    between pushes after which a kept cache (`rollout.cache_after_push`) is computed again; 0 for none."""

    def __init__(
        self,
        channel: Channel,
        outside: Callable[[], AbstractContextManager[None]],
        sections: Sections,
        checkpoints: Path,
        stop: StopRequest,
        recompute_every: int = 0,
    ) -> None:
        super().__init__("vllm", None)
        self._channel, self._outside, self._sections = channel, outside, sections
        self._checkpoints, self._stop, self._recompute_every = checkpoints, stop, recompute_every
        self._version: int | None = None
        self._drawn_again: Sequence[str] = ()
        self.figures: Mapping[str, float] = {}
        """Metric -> value of the last step that was taken."""

    def build(self, engine: Callable[[], RolloutElsewhere]) -> RolloutHalf:
        """Build the sender of the weights over all ranks."""
        with self._outside():
            self._sync = engine()._sync
        return self

    def ask(self, step: int, rows: Sequence[int]) -> None:
        """Let the responses of a step begin. rows: its prompts in the data."""
        self._channel.tell("requests", step=step, rows=list(rows))

    def ask_canary(self, step: int, rows: Sequence[int]) -> None:
        """Let a few sequences begin before all that waits, under the weights before `step`: batch CANARY + step."""
        self._channel.tell("canary", key=f"{CANARY}{step}", step=step, rows=list(rows))

    def restore(self, step: int, rows: Mapping[int, Sequence[int]], evaluated: Sequence[str]) -> None:
        """Go on with what the checkpoint of `step` has in flight, if it was made by an asynchronous run. rows: step -> its prompts
        in the data. evaluated: sets whose responses were drawn between the push and the checkpoint; they are drawn again, as the
        events of a replay go on with them."""
        folder = self._checkpoints / f"step-{step}"
        if (folder / IN_FLIGHT.format(0)).exists():
            self._channel.tell("restore", path=str(folder), steps={str(one): list(theirs) for one, theirs in rows.items()})
            self._drawn_again = evaluated

    def push_weights(self, version: int) -> dict[str, float]:
        """Push into the running requests. Collective over all ranks."""
        recompute = self._recompute_every > 0 and version % self._recompute_every == 0
        self._channel.tell("push", version=version, recompute=recompute)
        with self._outside():
            found = super().push_weights(version)
        self._channel.met()
        self._version = version
        if self._stop.received is None and (asked := self._channel.asked_to_stop()) is not None:
            self._stop.received = signal.Signals[asked]
        names, self._drawn_again = self._drawn_again, ()
        for name in names:
            self.take(f"{EVALUATION}{name}")
        return found

    def take(self, batch: str) -> list[Response]:
        """Wait for a batch, and return the responses that this rank answers for. Collective over all ranks. batch: `step/N`,
        `canary/N`, or `evaluation/SET`, which begins now and is drawn by the last pushed weights alone. RankIsLate and HalfFailed
        as `Channel.wait_for`."""
        key = batch
        if batch.startswith(EVALUATION):
            name = batch.removeprefix(EVALUATION)
            key = f"{EVALUATION}{self._version}/{name}"
            self._channel.tell("evaluation", key=key, set=name)
        began = time.perf_counter()
        with self._sections.section(ROLLOUT_HALF):
            self._channel.wait_for(key, key)
        waited = time.perf_counter() - began
        self._channel.tell("hand_over", key=key)
        with self._outside():
            responses, of_replicas = take_responses()
        self._channel.met()
        if key == batch and not batch.startswith(CANARY):
            self.figures = {**self._ages(responses), Metric.WAITED.value: waited, **_figures(of_replicas)}
        return responses

    def _ages(self, responses: Sequence[Response]) -> dict[str, float]:
        """Return the ages of the weights that drew the tokens, in steps. Collective over the training half."""
        assert self._version is not None, "weights were pushed before"
        drawn = [(self._version - s.version, len(s.tokens)) for one in responses for s in one.segments if s.logprobs is not None]
        ages, counts = torch.tensor(drawn or [(0, 0)], dtype=torch.float64).unbind(1)
        sums = torch.stack([(ages * counts).sum(), counts.sum()])
        (weighted, tokens), oldest = total_and_largest(sums, (ages * (counts > 0)).max().view(1))
        mean = float(weighted / tokens.clamp(min=1.0))
        return {Metric.TOKEN_AGE_MEAN.value: mean, Metric.TOKEN_AGE_MAX.value: float(oldest)}

    def snapshots(self) -> dict[str, bytes]:
        """Return what the rollout half had in flight at the last push: file of a checkpoint -> content, on the rank that writes
        it. Collective over all ranks."""
        self._channel.tell("snapshot")
        with self._outside():
            found = take_snapshots(self._channel.leaders)
        self._channel.met()
        return {IN_FLIGHT.format(replica): content for replica, content in found.items()}


def _figures(of_replicas: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return metric -> value of what the replicas say about a step."""
    found = {
        name: sum(one.get(name, 0.0) for one in of_replicas) for name in ("running", "requests_cut", "tokens_recomputed", "idle_s")
    }
    return {
        Metric.RUNNING.value: found["running"],
        Metric.REQUESTS_CUT.value: found["requests_cut"],
        Metric.TOKENS_RECOMPUTED.value: found["tokens_recomputed"],
        Metric.ROLLOUT_IDLE.value: found["idle_s"] / len(of_replicas),
    }
