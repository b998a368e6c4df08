"""Benchmark policy loss and value loss: `python benchmarks/bench_losses.py [--check] ...`. A shape is a number of tokens.

All formulations return the loss and the metrics that the trainer logs. The floor is one read of the inputs and one write of the
gradient at the bandwidth of the run's copy: 20 bytes per token (the gradient is made in the forward), 8 more in the backward, which
multiplies by the upstream gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.harness.candidates import differentiable, ours, plain_and_compiled
from benchmarks.harness.cli import run
from benchmarks.harness.model import Benchmark, Calls, Candidate, Difference, Mistake, worst
from megappo.ops.losses import policy_loss, value_loss

FORM = "tokens like 65536, 64Ki or 1Mi"
CLIP, VALUE_CLIP = 0.2, 0.2
# Metrics to compare with the oracle, in the order that every formulation returns them after the loss.
POLICY_METRICS = ("ratio_sum", "approx_kl_sum")
VALUE_METRICS = ("value_error_sum", "value_squared_error_sum")


def read(text: str) -> int:
    for suffix, factor in (("Ki", 2**10), ("Mi", 2**20), ("", 1)):
        digits = text.removesuffix(suffix)
        if text.endswith(suffix) and digits.isdigit() and int(digits) > 0:
            return int(digits) * factor
    raise Mistake(f"shape {text!r}: want {FORM}")


def plain_policy_loss(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """verl's formulation, with its own cap and its own k3, as it is the peer to compare with: (loss, metrics ...)."""
    log_ratio = (logprob - old_logprob).clamp(-20.0, 20.0)  # verl's numbers, not algo/kl.py's
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
    valid = (weight != 0).to(ratio.dtype)
    with torch.no_grad():
        cut_low = ((ratio < 1 - CLIP) & (advantage < 0)).to(ratio.dtype) * valid
        cut_high = ((ratio > 1 + CLIP) & (advantage > 0)).to(ratio.dtype) * valid
        kl = (torch.expm1(log_ratio) - log_ratio) * valid
        kept = ratio * valid
        metrics = kept.sum(), kl.sum(), cut_low.sum(), cut_high.sum(), valid.sum(), kept.amax()
    return (weight * loss).sum(), *metrics


def plain_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    clipped = old_value + (value - old_value).clamp(-VALUE_CLIP, VALUE_CLIP)
    error = value - returns
    plain, cut = error.square(), (clipped - returns).square()
    valid = (weight != 0).to(value.dtype)
    with torch.no_grad():
        kept = error * valid
        num_cut, values = ((cut > plain) * valid).sum(), (value * valid).sum()
        metrics = kept.sum(), kept.square().sum(), num_cut, values, valid.sum(), kept.abs().amax()
    return 0.5 * (weight * torch.maximum(plain, cut)).sum(), *metrics


