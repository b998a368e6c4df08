"""Scoring of samples on this rank: the parts of their recipe, started as samples finish, collected at the end.
Parts that stream start early, on the rank that drew a sample; all others start on the rank that owns it. `trainer/scoring.py`
takes early values to the owners, and `compose.py` makes scores of what all ranks have found."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any

from megappo.rewards.base import NoVerdict, Part, RetryingPart, RewardError, RewardInput, describe
from megappo.rewards.compose import Composition, Judged
from megappo.rewards.inline import Deferred
from megappo.rewards.verdict import Verdict, no_verdict, verdict_of
from megappo.runtime.worker_pool import Timed

ROUND_S = 2.0  # between two looks at the other parts, and of the trainer at the other ranks


Found = dict[str, Verdict | None]
"""Part -> verdict of a sample that another rank has found; None while it is being computed there."""


@dataclass
class _Started:
    sample: RewardInput
    label: str
    begun: dict[str, float] = field(default_factory=dict)
    """Part -> time of its start."""
    futures: dict[str, Future[Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Part -> seconds from its start to its end, once there is one."""
    elsewhere: Found = field(default_factory=dict)
    """Verdicts that another rank has found or will find."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)


class Scorer:
    """Parts of a run on this rank, and their composition.

    label_of: recipe of a record. score_model: verdicts of the composition's other parts for (prompts, responses), which all ranks
    compute together; the trainer calls it once the local parts of all ranks are done. on_progress: the trainer reports the values
    of all ranks to it, (found, of).
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
        self._early: dict[int, _Started] = {}
        self._given: dict[int, dict[str, Verdict]] = {}
        self._retries_taken: dict[str, int] = {}
        self._retries_given: Counter[str] = Counter()

    @property
    def streams(self) -> bool:
        return any(part.streams for part in self._parts.values())

    def with_model(self, score_model: Callable[[Sequence[Any], Sequence[Judged]], Sequence[Verdict]]) -> Scorer:
        """Make a scorer with the same parts, which both may close, and another `score_model`."""
        other = Scorer(self._parts, self.composition, self._label_of, self.on_progress, score_model)
        other._retries_taken = self._retries_taken  # of the same parts
        return other

    @property
    def names_of_model(self) -> list[str]:
        """Parts that no rank scores alone."""
        return [name for name in self.composition.names if name not in self._parts]

    def take_retries(self) -> dict[str, int]:
        """Requests that this rank has sent again since the last call, and those given to it, for each part that retries."""
        now = {name: part.num_retries for name, part in self._parts.items() if isinstance(part, RetryingPart)}
        given, self._retries_given = self._retries_given, Counter()
        new = {name: count - self._retries_taken.get(name, 0) + given[name] for name, count in now.items()}
        self._retries_taken.update(now)
        return new

    def submit(self, samples: Sequence[RewardInput], found: Sequence[Found] | None = None) -> None:
        """Start the parts of these samples, in any number of calls. Raises RewardError for a part that cannot start.
        found: values of each sample that another rank has; they are not started here."""
        started = [_Started(sample, self._label_of(sample.record)) for sample in samples]
        for one, elsewhere in zip(started, found or [{}] * len(started), strict=True):
            one.elsewhere |= elsewhere
        for name in self._parts:
            self._start(name, started)
        self._started += started

    def submit_early(self, samples: Mapping[int, RewardInput]) -> None:
        """Start the parts that stream for these samples, by number. A part that cannot start fails later, in `finish`."""
        started = {number: _Started(sample, self._label_of(sample.record)) for number, sample in samples.items()}
        for name, part in self._parts.items():
            if part.streams:
                try:
                    self._start(name, list(started.values()))
                except RewardError as error:
                    # Raised here, in generation, it would leave the other ranks waiting there.
                    next(iter(started.values())).futures[name] = failure = Future()
                    failure.set_exception(error)
        self._early |= started

    def take_early(self) -> dict[int, dict[str, Verdict]]:
        """Return the verdicts of early samples whose parts are all done, once, by number, without those of parts that failed."""
        done = {number: one for number, one in self._early.items() if all(future.done() for future in one.futures.values())}
        found: dict[int, dict[str, Verdict]] = {number: {} for number in done}
        for number, one in done.items():
            del self._early[number]
            for name, future in one.futures.items():
                with contextlib.suppress(RewardError):  # the owner starts it again, and names it
                    found[number][name] = _verdict(one, name, future)
        return found

    def give_early(self, verdicts: Mapping[int, dict[str, Verdict]], retries: Mapping[str, int]) -> None:
        """Take what `take_early` and `take_retries` have returned elsewhere, as if it were of early samples here."""
        self._given |= verdicts
        self._retries_given.update(retries)

    def hand_over(self) -> tuple[dict[int, Found], float]:
        """Return the values of early samples, by number, and the seconds in which they were computed so far.
        Values that have not begun are cancelled and left out: the owners of their samples start them."""
        now = time.perf_counter()
        spans = [
            (one.begun[name], one.begun[name] + one.seconds.get(name, now - one.begun[name]))
            for one in self._early.values()
            for name in one.begun
        ]
        found: dict[int, Found] = {number: {**given} for number, given in self._given.items()}
        self._given = {}
        return found | {number: _handed_over(one) for number, one in self._early.items()}, _covered(spans)

    def finish_early(self) -> dict[int, dict[str, Verdict]]:
        """Return the verdicts that were being computed at `hand_over`, once all are there. Raises RewardError if a part failed."""
        self._wait()
        try:
            return {
                number: {name: _verdict(one, name, future) for name, future in one.futures.items()}
                for number, one in self._early.items()
                if one.futures
            }
        except RewardError:
            self.drop()
            raise
        finally:
            self._early = {}

    def _start(self, name: str, started: Sequence[_Started]) -> None:
        chosen = [one for one in started if name in self.composition.recipes[one.label] and name not in one.elsewhere]
        if not chosen:
            return
        begun = time.perf_counter()
        try:
            futures = self._parts[name].start([one.sample for one in chosen])
        except RewardError:
            raise
        except Exception as error:  # any fault of a part: named here, then it stops the run
            raise _failed(name, error, chosen[0].sample) from error
        for one, future in zip(chosen, futures, strict=True):
            one.futures[name], one.begun[name] = future, begun
            future.add_done_callback(_clock(one.seconds, name, begun))

    def work(self, seconds: float) -> tuple[int, int]:
        """Score for about so many seconds and return (values found, values to find); a value is one part's result for one sample.
        After a failure nothing is left to find: `finish` raises it."""
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
        """Forget all samples, as after a failure of another rank, without waiting for values that are being computed."""
        for _, _, future in self._entries():
            future.cancel()
        self._started, self._early, self._given = [], {}, {}

    def finish(self) -> list[Judged]:
        """Wait for the verdicts of all submitted samples, return them in order, and empty the scorer.
        Leaves out values that another rank was still computing. Raises RewardError at once if a part failed."""
        self._wait()
        started = self._started
        try:
            # Stable: the first that failed raises.
            for one, name, future in sorted(self._entries(), key=lambda entry: not _has_failed(entry[2])):
                one.verdicts[name] = _verdict(one, name, future)
        finally:
            self.drop()
        return [_judged(one) for one in started]

    def _wait(self) -> None:
        while len(set(self.work(ROUND_S))) > 1:
            pass

    def close(self) -> None:
        for part in self._parts.values():
            part.close()

    def _entries(self) -> Iterator[tuple[_Started, str, Future[Any]]]:
        for name in self._parts:
            # Part by part: rules that draw random numbers draw them in this order.
            for one in self._started:
                if name in one.futures:
                    yield one, name, one.futures[name]
        for one in self._early.values():
            for name, future in one.futures.items():
                yield one, name, future


