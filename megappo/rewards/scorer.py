"""Scoring of this rank's samples: the parts of their recipe, started as samples finish, collected at the end.

Nothing here needs the other ranks; `compose.py` makes scores of what all ranks have found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any

from megappo.rewards.base import Part, RewardError, RewardInput, Timed, UnusableAnswer, describe
from megappo.rewards.compose import Composition, Judged
from megappo.rewards.inline import Deferred
from megappo.rewards.verdict import Verdict, verdict_of

ROUND_S = 2.0  # between two looks at the other parts, and of the trainer at the other ranks


@dataclass
class _Started:
    """A sample and what its parts have found. seconds: part -> time from its start to its end, once there is one."""

    sample: RewardInput
    label: str
    futures: dict[str, Future[Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)


class Scorer:
    """The parts of a run on this rank, and their composition. label_of: recipe of a record.

    score_model: verdicts of the other parts of the composition for (prompts, responses), which all ranks compute together; the
    trainer calls it once the local parts of all ranks are there. None without such a part. on_progress: the trainer tells it how
    many of all ranks' values are there: (found, of).
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        composition: Composition,
        label_of: Callable[[Mapping[str, Any]], str] = lambda record: "",
        on_progress: Callable[[int, int], None] = lambda found, of: None,
        score_model: Callable[[Sequence[Any], Sequence[Judged]], Sequence[Verdict]] | None = None,
    ) -> None:
        self.composition, self.on_progress, self.score_model = composition, on_progress, score_model
        self._parts, self._label_of = dict(parts), label_of
        self._started: list[_Started] = []

    @property
    def names_of_model(self) -> list[str]:
        """Parts that no rank scores alone."""
        return [name for name in self.composition.names if name not in self._parts]

    def submit(self, samples: Sequence[RewardInput]) -> None:
        """Start the parts of these samples. Samples may come in any number of calls. RewardError for a part that cannot start."""
        started = [_Started(sample, self._label_of(sample.record)) for sample in samples]
        for name, part in self._parts.items():
            chosen = [one for one in started if name in self.composition.recipes[one.label]]
            if not chosen:
                continue
            begun = time.perf_counter()
            try:
                futures = part.start([one.sample for one in chosen])
            except RewardError:
                raise
            except Exception as error:  # any fault of a part: named here, then it stops the run
                raise _failed(name, error, chosen[0].sample) from error
            for one, future in zip(chosen, futures, strict=True):
                one.futures[name] = future
                future.add_done_callback(_clock(one.seconds, name, begun))
        self._started += started

    def work(self, seconds: float) -> tuple[int, int]:
        """Score for about so long: (values found, values to find), a value being that of a part for a sample.

        After a failure nothing is left to find: `finish` raises it.
        """
        end = time.monotonic() + seconds
        futures = [future for _, _, future in self._entries()]
        for future in futures if not self.has_failed else ():
            if isinstance(future, Deferred) and not future.done():
                future.run()
                if _has_failed(future) or time.monotonic() > end:
                    break
        while not any(map(_has_failed, futures)) and (left := end - time.monotonic()) > 0:
            if not (waiting := [future for future in futures if not future.done()]):
                break
            wait(waiting, left, FIRST_EXCEPTION)
        found = len(futures) if self.has_failed else sum(future.done() for future in futures)
        return found, len(futures)

    @property
    def has_failed(self) -> bool:
        return any(_has_failed(future) for _, _, future in self._entries())

    def drop(self) -> None:
        """Forget all samples, as after a failure of another rank. Values in hand are not waited for."""
        for _, _, future in self._entries():
            future.cancel()
        self._started = []

    def finish(self) -> list[Judged]:
        """Verdicts of all samples, in the order of submission, once all are there; then the scorer is empty.

        RewardError if a part failed for one of them, without waiting for the others.
        """
        while len(set(self.work(ROUND_S))) > 1:
            pass
        started = self._started
        try:
            # Stable: the first that failed raises.
            for one, name, future in sorted(self._entries(), key=lambda entry: not _has_failed(entry[2])):
                one.verdicts[name] = _verdict(one, name, future)
        finally:
            self.drop()
        return [
            Judged(one.sample.sample_id, one.sample.response, one.label, one.sample.truncated, one.sample.num_tokens, one.verdicts)
            for one in started
        ]

    def close(self) -> None:
        """End what the parts hold."""
        for part in self._parts.values():
            part.close()

    def _entries(self) -> Iterator[tuple[_Started, str, Future[Any]]]:
        """Part by part: rules that draw random numbers draw them in this order."""
        for name in self._parts:
            for one in self._started:
                if name in one.futures:
                    yield one, name, one.futures[name]


def _clock(seconds: dict[str, float], name: str, begun: float) -> Callable[[Future[Any]], None]:
    def stop(future: Future[Any]) -> None:
        seconds[name] = time.perf_counter() - begun

    return stop


def _has_failed(future: Future[Any]) -> bool:
    return future.done() and (future.cancelled() or not isinstance(future.exception(), UnusableAnswer | None))


def _verdict(one: _Started, name: str, future: Future[Any]) -> Verdict:
    try:
        result = future.result()
    except UnusableAnswer:  # told before the run started (`prepare/answers.py`)
        return Verdict(0.0, {}, reason="unusable")
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(name, error, one.sample) from error
    if isinstance(result, Timed):
        return verdict_of(result.result, name, one.sample, result.seconds)
    return verdict_of(result, name, one.sample, one.seconds.get(name))


def _failed(name: str, error: BaseException, sample: RewardInput) -> RewardError:
    return RewardError(f"reward part {name} failed with {type(error).__name__}: {error}; {describe(sample)}")
