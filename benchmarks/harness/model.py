"""Types of a benchmark: problems (inputs, oracle, floor), candidates that solve them, and measurements.

A benchmark is one op. For each shape and dtype it makes a problem; every candidate turns the problem into calls, which the
harness checks, times and weighs. Nothing here runs anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

PHASES = ("forward", "backward", "both")
"""Without gradients; the backward alone; a forward that records a graph and its backward."""


class Mistake(ValueError):
    """A wrong argument on the command line: one line, exit code 2."""


class Parser(argparse.ArgumentParser):
    """A mistake in the arguments is one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise Mistake(message)


class Absent(Exception):
    """A candidate cannot take part here; the text says why."""


@dataclass(frozen=True)
class Calls:
    """Calls of one candidate on one problem.

    forward runs without gradients and returns anything; graph runs with gradients and returns what backward takes. named and
    named_gradients turn what forward and backward returned into results by name; neither is timed. reset is called, untimed,
    before every repetition, close at the end of the run. scale: times are multiplied by it, where only a part was solved.
    """

    forward: Callable[[], Any]
    named: Callable[[Any], Mapping[str, Tensor]]
    graph: Callable[[], Any] | None = None
    backward: Callable[[Any], Any] | None = None
    named_gradients: Callable[[Any], Mapping[str, Tensor]] = dict
    reset: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None
    scale: float = 1.0


@dataclass(frozen=True)
class Candidate:
    """kind: ours, torch (plain PyTorch), compile (the same under torch.compile) or peer. rounds_to: a type that it stages logits,
    probabilities or gradients in, which its results are forgiven. selected: entered around every call."""

    name: str
    kind: str
    make: Callable[[], Calls]
    note: str = ""
    rounds_to: torch.dtype | None = None
    selected: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Difference:
    """Largest |got - want| of one result and the multiple of its tolerance that the worst element reaches; above 1 is wrong."""

    result: str
    largest: float
    of_tolerance: float

    @property
    def wrong(self) -> bool:
        # NaN compares false
        return not self.of_tolerance <= 1.0


class Problem(Protocol):
    """Inputs of one shape and dtype on one device. known: what the oracle says, kept while candidates are checked."""

    known: dict[Any, Any]

    @property
    def probes(self) -> Mapping[str, Callable[[], Any]]:
        """Name -> call that is timed for the floor, besides the copy."""

    @property
    def floors(self) -> Mapping[str, Mapping[str, float]]:
        """Phase -> probe -> how much of it; of "copy" in bytes that must move, of others in calls. Names that are no phase are
        further floors, printed only."""

    def differences(self, results: Mapping[str, Tensor], rounds_to: torch.dtype | None, ours: bool) -> list[Difference]:
        """Compare results with the fp64 oracle."""


@dataclass(frozen=True)
class Benchmark:
    """shapes, dtypes: the defaults, by kind of device. read turns a shape's text into what problem takes, or raises Mistake."""

    name: str
    shape_form: str
    shapes: Mapping[str, Sequence[str]]
    dtypes: Mapping[str, Sequence[torch.dtype]]
    read: Callable[[str], Any]
    problem: Callable[[Any, torch.dtype, torch.device], Problem]
    candidates: Callable[[Any], Sequence[Candidate]]


@dataclass(frozen=True)
class Timing:
    """Seconds over the repetitions. spread: distance of the quartiles. shown: the median or the best, whichever was asked for;
    tables, ratios and bars are of it."""

    shown: float
    median: float
    spread: float
    best: float
    count: int


@dataclass
class Line:
    """One candidate on one problem. status: measured, absent (reason), failed (reason) or wrong (reason)."""

    candidate: str
    kind: str
    status: str = "measured"
    reason: str = ""
    note: str = ""
    times: dict[str, Timing] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    """Phase -> time over the floor of the same run."""
    peak_bytes: int | None = None
    """Most memory above the inputs while `both` (or `forward`) ran."""
    result_bytes: int | None = None
    """Part of `peak_bytes` in returned tensors: outputs and gradients."""

    @property
    def workspace_bytes(self) -> int | None:
        return None if self.peak_bytes is None or self.result_bytes is None else max(self.peak_bytes - self.result_bytes, 0)


@dataclass
class Report:
    """One problem: its floors and probes in seconds, and a line per candidate."""

    benchmark: str
    shape: str
    dtype: str
    floors: dict[str, float]
    probes: dict[str, Timing]
    copy_bytes_per_s: float
    lines: list[Line]


def worst(result: str, got: Tensor, want: Tensor, atol: float, rtol: float = 0.0) -> Difference:
    """Elementwise against fp64: the tolerance is atol + rtol |want|."""
    difference = (got.detach().double() - want).abs()
    if not difference.numel():
        return Difference(result, 0.0, 0.0)
    of_tolerance = difference / (atol + rtol * want.abs())
    # amax passes NaN on
    return Difference(result, float(difference.amax()), float(of_tolerance.amax()))


def worst_row(result: str, got: Tensor, want: Tensor, rtol: float) -> Difference:
    """Rows [N, D] against fp64 by their norm; a row far smaller than the others against a hundredth of their mean norm."""
    norms = want.norm(dim=1)
    errors = (got.detach().double() - want).norm(dim=1)
    relative = errors / (rtol * norms.clamp(min=0.01 * float(norms.mean()) + 1e-30))
    return Difference(result, float(errors.amax()), float(relative.amax()))


def merged(parts: Sequence[Difference]) -> list[Difference]:
    """One difference per result, the worst of its parts; NaN is the worst."""
    found: dict[str, Difference] = {}
    for part in parts:
        before = found.get(part.result)
        if before is None or not part.of_tolerance <= before.of_tolerance:
            found[part.result] = part
    return list(found.values())
