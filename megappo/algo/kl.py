"""Estimators of KL(policy || reference) from sampled tokens, the KL term of the policy loss, and controllers of the factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")
# as in ops/advantages.py: k3 of a log-ratio below -20 is capped instead of overflowing
MAX_LOG_RATIO = 20.0


def kl_estimate(logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    """Per-token estimate [T] with d = logprob - ref_logprob (Schulman, "Approximating KL divergence", 2020); differentiable.

    k1 = d: unbiased, but its gradient has mean 0, so as a loss term it does nothing. k2 = d^2 / 2: biased, its gradient is that
    of the true KL. k3 = exp(-d) - 1 + d: unbiased and never negative; its gradient is that of KL(reference || policy).
    """
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"KL estimator {kind!r} is not one of {', '.join(KL_ESTIMATORS)}")
    d = logprob - ref_logprob
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    return torch.expm1((-d).clamp(max=MAX_LOG_RATIO)) + d


def kl_loss(logprob: Tensor, ref_logprob: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum of weight * estimate, {"kl_loss_sum": unweighted fp64 sum over tokens with weight}); all tensors [T].

    Tokens with weight 0 contribute neither value nor gradient, whatever stands there.
    """
    valid = weight != 0
    estimate = kl_estimate(torch.where(valid, logprob, 0.0), torch.where(valid, ref_logprob, 0.0), kind)
    return (weight * estimate).sum(), {"kl_loss_sum": estimate.detach().double().sum()}


class KLController(Protocol):
    """Gives the factor of the KL penalty. `update` takes the step's mean KL per response in nats and its number of responses."""

    coef: float

    def update(self, kl_per_response: float, num_responses: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


@dataclass
class FixedKL:
    """The factor stays what it is."""

    coef: float

    def update(self, kl_per_response: float, num_responses: int) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The factor of a fixed controller is the configuration's, also after a resume with a changed one."""


@dataclass
class AdaptiveKL:
    """Steers the KL per response to `target`: coef *= 1 + clip(kl/target - 1, +-0.2) n/horizon (Ziegler et al. 2019, 2.2)."""

    coef: float
    target: float
    horizon: int

    def update(self, kl_per_response: float, num_responses: int) -> None:
        error = min(max(kl_per_response / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_responses / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])
