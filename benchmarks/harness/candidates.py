"""Candidates of a benchmark: our op under each implementation, a PyTorch function plain and compiled, other packages' functions."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.model import Absent, Calls, Candidate
from megappo.ops import dispatch
from megappo.ops.implementations import Kernels
from megappo.runtime.messages import first_line

IMPLEMENTATIONS: tuple[Kernels, ...] = ("cuda", "cpp", "triton", "reference")
Names = Sequence[str]
MOST_COMPILATIONS = 256


def differentiable(
    function: Callable[..., Sequence[Tensor]],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    **hooks: Callable[[], object],
) -> Calls:
    """Calls of `function(*inputs)`. inputs: by the name of their gradient. outputs: names of what it returns, with the upstream
    gradients. hooks: reset and close of Calls."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs.values()]
    plain, upstream = [tensor.detach() for tensor in inputs.values()], list(outputs.values())

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return function(*plain)

    return Calls(
        forward=forward,
        named=lambda values: dict(zip(outputs, values)),
        graph=lambda: function(*leaves),
        backward=lambda values: torch.autograd.grad(values, leaves, upstream),
        named_gradients=lambda gradients: dict(zip(inputs, gradients)),
        **hooks,
    )


def ours(uses: Names, device: torch.device, make: Callable[[], Calls], *, variant: str = "", **fields: Any) -> list[Candidate]:
    """One of our ops under every implementation. uses: the dispatched ops that a call runs. variant: other arguments than the
    defaults, in words; without the reference."""

    def candidate(kernels: Kernels) -> Candidate:
        @contextmanager
        def selected() -> Iterator[None]:
            with dispatch.using(kernels):
                # resolved here, so that no timed call looks it up
                for name in uses:
                    dispatch.implementation(name, (torch.empty(0, device=device),))
                yield

        def checked() -> Calls:
            try:
                with selected():
                    return make()
            except ValueError as error:
                raise Absent(str(error).removesuffix("; use kernels=auto")) from None

        return Candidate(f"megappo {kernels}{variant and ', '}{variant}", "ours", checked, selected=selected, **fields)

    return [candidate(kernels) for kernels in IMPLEMENTATIONS if not (variant and kernels == "reference")]


def plain_and_compiled(
    name: str, function: Callable[..., Any], make: Callable[[Callable[..., Any]], Calls], **fields: Any
) -> list[Candidate]:
    """`make(function)` and `make(torch.compile(function))`."""

    def compiled() -> Calls:
        if not torch.cuda.is_available() and shutil.which("g++") is None:
            raise Absent("torch.compile needs g++ on the CPU")
        # every shape of the run is compiled for itself; from the ninth on PyTorch would stop compiling
        torch._dynamo.config.recompile_limit = MOST_COMPILATIONS
        return make(torch.compile(function, dynamic=False))

    return [
        Candidate(f"torch eager, {name}", "torch", lambda: make(function), **fields),
        Candidate(f"torch.compile, {name}", "compile", compiled, **fields),
    ]


def peer(
    name: str,
    package: str,
    module: str,
    make: Callable[[ModuleType], Calls],
    device: torch.device,
    *,
    needs_gpu: bool = True,
    note: str = "",
    **fields: Any,
) -> Candidate:
    """A candidate from another package, absent if that is not installed or cannot be imported here."""

    def checked() -> Calls:
        if importlib.util.find_spec(package) is None:
            raise Absent(f"{package} is not installed")
        if needs_gpu and device.type != "cuda":
            raise Absent(f"{package}{_version(package)} runs on a GPU only")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about each other's absence
                imported = importlib.import_module(module)
            return make(imported)
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            raise Absent(f"{package}{_version(package)} cannot be used: {reason_of(error)}") from None

    return Candidate(name, "peer", checked, note, **fields)


def _version(package: str) -> str:
    for distribution in importlib.metadata.packages_distributions().get(package, ()):
        return f" {importlib.metadata.version(distribution)}"
    return ""


def reason_of(error: BaseException) -> str:
    """Kind and first line of an error, short enough for a table."""
    return first_line(error, kind=True)[:160]


class TooSlow(Exception):
    """A candidate exceeded its time limit."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block after that time; without limit if signals do not reach (other threads, Windows)."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TooSlow(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
