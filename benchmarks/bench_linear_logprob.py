"""Benchmark log-prob and entropy from hidden states and the output weight: `python benchmarks/bench_linear_logprob.py [--check]
...`.

A shape is TxHxV, or TxHxV/TP for one tensor-parallel shard of V. The floor is the bare matrix products of that shape and dtype,
timed in the same rounds: one in the forward, two in the backward (hidden, weight); "fwd+bwd, logits recomputed" adds the fourth
product of methods that keep no logits. On the CPU a bf16 product rounds its result; logits in fp32 need products of widened
operands, whose floor is given too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.harness.bars import RECOMPUTED, WIDENED
from benchmarks.harness.candidates import differentiable, ours, plain_and_compiled
from benchmarks.harness.cli import run
from benchmarks.harness.model import Benchmark, Calls, Candidate, Difference, Mistake, worst, worst_row
from benchmarks.harness.peers import linear_peers
from benchmarks.harness.vocab import log_softmax_logprob, logsumexp_logprob, numbers, oracle_rows, row_chunks
from megappo.ops.linear_logprob import LinearOptions, linear_logprob

FORM = "tokens x hidden x vocabulary like 1024x512x32000, or one shard of it like 8192x4096x151936/8"
USES = (
    "linear_stats",
    "linear_dlogits",
    "linear_backward",
    "vocab_stats",
    "vocab_stats_merge",
    "vocab_logits_backward",
    "vocab_logits_backward_",
    "vocab_logits_backward_into",
)


def read(text: str) -> tuple[int, int, int]:
    """(tokens, hidden size, columns of this shard)."""
    sizes, slash, tp = text.partition("/")
    num_tokens, hidden, vocab = numbers(sizes, "x", 3, FORM)
    parts = numbers(tp, "x", 1, FORM)[0] if slash else 1
    if vocab % parts:
        raise Mistake(f"shape {text!r}: {vocab} columns do not divide by {parts}")
    return num_tokens, hidden, vocab // parts


@dataclass(frozen=True)
class LinearProblem:
    hidden: Tensor
    weight: Tensor
    target: Tensor
    g_logprob: Tensor
    g_entropy: Tensor
    known: dict[Any, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def probes(self) -> Mapping[str, Callable[[], Any]]:
        found = _products(self.hidden, self.weight, "")
        return {**found, **_products(self.hidden.float(), self.weight.float(), " in fp32")} if self.widened else found

    @property
    def widened(self) -> bool:
        """A CPU's product of half types rounds its result: logits in fp32 need the slower products of widened operands."""
        return self.hidden.device.type == "cpu" and self.hidden.dtype != torch.float32

    @property
    def floors(self) -> Mapping[str, Mapping[str, float]]:
        backward = {"dhidden product": 1.0, "dweight product": 1.0}
        found = {
            "forward": {"logits product": 1.0},
            "backward": backward,
            "both": {"logits product": 1.0, **backward},
            RECOMPUTED: {"logits product": 2.0, **backward},
        }
        if self.widened:
            found[WIDENED] = {f"{name} in fp32": calls for name, calls in found[RECOMPUTED].items()}
        return found

    def differences(self, results: Mapping[str, Tensor], rounds_to: torch.dtype | None, ours: bool) -> list[Difference]:
        """Compare with the oracle. Bound: three times the error of an fp32 product of this length, plus that of `bench_logprob` for
        the rows. Gradients row by row: dlogits and the result are rounded to the type of the weights once each. Others get 8 times
        that, and those that stage logits in bf16 their rounding; their gradients are compared as a whole: some skip small rows."""
        if "logprob" not in results:
            return []  # a sum with another upstream gradient: not the same function
        lengths = float(self.hidden.double().norm(dim=1).amax() * self.weight.double().norm(dim=1).amax())
        slack = 1 if ours and rounds_to is None else 8
        tolerance = slack * (3 * self.hidden.shape[1] ** 0.5 * 2**-24 * lengths + 4 * 2**-24 * lengths + 2e-6)
        exact = self._exact("entropy" in results)
        staged = 2**-8 * exact["largest logit"].item() if rounds_to == torch.bfloat16 else 0.0
        unit = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(self.hidden.dtype, 2e-5)
        found = [worst("logprob", results["logprob"], exact["logprob"], tolerance + staged)]
        if "entropy" in results:
            found.append(worst("entropy", results["entropy"], exact["entropy"], 8 * tolerance + staged, 4e-6))
        for name in ("dhidden", "dweight"):
            shape = exact[name].shape if rounds_to is None else (1, exact[name].numel())
            found.append(worst_row(name, results[name].reshape(shape), exact[name].reshape(shape), slack * unit + staged))
        return found

    def _exact(self, with_entropy: bool) -> Mapping[str, Tensor]:
        """Expected values by the names of the results."""
        if with_entropy not in self.known:
            hidden, weight = self.hidden.double(), self.weight.double()
            dhidden, dweight = torch.zeros_like(hidden), torch.zeros_like(weight)
            rows_of, largest = [], []
            for rows in row_chunks(hidden.shape[0], weight.shape[0]):
                logits = hidden[rows] @ weight.t()
                g_entropy = self.g_entropy[rows] if with_entropy else None
                *row_results, dlogits = oracle_rows(logits, self.target[rows], self.g_logprob[rows], g_entropy)
                rows_of.append(row_results)
                largest.append(logits.abs().amax())
                dhidden[rows] = dlogits @ weight
                dweight += dlogits.t() @ hidden[rows]
            logprob, entropy = (torch.cat(parts) for parts in zip(*rows_of))
            self.known[with_entropy] = {
                "logprob": logprob,
                "entropy": entropy,
                "dhidden": dhidden,
                "dweight": dweight,
                "largest logit": torch.stack(largest).amax(),
            }
        return self.known[with_entropy]


