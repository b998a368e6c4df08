"""Comparison of the selected kernels with their fp64 references at the start of a run; alone: `python -m megappo.ops.selfcheck`.
A miscompiled kernel or a library of another version would otherwise only show as a run that learns slowly. Every public function
of ops/ runs forward and backward on a few thousand tokens: below 0.5 s on a CPU, seconds on a GPU (minutes while Triton
compiles). Tensor parallelism is not checked: it gathers and adds the same statistics."""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megappo.algo.alignment import IGNORE_INDEX
from megappo.ops import dispatch
from megappo.ops.advantages import Discount, Rewards, TimeSteps, token_advantages
from megappo.ops.implementations import ORDER, interpreted, missing
from megappo.ops.linear_blocks import LinearLogits
from megappo.ops.linear_logprob import LinearOptions, linear_logprob
from megappo.ops.losses import policy_loss, value_loss
from megappo.runtime.messages import first_line

logger = logging.getLogger(__name__)

NUM_TOKENS = 3001  # several tiles, the last one partial
# Partial tiles of rows and of columns; padding that must not count.
NUM_ROWS, NUM_COLUMNS, PADDING, HIDDEN = 37, 1100, 45, 128
# columns; kernels split rows longer than 32768
LONG_ROWS, LONG_COLUMNS = 4, 40_000


@dataclass(frozen=True)
class Finding:
    """Comparison of one result of one function with its reference."""

    function: str
    result: str
    ops: dict[str, str]
    """Op -> implementation, of the ops that ran since the function's previous result."""
    error: float
    """Absolute error of the worst element."""
    allowed: float
    """Bound on that element's error."""
    at: tuple[int, ...]
    failure: str | None = None
    """Text of an error that the kernel raised instead."""

    @property
    def ok(self) -> bool:
        return self.failure is None and self.error <= self.allowed

    def line(self, device: torch.device) -> str:
        """Name the fault and the advice in one line, for a finding that is not ok."""
        kernels = ", ".join(f"{op} ({implementation})" for op, implementation in self.ops.items())
        others = [
            f"kernels={other}"
            for other in ORDER.get(device.type, ())
            if missing(other, device.type) is None and not self._blamed(other)
        ]
        advice = f"use {' or '.join(others)}, and report this" if others else "report this"
        return f"kernels: {kernels or self.function} {self._fault()}; {advice}"

    def _blamed(self, implementation: str) -> bool:
        """True if the implementation took part in the result; for the reference, only if nothing else did."""
        took_part = [implementation in ran.split(" + ") for ran in self.ops.values()]
        return bool(took_part) and all(took_part) if implementation == "reference" else any(took_part)

    def _fault(self) -> str:
        if self.failure is not None:
            return f"failed: {self.failure}"
        where = f"{self.result} of {self.function}" + (f" at {list(self.at)}" if self.at else "")
        return f"differs from its reference by {self.error:.2g}, not {self.allowed:.2g}, in {where}"