@dataclass(frozen=True)
class LossProblem:
    """inputs [T]: the first is differentiated. exact: the plain formulation, which the oracle runs in fp64."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    exact: Callable[..., tuple[Tensor, ...]]
    metrics: tuple[str, str]
    gradient: str
    known: dict[Any, Any] = field(default_factory=dict, compare=False)

    @property
    def probes(self) -> Mapping[str, Callable[[], Any]]:
        return {}

    @property
    def floors(self) -> Mapping[str, Mapping[str, float]]:
        num_tokens = self.inputs[0].numel()
        return {"forward": {"copy": 20 * num_tokens}, "backward": {"copy": 8 * num_tokens}, "both": {"copy": 28 * num_tokens}}

    def differences(self, results: Mapping[str, Tensor], rounds_to: torch.dtype | None, ours: bool) -> list[Difference]:
        """Compare with the oracle. Bound: the rounding of the terms in fp32 for sums, a few roundings for gradients. No token is
        within 1e-3 of a clip, so fp32 and fp64 agree on its side."""
        x = self.inputs[0].double().requires_grad_()
        loss, *metrics = self.exact(x, *(t.double() for t in self.inputs[1:]))
        (gradient,) = torch.autograd.grad(loss, x)
        slack = 1 if ours else 8
        sums = {"loss": loss.detach(), **dict(zip(self.metrics, metrics))}
        terms = x.numel() * max(1.0, float(gradient.abs().amax()))
        found = [worst(name, results[name], want, slack * 2**-24 * terms) for name, want in sums.items()]
        # exp(log ratio): the rounding of a log-prob of size 3 is an absolute error of the exponent
        atol = slack * 1e-7 * float(gradient.abs().amax())
        return [*found, worst(self.gradient, results[self.gradient], gradient, atol, slack * 2e-6)]


def away_from(bounds: Sequence[float], x: Tensor) -> Tensor:
    for bound in bounds:
        x = torch.where((x - bound).abs() < 1e-3, bound + 2e-3, x)
    return x


def policy_problem(num_tokens: int, dtype: torch.dtype, device: torch.device) -> LossProblem:
    generator = torch.Generator(device).manual_seed(0)
    logprob, advantage, noise = torch.randn(3, num_tokens, generator=generator, device=device)
    ratio = away_from([1 - CLIP, 1 + CLIP], (0.2 * noise).exp())
    weight = (torch.rand(num_tokens, generator=generator, device=device) < 0.7).float()
    logprob = logprob - 2.0
    return LossProblem((logprob, logprob - ratio.log(), advantage, weight), plain_policy_loss, POLICY_METRICS, "dlogprob")


def value_problem(num_tokens: int, dtype: torch.dtype, device: torch.device) -> LossProblem:
    generator = torch.Generator(device).manual_seed(0)
    old_value, returns, noise = torch.randn(3, num_tokens, generator=generator, device=device)
    change = away_from([-VALUE_CLIP, VALUE_CLIP], 0.2 * noise)
    weight = (torch.rand(num_tokens, generator=generator, device=device) < 0.7).float()
    value = old_value + change
    # If the clipped error is as large as the plain one, either may be taken.
    equal = ((value - returns).abs() - (old_value + change.clamp(-VALUE_CLIP, VALUE_CLIP) - returns).abs()).abs() < 1e-3
    returns = torch.where(equal & (change.abs() > VALUE_CLIP), returns + 1.0, returns)
    return LossProblem((value, old_value, returns, weight), plain_value_loss, VALUE_METRICS, "dvalue")


def loss_candidates(p: LossProblem, op: str, megappo: Callable[..., Sequence[Tensor]]) -> Sequence[Candidate]:
    one = torch.ones((), device=p.inputs[0].device)

    def calls(function: Callable[..., Sequence[Tensor]]) -> Calls:
        made = differentiable(lambda x: function(x, *p.inputs[1:]), {p.gradient: p.inputs[0]}, {"loss": one})
        assert made.backward is not None
        backward = made.backward  # of the loss alone
        names = ("loss", *p.metrics)
        return replace(made, named=lambda values: dict(zip(names, values)), backward=lambda values: backward(values[:1]))

    return [*ours((op,), one.device, lambda: calls(megappo)), *plain_and_compiled("with metrics", p.exact, calls)]


def megappo_policy_loss(*inputs: Tensor) -> tuple[Tensor, ...]:
    loss, metrics = policy_loss(*inputs, clip_low=CLIP, clip_high=CLIP)
    return loss, *(metrics[name] for name in POLICY_METRICS)


def megappo_value_loss(*inputs: Tensor) -> tuple[Tensor, ...]:
    loss, metrics = value_loss(*inputs, clip=VALUE_CLIP)
    return loss, *(metrics[name] for name in VALUE_METRICS)


SHAPES = {"cpu": ["64Ki", "1Mi"], "cuda": ["64Ki", "1Mi"]}
FP32 = {"cpu": [torch.float32], "cuda": [torch.float32]}
POLICY_LOSS = Benchmark(
    "policy_loss", FORM, SHAPES, FP32, read, policy_problem, lambda p: loss_candidates(p, "policy_loss", megappo_policy_loss)
)
VALUE_LOSS = Benchmark(
    "value_loss", FORM, SHAPES, FP32, read, value_problem, lambda p: loss_candidates(p, "value_loss", megappo_value_loss)
)


def main(argv: Sequence[str] | None = None) -> int:
    benchmarks = [POLICY_LOSS, VALUE_LOSS]
    return run("bench_losses", "Policy loss and value loss with their metrics.", benchmarks, argv)


if __name__ == "__main__":
    sys.exit(main())
