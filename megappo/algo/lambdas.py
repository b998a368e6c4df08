"""GAE lambda per sequence."""

from __future__ import annotations

from torch import Tensor


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """lambda_b = 1 - 1 / (alpha * length_b), [B] fp64; lengths [B] counts sampled tokens.

    Keeps the sum of the TD-error weights, about 1/(1 - lambda), proportional to the length (VAPO, Yue et al. 2025, eq. 7).
    Responses of at most 1/alpha tokens get 0.
    """
    if not alpha > 0:
        raise ValueError(f"lam_length_alpha must be positive, not {alpha}")
    return (1.0 - 1.0 / (alpha * lengths.double().clamp(min=1.0))).clamp(min=0.0)