class Numbers:
    """Random inputs with the same values in every precision: rounded to the type asked for, then widened to fp64 if `wide`."""

    def __init__(self, device: torch.device, *, wide: bool) -> None:
        self.device, self._wide = device, wide
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._placed(torch.randn(shape, generator=self._generator) * scale, dtype)

    def uniform(self, *shape: int) -> Tensor:
        return self._placed(torch.rand(shape, generator=self._generator), torch.float32)

    # Drawn on the host: a GPU's generator gives other numbers.
    def flags(self, size: int, share: float) -> Tensor:
        return (torch.rand(size, generator=self._generator) < share).to(self.device)

    def integers(self, size: int, below: int) -> Tensor:
        return torch.randint(below, (size,), generator=self._generator).to(self.device)

    def _placed(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(self.device, dtype).to(torch.float64 if self._wide else dtype)


Results = Iterator[tuple[str, Tensor]]


def _from_logits(numbers: Numbers, dtype: torch.dtype, rows: int = NUM_ROWS, columns: int = NUM_COLUMNS) -> Results:
    """Run the row operations alone, on types and widths of logits that `linear_logprob` does not make of small problems."""
    ops = torch.ops.megappo
    logits = numbers.normal(rows, columns, scale=4.0, dtype=dtype)
    num_valid = columns - PADDING
    target = numbers.integers(rows, below=num_valid)
    scale = 1 / 0.7, None, IGNORE_INDEX
    stats = ops.vocab_stats(logits, target, 0, num_valid, *scale, True)
    logprob, entropy, lse = ops.vocab_stats_merge(stats[None], target, IGNORE_INDEX)
    yield "logprob", logprob
    yield "entropy", entropy
    upstream = numbers.normal(rows), numbers.normal(rows)
    arguments = logits, target, lse, entropy, *upstream, 0, num_valid, *scale
    yield "gradient of logits", ops.vocab_logits_backward(*arguments)
    out = torch.empty_like(logits)
    ops.vocab_logits_backward_into(*arguments, out)
    yield "gradient of logits, elsewhere", out


def _from_hidden(numbers: Numbers, dtype: torch.dtype, keep_logits: bool) -> Results:
    hidden = numbers.normal(NUM_ROWS, HIDDEN, dtype=dtype).requires_grad_()
    weight = numbers.normal(NUM_COLUMNS, HIDDEN, scale=HIDDEN**-0.5, dtype=dtype).requires_grad_()
    num_valid = NUM_COLUMNS - PADDING
    target = numbers.integers(NUM_ROWS, below=num_valid)
    options = LinearOptions(vocab_start=0, num_valid=num_valid, temperature=0.7, keep_logits=keep_logits)
    logprob, entropy = linear_logprob(hidden, weight, target, None, options)
    assert entropy is not None
    yield "logprob", logprob
    yield "entropy", entropy
    upstream = [numbers.normal(NUM_ROWS), numbers.normal(NUM_ROWS)]
    dhidden, dweight = torch.autograd.grad([logprob, entropy], [hidden, weight], upstream)
    yield "gradient of hidden", dhidden
    yield "gradient of weight", dweight
    rows = 4.0 + numbers.uniform(NUM_ROWS), numbers.uniform(NUM_ROWS), *upstream  # any lse and entropy
    operands = hidden.detach(), weight.detach()[:num_valid]
    problem = LinearLogits(*operands, target, 0, num_valid, 1 / 0.7, None, IGNORE_INDEX, None, False)
    yield "gradient of logits", torch.ops.megappo.linear_dlogits(*problem, *rows)


def _without_gradient(numbers: Numbers, num_tokens: int, num_columns: int) -> Results:
    # 600: rows of whole 16 bytes, as the fused kernels need, but no whole number of their tiles of 64.
    hidden = numbers.normal(num_tokens, 600, dtype=torch.bfloat16)
    weight = numbers.normal(num_columns, 600, scale=600**-0.5, dtype=torch.bfloat16)
    target = numbers.integers(num_tokens, below=num_columns - 9)
    with torch.no_grad():
        logprob, entropy = linear_logprob(hidden, weight, target, None, LinearOptions(vocab_start=0, num_valid=num_columns - 9))
    assert entropy is not None
    yield "logprob", logprob
    yield "entropy", entropy


def _advantages(numbers: Numbers) -> Results:
    # Sequences of 0, 1, many and few tokens, with gaps in the mask.
    cu_seqlens = torch.tensor([0, 0, 1, 2100, 2101, 2900, NUM_TOKENS], dtype=torch.int32, device=numbers.device)
    logprob = numbers.normal(NUM_TOKENS)
    value, mask = numbers.normal(NUM_TOKENS), numbers.flags(NUM_TOKENS, 0.8)
    names = "reward", "advantage", "returns", "moments"
    rewards = Rewards(logprob, numbers.normal(NUM_TOKENS), numbers.normal(6), None, "k3", 0.1)
    given = value, mask, cu_seqlens, numbers.normal(6), Discount(0.99, 0.95, 0.9)
    yield from zip(names, token_advantages(rewards, *given))
    rewards = rewards._replace(token_reward=numbers.normal(NUM_TOKENS))
    times = TimeSteps(numbers.flags(NUM_TOKENS, 0.5), *(numbers.uniform(NUM_TOKENS).double() for _ in range(2)))
    yield from zip((f"{name} of steps" for name in names), token_advantages(rewards, *given, times))
    of_rewards = token_advantages(rewards._replace(ref_logprob=None), *given)
    yield from zip((f"{name} of given rewards" for name in names), of_rewards)


def _policy(numbers: Numbers) -> Results:
    logprob = numbers.normal(NUM_TOKENS, scale=0.3).requires_grad_()
    weight = numbers.uniform(NUM_TOKENS) * numbers.flags(NUM_TOKENS, 0.8)
    loss, metrics = policy_loss(logprob, numbers.normal(NUM_TOKENS, scale=0.3), numbers.normal(NUM_TOKENS), weight, dual_clip=1.5)
    yield "loss", loss
    yield "gradient", torch.autograd.grad(loss, logprob)[0]
    yield from metrics.items()


def _value(numbers: Numbers) -> Results:
    value = numbers.normal(NUM_TOKENS).requires_grad_()
    weight = numbers.uniform(NUM_TOKENS) * numbers.flags(NUM_TOKENS, 0.8)
    loss, metrics = value_loss(value, numbers.normal(NUM_TOKENS), numbers.normal(NUM_TOKENS), weight, clip=0.2)
    yield "loss", loss
    yield "gradient", torch.autograd.grad(loss, value)[0]
    yield from metrics.items()


@dataclass(frozen=True)
class Problem:
    """Call of a public function. One rounding to a result's own type is allowed on top of the precisions."""

    function: str
    run: Callable[[Numbers], Results]
    """Yields the results of `function` in the order in which they are computed."""
    precision: float = 1e-5  # 84 roundings of fp32: sums of a few thousand terms of either sign, a division, an exponential
    """Error allowed in a result, relative to its largest element."""
    gradient_precision: float = 1e-5


# Products of bf16 are exact and summed in fp32, but the gradient of logits is rounded to bf16 (relative error 2^-9) before the two
# products of the backward, so each of their terms has that error.
ROUNDED_LOGITS_GRADIENT = 2**-7


def problems() -> list[Problem]:
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        Problem("vocab_stats", lambda n: _from_logits(n, fp32)),
        Problem("vocab_stats", lambda n: _from_logits(n, bf16)),
        Problem("vocab_stats", lambda n: _from_logits(n, bf16, LONG_ROWS, LONG_COLUMNS)),
        Problem("linear_logprob", lambda n: _from_hidden(n, bf16, False), gradient_precision=ROUNDED_LOGITS_GRADIENT),
        Problem("linear_logprob", lambda n: _from_hidden(n, bf16, True), gradient_precision=ROUNDED_LOGITS_GRADIENT),
        Problem("token_advantages", _advantages),
        Problem("policy_loss", _policy),
        Problem("value_loss", _value),
    ]


