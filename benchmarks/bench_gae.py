"""Benchmark `token_advantages`, plain GAE and with KL-shaped rewards: `python benchmarks/bench_gae.py [--check] ...`, on CPU or
GPU.

A shape is T, a packed batch of T tokens in sequences of 512 to 3584 (1Mi is a power of two), or BxL, B sequences of exactly L. A
fifth of every sequence, its start, is prompt, and a twentieth of the rest is masked as tool output. The floor is one read of the
inputs and one write of the outputs at the bandwidth of the run's copy: 21 bytes per token for gae (rewards, values and mask in;
rewards, advantages and returns out), 25 with log-probs of policy and reference in place of the rewards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.harness import loops
from benchmarks.harness.candidates import ours, plain_and_compiled
from benchmarks.harness.cli import run
from benchmarks.harness.loops import GAMMA, LAMBDA, Batch
from benchmarks.harness.model import Benchmark, Calls, Candidate, Difference, Mistake, worst
from benchmarks.harness.vocab import numbers
from megappo.ops.advantages import Discount, Rewards, TimeSteps, token_advantages

FORM = "tokens like 1048576 or 1Mi, or sequences x length like 512x4096"
GAE_BYTES, TOKEN_ADVANTAGES_BYTES = 21, 25
KL_COEF = 0.05
# Tokens to time the loops over tokens on; their time is scaled to the whole batch.
NUMBERS_SLICE, TENSORS_SLICE = 2**18, 2**12
NAMES = ("advantage", "returns")


def read(text: str) -> tuple[int, ...]:
    """Lengths of the sequences."""
    if "x" in text:
        num_sequences, length = numbers(text, "x", 2, FORM)
        return (length,) * num_sequences
    digits = text.removesuffix("Mi")
    if not digits.isdigit() or int(digits) == 0:
        raise Mistake(f"shape {text!r}: want {FORM}")
    left = int(digits) * (2**20 if text.endswith("Mi") else 1)
    generator = torch.Generator().manual_seed(0)
    lengths = []
    while left:
        lengths.append(min(left, int(torch.randint(512, 3585, (), generator=generator))))
        left -= lengths[-1]
    return tuple(lengths)


def make_batch(lengths: Sequence[int], device: torch.device) -> Batch:
    generator = torch.Generator(device).manual_seed(0)
    bounds = (0, *torch.tensor(lengths).cumsum(0).tolist())
    num_tokens = bounds[-1]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    starts = torch.repeat_interleave(cu_seqlens[:-1], torch.diff(cu_seqlens)).long()
    prompt = torch.repeat_interleave(torch.diff(cu_seqlens) // 5, torch.diff(cu_seqlens)).long()
    position = torch.arange(num_tokens, device=device) - starts
    tool = torch.rand(num_tokens, generator=generator, device=device) < 0.05
    reward, value = torch.randn(2, num_tokens, generator=generator, device=device)
    return Batch(0.1 * reward, value, (position >= prompt) & ~tool, cu_seqlens, bounds)


def errors(batch: Batch, results: Mapping[str, Tensor], rounds_to: torch.dtype | None, ours: bool) -> list[Difference]:
    """Compare with the loop in fp64. fp32 loops accumulate an error per step, ours have a rounding per result; a loop that was
    timed on a slice is compared on the slice."""
    slack = 1 if ours else 64
    covered = results["advantage"].numel()
    num_sequences = next(i for i, bound in enumerate(batch.bounds) if bound == covered)
    found = []
    for name, want in zip(NAMES, loops.python_loop(batch, num_sequences, torch.float64)):
        scale = float(want.abs().amax()) if want.numel() else 0.0
        found.append(worst(name, results[name], want, slack * (8 * 2**-24 * scale + 1e-6)))
    return found


@dataclass(frozen=True)
class GaeProblem:
    batch: Batch
    known: dict[Any, Any] = field(default_factory=dict, compare=False)

    @property
    def probes(self) -> Mapping[str, Callable[[], Any]]:
        return {}

    @property
    def floors(self) -> Mapping[str, Mapping[str, float]]:
        return {"forward": {"copy": GAE_BYTES * self.batch.value.numel()}}

    def differences(self, results: Mapping[str, Tensor], rounds_to: torch.dtype | None, ours: bool) -> list[Difference]:
        found = errors(self.batch, results, rounds_to, ours)
        if "reward" in results:  # others hand out none
            found.append(worst("reward", results["reward"], torch.where(self.batch.mask, self.batch.reward, 0.0), 1e-6))
        return found


def named(values: Sequence[Tensor]) -> Mapping[str, Tensor]:
    """(advantage, returns), and the reward if it is made."""
    return dict(zip((*NAMES, "reward"), values))


def results_of(rewards: Rewards, batch: Batch, times: TimeSteps = TimeSteps()) -> Sequence[Tensor]:
    """What `named` takes, by our op."""
    given = batch.value, batch.mask, batch.cu_seqlens, None, Discount(GAMMA, LAMBDA, LAMBDA)
    reward, advantage, returns, _ = token_advantages(rewards, *given, times)
    return advantage, returns, reward


def gae_candidates(p: GaeProblem) -> Sequence[Candidate]:
    b = p.batch
    device = b.value.device

    def megappo() -> Calls:
        score = b.value.new_zeros(b.cu_seqlens.numel() - 1)
        # log-probs are not read without a reference
        rewards = Rewards(b.value, None, score, b.reward)
        return Calls(lambda: results_of(rewards, b), named)

    def doubling(one_pass: Callable[..., tuple[Tensor, Tensor]]) -> Calls:
        return Calls(lambda: loops.doubling(b.reward, b.value, b.mask, b.cu_seqlens, one_pass), named)

    return [
        *ours(("token_advantages",), device, megappo, note="rewards and moments for whitening included"),
        *plain_and_compiled("doubling", loops.advance, doubling),
        Candidate(
            "torch eager, padded loop over time",
            "torch",
            lambda: _padded_loop(b, time_major=False),
            "as verl, TRL and OpenRLHF; padding and unpadding are not timed",
        ),
        Candidate("torch eager, padded loop, time first", "torch", lambda: _padded_loop(b, time_major=True), "the same on [L, B]"),
        _sliced("Python loop over numbers", b, NUMBERS_SLICE, loops.python_loop),
        _sliced("Python loop over tensors", b, TENSORS_SLICE, loops.tensor_loop),
    ]


def _padded_loop(batch: Batch, *, time_major: bool) -> Calls:
    inputs = loops.padded(batch, time_major=time_major)
    return Calls(
        lambda: loops.padded_loop(*inputs, time_major=time_major),
        lambda values: named([loops.packed(batch, x, time_major=time_major) for x in values]),
    )


def _sliced(name: str, batch: Batch, tokens: int, loop: Callable[[Batch, int], Sequence[Tensor]]) -> Candidate:
    """A loop over tokens, timed on the first whole sequences of at least so many tokens and scaled to the batch."""
    count = next((i for i, bound in enumerate(batch.bounds) if bound >= tokens), len(batch.bounds) - 1)
    calls = Calls(lambda: loop(batch, count), named, scale=batch.bounds[-1] / batch.bounds[count])
    return Candidate(name, "torch", lambda: calls, f"timed on {batch.bounds[count]} tokens and scaled to {batch.bounds[-1]}")


@dataclass(frozen=True)
class TokenAdvantagesProblem:
    """Case with KL-shaped rewards: log-probs and scores amount to the rewards of `batch`, so oracle and tolerance are gae's."""

    batch: Batch
    logprob: Tensor
    ref_logprob: Tensor
    score: Tensor
    last: Tensor
    known: dict[Any, Any] = field(default_factory=dict, compare=False)

    @property
    def probes(self) -> Mapping[str, Callable[[], Any]]:
        return {}

    @property
    def floors(self) -> Mapping[str, Mapping[str, float]]:
        return {"forward": {"copy": TOKEN_ADVANTAGES_BYTES * self.batch.value.numel()}}

    def differences(self, results: Mapping[str, Tensor], rounds_to: torch.dtype | None, ours: bool) -> list[Difference]:
        shaped = shaped_reward(self.logprob.double(), self.ref_logprob.double(), self.score.double(), self.batch.mask, self.last)
        exact = Batch(shaped, self.batch.value, self.batch.mask, self.batch.cu_seqlens, self.batch.bounds)
        reward = worst("reward", results["reward"], torch.where(self.batch.mask, shaped, 0.0), 1e-6 * (1 if ours else 8))
        return [reward, *errors(exact, results, rounds_to, ours)]