def _handed_over(one: _Started) -> Found:
    """Values that an early sample's owner need not start. Finished verdicts leave the sample."""
    found: Found = {}
    for name, future in list(one.futures.items()):
        found[name] = None
        if future.cancel():
            del one.futures[name], found[name]
        elif future.done():
            with contextlib.suppress(RewardError):  # it stays here, and `finish` raises it
                found[name] = _verdict(one, name, future)
                del one.futures[name]
    return found


def _judged(one: _Started) -> Judged:
    known = {name: verdict for name, verdict in one.elsewhere.items() if verdict is not None}
    sample = one.sample
    return Judged(sample.sample_id, sample.response, one.label, sample.truncated, sample.num_tokens, {**known, **one.verdicts})


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    covered, end = 0.0, -math.inf
    for first, last in sorted(spans):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered


def _clock(seconds: dict[str, float], name: str, begun: float) -> Callable[[Future[Any]], None]:
    def stop(future: Future[Any]) -> None:
        seconds[name] = time.perf_counter() - begun

    return stop


def _has_failed(future: Future[Any]) -> bool:
    return future.done() and (future.cancelled() or not isinstance(future.exception(), NoVerdict | None))


def _verdict(one: _Started, name: str, future: Future[Any]) -> Verdict:
    try:
        result = future.result()
    except NoVerdict as none:
        return no_verdict(none.reason, one.seconds.get(name))
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(name, error, one.sample) from error
    if isinstance(result, Timed):
        return verdict_of(result.result, name, one.sample, result.seconds)
    return verdict_of(result, name, one.sample, one.seconds.get(name))


def _failed(name: str, error: BaseException, sample: RewardInput) -> RewardError:
    return RewardError(f"reward part {name} failed with {type(error).__name__}: {error}; {describe(sample)}")