def gpu_problems() -> list[Problem]:
    """Problems large enough for a GPU's persistent kernels; a CPU would need seconds for them."""
    # Sizes at which each block works through many tiles of the vocabulary, then through many tiles of tokens.
    return [
        Problem("linear_logprob", lambda n: _without_gradient(n, 300, 40_000)),
        Problem("linear_logprob", lambda n: _without_gradient(n, 17_000, 2_000)),
    ]


class Calls:
    """Record of the ops that ran and their implementations; a `dispatch.Watch`."""

    def __init__(self) -> None:
        self._ran: dict[str, str] = {}

    def __call__(self, op: str, implementation: str, call: Callable[[], Any]) -> Any:
        self._ran[op] = implementation
        return call()

    def take(self) -> dict[str, str]:
        ran, self._ran = self._ran, {}
        return ran


def problems_for(device_type: str) -> list[Problem]:
    return problems() + (gpu_problems() if device_type == "cuda" and not interpreted() else [])


def run_checks(device: torch.device) -> list[Finding]:
    """Check every result of every problem with the kernels selected now, in this process. Waits for the device."""
    return [finding for problem in problems_for(device.type) for finding in _check_here(problem, device)]


def require_right(device: torch.device) -> None:
    """Check the kernels selected now. Raises ValueError, one line with the kernels and the way out, if one raises or is wrong."""
    # A kernel that hangs or crashes takes the process with it: this line is then the last of the log.
    logger.info("checking the kernels on %s; if this is the last line of the run, start it with kernels=reference", device)
    wrong = next((finding for finding in run_checks(device) if not finding.ok), None)
    if wrong is not None:
        raise ValueError(wrong.line(device))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the run's models find the memory as it was


def _check_here(problem: Problem, device: torch.device) -> Iterator[Finding]:
    calls = Calls()
    try:
        yield from check(problem, device, calls)
    except (
        Exception
    ) as error:  # a launch that CUDA refuses, a failed check of the C++ layer, Triton's compiler: all are the kernel's
        yield Finding(problem.function, "", calls.take(), math.inf, 0.0, (), first_line(error))


def check(problem: Problem, device: torch.device, calls: Calls) -> Iterator[Finding]:
    """Compare every result of the problem with its reference. Errors raised by a kernel propagate."""
    wanted = problem.run(Numbers(device, wide=True))
    got = problem.run(Numbers(device, wide=False))
    ran: dict[str, str] = {}
    while True:
        with dispatch.watched(calls):
            step = next(got, None)
        if step is None:
            return
        # a result computed without a new op is a further output of the previous op
        ran = calls.take() or ran
        name, want = next(wanted)
        yield _compared(problem, name, ran, step[1].detach(), want.detach())


def _compared(problem: Problem, name: str, ran: dict[str, str], got: Tensor, want: Tensor) -> Finding:
    if got.numel() == 0 or got.shape != want.shape:
        text = f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
        return Finding(problem.function, name, ran, math.inf, 0.0, (), text)
    difference = (got.double() - want.double()).abs()
    difference = torch.where(difference.isnan(), torch.inf, difference)  # NaN would compare as within any bound
    # Results in bf16 or fp16 are rounded once at the end; fp32's own rounding is within `precision`.
    own_rounding = torch.finfo(got.dtype).eps if got.dtype.itemsize < 4 else 0.0
    precision = problem.gradient_precision if name.startswith("gradient") else problem.precision
    # 1e-3: a result of zeros must not be held to a bound of 0.
    allowed = precision * want.abs().amax().clamp(min=1e-3).double() + own_rounding * want.abs().double()
    worst = int((difference / allowed).argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)) if got.dim() else ()
    return Finding(problem.function, name, ran, float(difference.flatten()[worst]), float(allowed.flatten()[worst]), at)


def main(argv: Sequence[str] | None = None) -> int:
    """Check the kernels of `kernels: auto` on a device and print those that are wrong; returns 1 if there are any."""
    parser = argparse.ArgumentParser(description="Compare every kernel with its fp64 reference.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    device = torch.device(parser.parse_args(argv).device)
    findings = run_checks(device)
    wrong = [finding.line(device) for finding in findings if not finding.ok]
    print("\n".join([*wrong, f"{len(findings) - len(wrong)} of {len(findings)} results on {device} agree with their references"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