def shaped_reward(logprob: Tensor, ref_logprob: Tensor, score: Tensor, mask: Tensor, last: Tensor) -> Tensor:
    """-coef (logprob - ref_logprob), and the score [B] at `last` [B], the last sampled token of every sequence."""
    reward = torch.where(mask, -KL_COEF * (logprob - ref_logprob), 0.0)
    return reward.index_add(0, last, score.to(reward.dtype))


def token_advantages_problem(lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> TokenAdvantagesProblem:
    batch = make_batch(lengths, device)
    generator = torch.Generator(device).manual_seed(1)
    logprob, noise = torch.randn(2, batch.value.numel(), generator=generator, device=device)
    # a sequence always samples its last token here, so that each score has a place
    last = batch.cu_seqlens[1:].long() - 1
    batch.mask[last] = True
    score = torch.randn(len(lengths), generator=generator, device=device)
    return TokenAdvantagesProblem(batch, logprob - math.log(8.0), logprob - math.log(8.0) + 0.1 * noise, score, last)


def token_advantages_candidates(p: TokenAdvantagesProblem) -> Sequence[Candidate]:
    b = p.batch

    def megappo(times: TimeSteps = TimeSteps(), token_reward: Tensor | None = None) -> Calls:
        rewards = Rewards(p.logprob, p.ref_logprob, p.score, token_reward, "k1", KL_COEF)
        return Calls(lambda: results_of(rewards, b, times), named)

    # Of values that change no result, so that the oracle stays.
    nothing, one = torch.zeros_like(b.value), torch.ones_like(b.value, dtype=torch.float64)
    variants: dict[str, tuple[TimeSteps, Tensor | None]] = {
        "rewards of tokens": (TimeSteps(), nothing),
        "steps": (TimeSteps(steps=b.mask), None),
        "V-trace": (TimeSteps(weight=one, trace=one), None),
    }

    def doubling(one_pass: Callable[..., tuple[Tensor, Tensor]]) -> Calls:
        def forward() -> Sequence[Tensor]:
            reward = shaped_reward(p.logprob, p.ref_logprob, p.score, b.mask, p.last)
            return *loops.doubling(reward, b.value, b.mask, b.cu_seqlens, one_pass), reward

        return Calls(forward, named)

    return [
        *ours(("token_advantages",), b.value.device, megappo, note="moments for whitening included"),
        *(
            candidate
            for name, given in variants.items()
            for candidate in ours(("token_advantages",), b.value.device, lambda given=given: megappo(*given), variant=name)
        ),
        *plain_and_compiled("reward, doubling", loops.advance, doubling),
    ]


GAE = Benchmark(
    name="gae",
    shape_form=FORM,
    shapes={"cpu": ["1Mi", "128x4096"], "cuda": ["512x4096", "4096x8192", "4Mi"]},
    dtypes={"cpu": [torch.float32], "cuda": [torch.float32]},
    read=read,
    problem=lambda lengths, dtype, device: GaeProblem(make_batch(lengths, device)),
    candidates=gae_candidates,
)
TOKEN_ADVANTAGES = Benchmark(
    name="token_advantages",
    shape_form=FORM,
    shapes={"cpu": ["1Mi"], "cuda": ["4Mi"]},
    dtypes={"cpu": [torch.float32], "cuda": [torch.float32]},
    read=read,
    problem=token_advantages_problem,
    candidates=token_advantages_candidates,
)


def main(argv: Sequence[str] | None = None) -> int:
    return run("bench_gae", "GAE and token_advantages over packed and padded batches.", [GAE, TOKEN_ADVANTAGES], argv)


if __name__ == "__main__":
    sys.exit(main())
