"""Run of a benchmark's candidates on a problem: check, memory, then interleaved times.

`prepare` makes every candidate and runs it once (compilation happens here, under a time limit), with --check compares it with the
fp64 oracle, and takes its peak memory. `measure` does rounds: in each, the probes and every candidate once, in a rotating order,
with the cache flushed before each. What slows the machine down in one round slows candidates and floor alike.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.harness.candidates import TooSlow, reason_of, time_limit
from benchmarks.harness.clock import Clock, Memory, summary
from benchmarks.harness.model import Absent, Benchmark, Calls, Candidate, Line, Problem, Report

# Errors that our ops raise for an unsuitable size or device; any other is a bug and stops the run.
OUR_FAULTS = (RuntimeError, ValueError, TooSlow)
MIN_REPEATS = 3


@dataclass(frozen=True)
class Settings:
    """seconds: measuring time after which a candidate gets no more than MIN_REPEATS repetitions. leave_out: prefixes of names."""

    repeats: int = 20
    warm_up: int = 3
    seconds: float = 20.0
    first_call_s: float = 240.0
    check: bool = False
    leave_out: tuple[str, ...] = ()
    show_best: bool = False


@dataclass
class Entry:
    """A candidate that takes part, with its samples by phase."""

    candidate: Candidate
    calls: Calls
    line: Line
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def spent_s(self) -> float:
        return sum(map(sum, self.samples.values()))


@dataclass(frozen=True)
class Prepared:
    """A problem with the candidates that take part, checked and weighed but not yet timed."""

    name: str
    shape: str
    dtype: torch.dtype
    problem: Problem
    lines: list[Line]
    entries: list[Entry]

    def close(self) -> None:
        for entry in self.entries:
            entry.calls.close()


def prepare(benchmark: Benchmark, shape: str, dtype: torch.dtype, clock: Clock, settings: Settings) -> Prepared:
    """Make all candidates of a problem, check them and take their memory. Raises Mistake for a shape that cannot be parsed."""
    gc.collect()  # what other problems left in cycles is not freed while this one is weighed
    problem = benchmark.problem(benchmark.read(shape), dtype, clock.device)
    memory = Memory(clock.device)
    found = [_enter(candidate, problem, memory, settings) for candidate in benchmark.candidates(problem)]
    problem.known.clear()
    lines, entries = [line for line, _ in found], [entry for _, entry in found if entry is not None]
    return Prepared(benchmark.name, shape, dtype, problem, lines, entries)


def measure(prepared: Prepared, clock: Clock, settings: Settings) -> Report:
    problem, entries = prepared.problem, prepared.entries
    probes = _rounds(entries, problem, clock, settings)
    timings = {name: summary(samples, show_best=settings.show_best) for name, samples in probes.items()}
    per_unit = {name: timing.shown for name, timing in timings.items()}
    per_unit["copy"] /= clock.copy_moves
    floors = {phase: sum(amount * per_unit[probe] for probe, amount in parts.items()) for phase, parts in problem.floors.items()}
    for entry in entries:
        scale, samples = entry.calls.scale, entry.samples
        entry.line.times = {phase: summary(found, scale, show_best=settings.show_best) for phase, found in samples.items()}
        entry.line.ratios = {phase: t.shown / floors[phase] for phase, t in entry.line.times.items() if phase in floors}
    dtype = str(prepared.dtype).removeprefix("torch.")
    return Report(prepared.name, prepared.shape, dtype, floors, timings, 1.0 / per_unit["copy"], prepared.lines)


def _enter(candidate: Candidate, problem: Problem, memory: Memory, settings: Settings) -> tuple[Line, Entry | None]:
    """First run of a candidate: its line, and its entry unless it is absent, fails or is wrong."""
    line = Line(candidate.name, candidate.kind, note=candidate.note)
    left_out = next((prefix for prefix in settings.leave_out if candidate.name.startswith(prefix)), None)
    if left_out is not None:
        line.status, line.reason = "absent", "left out"
        return line, None
    try:
        with time_limit(settings.first_call_s):
            entry = Entry(candidate, candidate.make(), line)
            with candidate.selected():
                results = _results(entry.calls)
        differences = problem.differences(results, candidate.rounds_to, candidate.kind == "ours") if settings.check else []
        del results
        with candidate.selected():
            _weigh(entry, memory)
    except Absent as reason:
        line.status, line.reason = "absent", str(reason)
        return line, None
    except OUR_FAULTS if candidate.kind == "ours" else Exception as error:  # noqa: B030  whatever other code raises is its result
        line.status, line.reason = "failed", reason_of(error)
        return line, None
    wrong = [d for d in differences if d.wrong]
    if wrong:
        worst = max(wrong, key=lambda d: d.of_tolerance)
        line.status = "wrong"
        line.reason = f"{worst.result} is off by {worst.largest:.2e}, {worst.of_tolerance:.1f} times the tolerance"
        return line, None
    return line, entry


def _results(calls: Calls) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    calls.reset()
    results = dict(calls.named(calls.forward()))
    if calls.graph is not None and calls.backward is not None:
        calls.reset()
        results |= calls.named_gradients(calls.backward(calls.graph()))
    return results


def _weigh(entry: Entry, memory: Memory) -> None:
    calls, line = entry.calls, entry.line
    if calls.scale != 1.0:
        return  # a part of the problem says nothing of the memory of the whole
    calls.reset()
    weighed = memory.peak(lambda: _outcome(calls))
    if weighed is not None:
        line.peak_bytes, line.result_bytes = weighed[0], _bytes_of(weighed[1])


def _outcome(calls: Calls) -> Any:
    """Outputs and gradients, all alive at the end as they are in a training step."""
    if calls.graph is None or calls.backward is None:
        return calls.forward()
    outputs = calls.graph()
    gradients = calls.backward(outputs)
    return [x.detach() for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)], gradients


def _bytes_of(tree: Any) -> int:
    storages = [x.untyped_storage() for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _rounds(entries: Sequence[Entry], problem: Problem, clock: Clock, settings: Settings) -> dict[str, list[float]]:
    probes: dict[str, Callable[[], Any]] = {"copy": clock.copy, **problem.probes}
    samples: dict[str, list[float]] = {name: [] for name in probes}
    for turn in range(settings.warm_up + settings.repeats):
        warm = turn >= settings.warm_up
        for name, probe in probes.items():
            (seconds,), _ = clock.laps([lambda _: probe()])
            if warm:
                samples[name].append(seconds)
        if turn >= settings.warm_up + MIN_REPEATS:
            entries = [entry for entry in entries if entry.spent_s <= settings.seconds]
            if not entries and turn > settings.warm_up + MIN_REPEATS:
                break
        for entry in _rotated(entries, turn):
            for phase, seconds in _repetition(entry, clock):
                if warm:
                    entry.samples.setdefault(phase, []).append(seconds)
    return samples


def _rotated(entries: Sequence[Entry], turn: int) -> list[Entry]:
    start = turn % len(entries) if entries else 0
    return [*entries[start:], *entries[:start]]


def _repetition(entry: Entry, clock: Clock) -> Iterator[tuple[str, float]]:
    calls = entry.calls
    with entry.candidate.selected():
        calls.reset()
        (forward,), _ = clock.laps([lambda _: calls.forward()])
        yield "forward", forward
        if calls.graph is not None and calls.backward is not None:
            calls.reset()
            (recording, backward), _ = clock.laps([lambda _: calls.graph(), calls.backward])
            yield "backward", backward
            yield "both", recording + backward
