"""Benchmark the terms of the policy's loss beside the plain one: `python benchmarks/bench_policy_terms.py [--check] ...`.

Each candidate is the trainer's own loss (`trainer/roles.py`) of one micro-batch under one configuration, from final hidden states
and the output weight to their gradients. Shapes are those of bench_linear_logprob.py: T tokens in 8 responses, 7 in 10 of them
sampled. The floor is the three bare products. "texts" has T / 4 tokens of a second data set more, in the same micro-batch. The
lines "weights" are those of corrections, which stage 5 makes once for each sample, without a product.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.bench_linear_logprob import FORM, LINEAR_LOGPROB, USES, LinearProblem, read
from benchmarks.bench_linear_logprob import problem as linear_problem
from benchmarks.harness.candidates import differentiable, ours
from benchmarks.harness.cli import run
from benchmarks.harness.model import Benchmark, Calls, Candidate, Difference, worst_row
from megappo.algo.importance_sampling import behaviour_ratio, importance_weights
from megappo.config.loading import validated
from megappo.config.schema import AlgorithmConfig
from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.engine.base import Engine
from megappo.engine.linear_output import LinearOutput
from megappo.trainer.roles import NLL_WEIGHT, PTX_WEIGHT, Policy

SEQUENCES = 8
GSPO = {"loss": {"type": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, "loss_aggregation": "seq-mean-token-mean"}
TERMS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo, entropy bonus": {"entropy": {"coef": 0.01}},
    "ppo, KL in the loss": {"kl": {"placement": "loss", "estimator": "k3", "coef": 0.001}},
    "ppo, positive NLL": {"positive_nll": {"coef": 0.1}},
    "ppo, texts": {"ptx": {"coef": 0.05, "data": "none.jsonl"}},
    "cispo": {"loss": "cispo"},
    "dis": {"loss": {"type": "dis", "low": 0.7, "high": 6.0}},
    "gspo": GSPO,
}
IN_STEPS = "ppo, in steps"
"""The plain loss as context parallel and GSPO need it: log-probs first."""
CORRECTIONS = {f"weights, {level} level": level for level in ("token", "sequence", "geometric")}


class _InSteps(LinearOutput):
    """The same output without the fused way."""

    fused_loss = None  # type: ignore[assignment]


@dataclass(frozen=True)
class TermsProblem:
    """linear: T responses' tokens and then T / 4 of texts. num_tokens: T. fields: [T] of the responses."""

    linear: LinearProblem
    num_tokens: int
    fields: Mapping[str, Tensor]
    known: dict[Any, Any] = field(default_factory=dict, compare=False)

    @property
    def probes(self) -> Mapping[str, Callable[[], Any]]:
        return LinearProblem(self.linear.hidden[: self.num_tokens], *self._rest).probes

    @property
    def _rest(self) -> tuple[Tensor, ...]:
        p = self.linear
        return p.weight, p.target, p.g_logprob, p.g_entropy

    @property
    def floors(self) -> Mapping[str, Mapping[str, float]]:
        return {phase: parts for phase, parts in self.linear.floors.items() if phase in ("forward", "both")}

    def differences(self, results: Mapping[str, Tensor], rounds_to: torch.dtype | None, ours: bool) -> list[Difference]:
        """Both ways of the plain loss give the same gradient; the terms themselves have their oracles in tests/trainer."""
        if "dhidden" not in results or results["dhidden"].shape[0] != self.num_tokens:
            return []
        name = "gradient of " + ("the plain loss" if "plain" in results else "a term")
        if "plain" not in results:
            return [worst_row(name, results["dhidden"], results["dhidden"].double(), 1.0)]  # no NaN
        first = self.known.setdefault("plain", results["dhidden"].double())
        return [worst_row(name, results["dhidden"], first, 1e-4 if results["dhidden"].dtype == torch.float32 else 2**-6)]

    def micro_batch(self, with_texts: bool) -> PackedBatch:
        T, device = self.num_tokens, self.linear.hidden.device
        lengths = [T // SEQUENCES] * (SEQUENCES - 1) + [T - (SEQUENCES - 1) * (T // SEQUENCES)]
        fields, tokens = dict(self.fields), self.linear.target
        if with_texts:
            lengths = [*lengths, len(tokens) - T]
            fields = {name: torch.cat((x, x.new_zeros(len(tokens) - T))) for name, x in fields.items()}
            fields[PTX_WEIGHT] = (torch.arange(len(tokens), device=device) > T).float()
        return PackedBatch(tokens[: sum(lengths)], cu_seqlens_of(lengths).to(device), fields)


def problem(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> TermsProblem:
    num_tokens, hidden, vocab = sizes
    linear = linear_problem((num_tokens + max(2, num_tokens // 4), hidden, vocab), dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    advantage, noise, rollout = torch.randn(3, num_tokens, generator=generator, device=device)
    mask = (torch.rand(num_tokens, generator=generator, device=device) < 0.7).float()
    logprob = -torch.full((num_tokens,), vocab, device=device).float().log() + 0.2 * noise
    fields = {
        "advantage": advantage,
        "logprob": logprob,
        "rollout_logprob": logprob + 0.05 * rollout,
        "ref_logprob": logprob + 0.1 * rollout,
        "weight": mask,
        NLL_WEIGHT: mask * (torch.arange(num_tokens, device=device) < num_tokens // 2),
    }
    return TermsProblem(linear, num_tokens, fields)


def loss_calls(p: TermsProblem, changes: Mapping[str, Any], in_steps: bool = False) -> Calls:
    algorithm = validated(changes, AlgorithmConfig)
    micro = p.micro_batch(algorithm.ptx is not None)
    policy = Policy(cast(Engine, None), 1.0, algorithm)
    output = _InSteps if in_steps else LinearOutput
    hidden = p.linear.hidden[: micro.num_tokens]

    def loss(h: Tensor, w: Tensor) -> tuple[Tensor]:
        found = policy._loss_of(output(h, w, 0, w.shape[0]), micro).loss_sum
        assert found is not None
        return (found,)

    one = {"loss": torch.ones((), device=hidden.device)}
    calls = differentiable(loss, {"dhidden": hidden, "dweight": p.linear.weight}, one)
    plain = {"plain": torch.zeros(())} if not changes else {}
    gradients = calls.named_gradients
    return Calls(calls.forward, calls.named, calls.graph, calls.backward, lambda found: {**gradients(found), **plain})


def correction_calls(p: TermsProblem, level: str) -> Calls:
    mask, cu_seqlens = p.fields["weight"] != 0, p.micro_batch(False).cu_seqlens
    logprob, rollout = p.fields["logprob"], p.fields["rollout_logprob"]

    def weights() -> Tensor:
        ratio = behaviour_ratio(logprob, rollout, mask, cu_seqlens, cast(Any, level))
        return importance_weights(ratio, mask, "tis", None, 2.0)

    return Calls(weights, lambda found: {"weights": found})


def candidates(p: TermsProblem) -> Sequence[Candidate]:
    device, found = p.linear.hidden.device, list[Candidate]()
    best = "cuda" if device.type == "cuda" else "cpp"

    def add(name: str, make: Callable[[], Calls]) -> None:
        (one,) = [one for one in ours((*USES, "policy_loss"), device, make, variant=name) if one.name.startswith(f"megappo {best}")]
        found.append(one)

    for name, changes in TERMS.items():
        add(name, lambda changes=changes: loss_calls(p, changes))
    add(IN_STEPS, lambda: loss_calls(p, {}, in_steps=True))
    for name, level in CORRECTIONS.items():
        add(name, lambda level=level: correction_calls(p, level))
    return found


POLICY_TERMS = Benchmark("policy_terms", FORM, LINEAR_LOGPROB.shapes, LINEAR_LOGPROB.dtypes, read, problem, candidates)


def main(argv: Sequence[str] | None = None) -> int:
    return run("bench_policy_terms", "Terms of the policy's loss, from hidden states.", [POLICY_TERMS], argv)


if __name__ == "__main__":
    sys.exit(main())