def _products(hidden: Tensor, weight: Tensor, suffix: str) -> Mapping[str, Callable[[], Any]]:
    logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    dlogits = torch.randn_like(logits)
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)
    return {
        f"logits product{suffix}": lambda: torch.mm(hidden, weight.t(), out=logits),
        f"dhidden product{suffix}": lambda: torch.mm(dlogits, weight, out=dhidden),
        f"dweight product{suffix}": lambda: torch.mm(dlogits.t(), hidden, out=dweight),
    }


def problem(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> LinearProblem:
    generator = torch.Generator(device).manual_seed(0)
    num_tokens, size, vocab = sizes
    hidden = torch.randn(num_tokens, size, generator=generator, device=device).to(dtype)
    weight = (torch.randn(vocab, size, generator=generator, device=device) * (2.0 / size**0.5)).to(dtype)
    target = torch.randint(0, vocab, (num_tokens,), generator=generator, device=device)
    g_logprob, g_entropy = torch.randn(2, num_tokens, generator=generator, device=device)
    return LinearProblem(hidden, weight, target, g_logprob, g_entropy)


def log_softmax_linear(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return log_softmax_logprob(hidden @ weight.t(), target)


def logsumexp_linear(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return logsumexp_logprob(hidden @ weight.t(), target)


def candidates(p: LinearProblem) -> Sequence[Candidate]:
    def calls(function: Callable[..., Sequence[Tensor]]) -> Calls:
        inputs = {"dhidden": p.hidden, "dweight": p.weight}
        return differentiable(function, inputs, {"logprob": p.g_logprob, "entropy": p.g_entropy})

    def megappo(**options: Any) -> Callable[[], Calls]:
        def function(hidden: Tensor, weight: Tensor) -> Sequence[Tensor]:
            chosen = LinearOptions(vocab_start=0, num_valid=p.weight.shape[0], **options)
            return linear_logprob(hidden, weight, p.target, None, chosen)

        return lambda: calls(function)

    def plain(function: Callable[..., Sequence[Tensor]]) -> Calls:
        return calls(lambda hidden, weight: function(hidden, weight, p.target))

    device = p.hidden.device
    staged = p.hidden.dtype if p.hidden.dtype != torch.float32 else None
    rounded = ours(USES, device, megappo(logits_dtype="bf16"), variant="bf16 logits", rounds_to=staged) if staged else []
    return [
        *ours(USES, device, megappo()),
        *ours(USES, device, megappo(keep_logits=True), variant="kept logits", note="3 products, [T, V] of memory"),
        *rounded,
        *plain_and_compiled("log_softmax", log_softmax_linear, plain, rounds_to=staged),
        *plain_and_compiled("logsumexp", logsumexp_linear, plain, rounds_to=staged),
        *linear_peers(p.hidden, p.weight, p.target, p.g_logprob, p.g_entropy),
    ]


LINEAR_LOGPROB = Benchmark(
    name="linear_logprob",
    shape_form=FORM,
    shapes={"cpu": ["1024x512x32000"], "cuda": ["8192x4096x151936", "8192x4096x151936/8"]},
    dtypes={"cpu": [torch.float32, torch.bfloat16], "cuda": [torch.bfloat16]},
    read=read,
    problem=problem,
    candidates=candidates,
)


def main(argv: Sequence[str] | None = None) -> int:
    return run("bench_linear_logprob", "Log-prob and entropy from hidden states and the output weight.", [LINEAR_LOGPROB], argv)


if __name__ == "__main__":
    sys.exit(main())
