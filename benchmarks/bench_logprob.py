"""Benchmark log-prob and entropy from logits: `benchmarks/bench_logprob.py [--check] [--json FILE] [--plot FILE]`, on CPU or GPU.

A shape is TxV, or TxV/TP for one tensor-parallel shard of V: the targets are then those that the shard owns, and the all-gather
of 16 bytes per token is left out. The floor is the time that the copy of the same run takes for the logits once (forward), and
twice (backward: read the logits, write the gradient).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.harness.candidates import differentiable, ours, plain_and_compiled
from benchmarks.harness.cli import run
from benchmarks.harness.model import Benchmark, Calls, Candidate, Difference, Mistake, merged, worst
from benchmarks.harness.peers import logits_peers
from benchmarks.harness.vocab import log_softmax_logprob, logsumexp_logprob, numbers, oracle_rows, row_chunks
from megappo.algo.alignment import IGNORE_INDEX
from megappo.ops import vocab_stats  # noqa: F401  registers torch.ops.megappo.vocab_*

FORM = "tokens x vocabulary like 2048x32000, or one shard of it like 8192x151936/8"
# Bytes of fp64 gradients to keep for the check of the next candidate.
KNOWN_BYTES = 2**30
USES = ("vocab_stats", "vocab_stats_merge", "vocab_logits_backward")


def read(text: str) -> tuple[int, int]:
    """(tokens, columns of this shard)."""
    sizes, slash, tp = text.partition("/")
    num_tokens, vocab = numbers(sizes, "x", 2, FORM)
    parts = numbers(tp, "x", 1, FORM)[0] if slash else 1
    if vocab % parts:
        raise Mistake(f"shape {text!r}: {vocab} columns do not divide by {parts}")
    return num_tokens, vocab // parts


@dataclass(frozen=True)
class LogprobProblem:
    logits: Tensor
    target: Tensor
    g_logprob: Tensor
    g_entropy: Tensor
    known: dict[Any, Any] = field(default_factory=dict, compare=False)

    @property
    def probes(self) -> Mapping[str, Callable[[], Any]]:
        return {}

    @property
    def floors(self) -> Mapping[str, Mapping[str, float]]:
        size = self.logits.nbytes
        return {"forward": {"copy": size}, "backward": {"copy": 2 * size}, "both": {"copy": 3 * size}}

    def differences(self, results: Mapping[str, Tensor], rounds_to: torch.dtype | None, ours: bool) -> list[Difference]:
        """Compare with the oracle. Bound: 4 roundings of the largest logit and 2e-6 for the sums; for gradients one rounding to
        their type more. Others get 8 times that, and a few roundings to the type that they stage in."""
        largest = float(self.logits.abs().amax())
        tolerance = (4 * 2**-24 * max(1.0, largest) + 2e-6) * (1 if ours else 8)
        staged = 2**-7 if rounds_to == torch.bfloat16 else 0.0
        unit = max({torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(self.logits.dtype, 0.0), staged)
        g_largest = float(torch.maximum(self.g_logprob.abs().amax(), self.g_entropy.abs().amax()))
        atol, rtol = (2 * tolerance + staged) * g_largest, unit + 4 * tolerance
        parts = []
        for rows, (logprob, entropy, dlogits) in self._exact("entropy" in results):
            parts.append(worst("logprob", results["logprob"][rows], logprob, tolerance + staged * largest))
            parts.append(worst("dlogits", results["dlogits"][rows], dlogits, atol, rtol))
            if "entropy" in results:
                parts.append(worst("entropy", results["entropy"][rows], entropy, 8 * tolerance, 4e-6))
        return merged(parts)

    def _exact(self, with_entropy: bool) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor]]]:
        """Rows and their expected values, cached for the next candidate if memory suffices."""
        for rows in row_chunks(*self.logits.shape):
            key = with_entropy, rows.start
            exact = self.known.get(key)
            if exact is None:
                g_entropy = self.g_entropy[rows] if with_entropy else None
                exact = oracle_rows(self.logits[rows].double(), self.target[rows], self.g_logprob[rows], g_entropy)
                if 8 * self.logits.numel() <= KNOWN_BYTES:
                    self.known[key] = exact
            yield rows, exact


def problem(sizes: tuple[int, int], dtype: torch.dtype, device: torch.device) -> LogprobProblem:
    generator = torch.Generator(device).manual_seed(0)
    num_tokens, vocab = sizes
    logits = (3.0 * torch.randn(num_tokens, vocab, generator=generator, device=device)).to(dtype)
    target = torch.randint(0, vocab, (num_tokens,), generator=generator, device=device)
    g_logprob, g_entropy = torch.randn(2, num_tokens, generator=generator, device=device)
    return LogprobProblem(logits, target, g_logprob, g_entropy)


class _RowOps(torch.autograd.Function):
    """The row operations of `linear_logprob` on logits that exist as a whole."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        ctx.scale = 0, logits.shape[1], 1.0, None, IGNORE_INDEX
        stats = torch.ops.megappo.vocab_stats(logits, target, *ctx.scale, True)
        logprob, entropy, lse = torch.ops.megappo.vocab_stats_merge(stats[None], target, IGNORE_INDEX)
        ctx.save_for_backward(logits, target, lse, entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return torch.ops.megappo.vocab_logits_backward(*ctx.saved_tensors, *upstream, *ctx.scale), None


def row_ops(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(logprob [T], entropy [T]) of logits [T, V], differentiable."""
    return _RowOps.apply(logits, target)


def candidates(p: LogprobProblem) -> Sequence[Candidate]:
    def calls(function: Callable[..., Sequence[Tensor]]) -> Calls:
        return differentiable(function, {"dlogits": p.logits}, {"logprob": p.g_logprob, "entropy": p.g_entropy})

    def megappo(logits: Tensor) -> Sequence[Tensor]:
        return row_ops(logits, p.target)

    def plain(function: Callable[..., Sequence[Tensor]]) -> Calls:
        return calls(lambda logits: function(logits, p.target))

    return [
        *ours(USES, p.logits.device, lambda: calls(megappo)),
        *plain_and_compiled("log_softmax", log_softmax_logprob, plain),
        *plain_and_compiled("logsumexp", logsumexp_logprob, plain),
        *logits_peers(p.logits, p.target, p.g_logprob),
    ]


LOGPROB = Benchmark(
    name="logprob",
    shape_form=FORM,
    shapes={"cpu": ["2048x32000"], "cuda": ["8192x151936", "8192x151936/8"]},
    dtypes={"cpu": [torch.float32, torch.bfloat16], "cuda": [torch.bfloat16]},
    read=read,
    problem=problem,
    candidates=candidates,
)


def main(argv: Sequence[str] | None = None) -> int:
    return run("bench_logprob", "Log-prob and entropy from logits, forward and backward.", [LOGPROB], argv)


if __name__ == "__main__":
    sys.exit(main())
