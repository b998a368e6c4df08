"""Benchmark the clipped policy loss with an entropy bonus from hidden states: `python benchmarks/bench_linear_loss.py [--check]`.

`linear_token_loss` makes its gradients while the logits of a chunk exist: three matrix products, which is the floor (timed in the
same rounds). Shapes are those of bench_linear_logprob.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.bench_linear_logprob import FORM, LINEAR_LOGPROB, USES, LinearProblem, read
from benchmarks.bench_linear_logprob import problem as linear_problem
from benchmarks.bench_losses import CLIP, away_from, plain_policy_loss
from benchmarks.harness.candidates import differentiable, ours, plain_and_compiled
from benchmarks.harness.cli import run
from benchmarks.harness.model import Benchmark, Calls, Candidate, Difference, worst, worst_row
from benchmarks.harness.vocab import log_softmax_logprob, oracle_rows, row_chunks
from megappo.algo.losses import entropy_loss
from megappo.ops.linear_logprob import LinearOptions, linear_logprob
from megappo.ops.linear_loss import linear_token_loss
from megappo.ops.losses import policy_loss

ENTROPY_COEF = 0.01


@dataclass(frozen=True)
class LinearLossProblem:
    """token_weight: mask over the number of tokens."""

    linear: LinearProblem
    old_logprob: Tensor
    advantage: Tensor
    token_weight: Tensor
    known: dict[Any, Any] = field(default_factory=dict, compare=False)

    @property
    def probes(self) -> Mapping[str, Callable[[], Any]]:
        return self.linear.probes

    @property
    def floors(self) -> Mapping[str, Mapping[str, float]]:
        return {phase: parts for phase, parts in self.linear.floors.items() if phase in ("forward", "both")}

    def differences(self, results: Mapping[str, Tensor], rounds_to: torch.dtype | None, ours: bool) -> list[Difference]:
        """Compare gradients as `bench_linear_logprob`. The error of log-probs from bf16 logits can move tokens over the clip: those
        formulations are compared as a whole, to a third of the norm."""
        if not self.known:
            self.known.update(self._exact())
        loss, dhidden, dweight = self.known["loss"], self.known["dhidden"], self.known["dweight"]
        if rounds_to is not None:
            rows = {name: (results[name].reshape(1, -1), self.known[name].reshape(1, -1)) for name in ("dhidden", "dweight")}
            return [worst("loss", results["loss"], loss, 0.05), *(worst_row(name, *pair, 1 / 3) for name, pair in rows.items())]
        slack = 1 if ours else 8
        unit = slack * {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(self.linear.hidden.dtype, 4e-5)
        return [
            worst("loss", results["loss"], loss, slack * 2e-6),
            worst_row("dhidden", results["dhidden"], dhidden, unit),
            worst_row("dweight", results["dweight"], dweight, unit),
        ]

    def _exact(self) -> Mapping[str, Tensor]:
        """Expected values by the names of the results."""
        hidden, weight = self.linear.hidden.double(), self.linear.weight.double()
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        dhidden, dweight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for rows in row_chunks(hidden.shape[0], weight.shape[0]):
            logits, target = hidden[rows] @ weight.t(), self.linear.target[rows]
            nothing = torch.zeros(logits.shape[0], device=hidden.device)
            logprob, entropy, _ = oracle_rows(logits, target, nothing, nothing)
            part, g_logprob, g_entropy = self._exact_loss(rows, logprob, entropy)
            _, _, dlogits = oracle_rows(logits, target, g_logprob, g_entropy)
            loss += part
            dhidden[rows] = dlogits @ weight
            dweight += dlogits.t() @ hidden[rows]
        return {"loss": loss, "dhidden": dhidden, "dweight": dweight}

    def _exact_loss(self, rows: slice, logprob: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(loss of these rows, its gradients by logprob and entropy), fp64."""
        logprob, entropy = logprob.requires_grad_(), entropy.requires_grad_()
        fields = (self.old_logprob[rows].double(), self.advantage[rows].double(), self.token_weight[rows].double())
        loss = plain_loss(logprob, entropy, *fields)
        return loss.detach(), *torch.autograd.grad(loss, (logprob, entropy))


