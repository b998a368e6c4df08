"""Estimators of KL(policy || reference) from sampled tokens, the KL term of the policy loss, and controllers of the factor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# exp(20) = 4.9e8: beyond this log-ratio k3 and the ratios of PPO are capped, so that one token cannot turn the batch into inf
MAX_LOG_RATIO = 20.0

# Of d = log p(x) - log q(x), x sampled from p (Schulman, "Approximating KL divergence", 2020). The one table: an entry is known
# at once to the KL term of the loss and to the reference of `ops.advantages`; its kernels have those of KERNEL_ESTIMATORS there.
ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    # unbiased, but its gradient has mean 0, so as a loss term it does nothing
    "k1": lambda d: d,
    # biased; its gradient is that of the true KL
    "k2": lambda d: 0.5 * d.square(),
    # unbiased and never negative; its gradient is that of KL(q || p)
    "k3": lambda d: torch.expm1((-d).clamp(max=MAX_LOG_RATIO)) + d,
}


def kl_estimate(logprob: Tensor, ref_logprob: Tensor, kl_estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) in nats, [T], from log-probs [T] of tokens that the policy sampled.
    Differentiable. Raises ValueError for a name that is not in `ESTIMATORS`."""
    return kl_of_log_ratio(logprob - ref_logprob, kl_estimator)


def kl_of_log_ratio(log_ratio: Tensor, kl_estimator: str) -> Tensor:
    """Estimate of `ESTIMATORS` from log-ratios of any shape, in nats. Raises ValueError for an unknown name."""
    if kl_estimator not in ESTIMATORS:
        raise ValueError(f"kl_estimator {kl_estimator!r} is not one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[kl_estimator](log_ratio)


def kl_loss(logprob: Tensor, ref_logprob: Tensor, weight: Tensor, kl_estimator: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute (sum of weight * estimate, {"kl_loss_sum": unweighted fp64 sum over tokens with weight}); all tensors [T].
    Tokens with weight 0 contribute neither value nor gradient, even if they hold NaN."""
    valid = weight != 0
    estimate = kl_estimate(torch.where(valid, logprob, 0.0), torch.where(valid, ref_logprob, 0.0), kl_estimator)
    return (weight * estimate).sum(), {"kl_loss_sum": estimate.detach().double().sum()}


class KLController(Protocol):
    """Controller of the factor of the KL penalty.

    `update` takes the step's KL per response in nats and its number of responses. That KL is the k1 sum, log pi(y) / pi_ref(y) of a
    whole response, whatever estimator the penalty has: its mean is the KL between the distributions of responses, to which a target
    in nats refers. k2 is biased, and in k3 one token can outweigh the batch.
    """

    coef: float

    def update(self, kl_per_response: float, num_responses: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


@dataclass
class FixedKL:
    """Controller that keeps the factor."""

    coef: float

    def update(self, kl_per_response: float, num_responses: int) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keep the configuration's factor, even if it changed since the save."""


@dataclass
class AdaptiveKL:
    """Steer the KL per response to `target`: coef *= 1 + clip(kl/target - 1, +-0.2) n/horizon (Ziegler et al. 2019, 2.2)."""

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
