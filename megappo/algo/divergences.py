"""Divergences of two distributions over a few ids and the rest: what a student learns from a teacher's likeliest tokens.
Differentiable by autograd, fp32 or fp64; one value for each token."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Probability of the rest below which it counts as this: sums of fp32 probabilities are right to 1e-7.
LEAST_REST = 1e-6

DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # KL(teacher || student), the cross-entropy less the teacher's entropy: covers all that the teacher would say.
    "forward_kl": lambda teacher, student: _kl(teacher, student),
    # KL(student || teacher): leaves out what the teacher would not say.
    "reverse_kl": lambda teacher, student: _kl(student, teacher),
    # Jensen and Shannon's: half of each, against their mean.
    "jsd": lambda teacher, student: _jsd(teacher, student),
}
"""Name -> divergence [T] in nats of log-probs [T, K + 1]."""


def divergence(teacher: Tensor, student: Tensor, kind: str) -> Tensor:
    """Return the divergence [T] in nats of two distributions, given by log-probs [T, K] of K ids; all other ids are one event. It
    is at most that of the whole vocabulary, and 0 where the K log-probs agree. ValueError for a name not in `DIVERGENCES`."""
    if kind not in DIVERGENCES:
        raise ValueError(f"divergence {kind!r} is not one of {', '.join(DIVERGENCES)}")
    return DIVERGENCES[kind](_with_rest(teacher), _with_rest(student))


def _with_rest(logprob: Tensor) -> Tensor:
    rest = (1.0 - logprob.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST).log()
    return torch.cat((logprob, rest), -1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def _jsd(p: Tensor, q: Tensor) -> Tensor:
    mean = torch.logaddexp(p, q) - math.log(2.0)
    return 0.5 * (_kl(p, mean) + _kl(q, mean))