def plain_loss(logprob: Tensor, entropy: Tensor, old_logprob: Tensor, advantage: Tensor, token_weight: Tensor) -> Tensor:
    return plain_policy_loss(logprob, old_logprob, advantage, token_weight)[0] - ENTROPY_COEF * (token_weight * entropy).sum()


def naive(hidden: Tensor, weight: Tensor, target: Tensor, *fields: Tensor) -> Tensor:
    return plain_loss(*log_softmax_logprob(hidden @ weight.t(), target), *fields)


def problem(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> LinearLossProblem:
    linear = linear_problem(sizes, dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    advantage, noise = torch.randn(2, sizes[0], generator=generator, device=device)
    mask = torch.rand(sizes[0], generator=generator, device=device) < 0.7
    weight = linear.weight.float().t()
    logprob = torch.cat(
        [
            (linear.hidden[rows].float() @ weight).log_softmax(1).gather(1, linear.target[rows, None])[:, 0]
            for rows in row_chunks(sizes[0], sizes[2])
        ]
    )
    ratio = away_from([1 - CLIP, 1 + CLIP], (0.2 * noise).exp())
    return LinearLossProblem(linear, logprob - ratio.log(), advantage, mask.float() / mask.sum().clamp(min=1))


def candidates(p: LinearLossProblem) -> Sequence[Candidate]:
    linear = p.linear
    device, target = linear.hidden.device, linear.target
    fields = (p.old_logprob, p.advantage, p.token_weight)
    options = LinearOptions(vocab_start=0, num_valid=linear.weight.shape[0])
    clip = {"clip_low": CLIP, "clip_high": CLIP}

    def calls(function: Callable[[Tensor, Tensor], Tensor]) -> Calls:
        inputs, outputs = {"dhidden": linear.hidden, "dweight": linear.weight}, {"loss": torch.ones((), device=device)}
        return differentiable(lambda h, w: (function(h, w),), inputs, outputs)

    def token_loss(tokens: slice, logprob: Tensor, entropy: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        assert entropy is not None
        loss, metrics = policy_loss(logprob, *(field[tokens] for field in fields), **clip)
        return loss + ENTROPY_COEF * entropy_loss(entropy, p.token_weight[tokens]), metrics

    def fused(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_token_loss(hidden, weight, target, None, options, token_loss).loss

    def in_steps(hidden: Tensor, weight: Tensor) -> Tensor:
        logprob, entropy = linear_logprob(hidden, weight, target, None, options)
        assert entropy is not None
        return policy_loss(logprob, *fields, **clip)[0] + ENTROPY_COEF * entropy_loss(entropy, p.token_weight)

    def plain(function: Callable[..., Tensor]) -> Calls:
        return calls(lambda h, w: function(h, w, target, *fields))

    staged = linear.hidden.dtype if linear.hidden.dtype != torch.float32 else None
    return [
        *ours((*USES, "policy_loss"), device, lambda: calls(fused)),
        *ours(
            (*USES, "policy_loss"),
            device,
            lambda: calls(in_steps),
            variant="in steps",
            note="linear_logprob, then the losses: 4 products",
        ),
        *plain_and_compiled("log_softmax", naive, plain, rounds_to=staged),
    ]


LINEAR_LOSS = Benchmark("linear_loss", FORM, LINEAR_LOGPROB.shapes, LINEAR_LOGPROB.dtypes, read, problem, candidates)


def main(argv: Sequence[str] | None = None) -> int:
    return run("bench_linear_loss", "Policy loss with entropy bonus from hidden states.", [LINEAR_LOSS], argv)


if __name__ == "__main__":
    sys.exit(main())
