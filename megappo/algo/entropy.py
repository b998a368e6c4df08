"""Control of the entropy bonus towards a target (Skywork-OR1, He et al. 2025, arXiv:2505.22312, "Adaptive Entropy Control")."""

from __future__ import annotations


def steered(coef: float, entropy: float, target: float, step: float) -> tuple[float, float]:
    """(coefficient of this step's updates, `coef` for the next step) from the step's entropy per token before its updates, in nats.

    The bonus acts only while the entropy is at most the target. The coefficient rises by `step` below the target, falls by it
    otherwise, and is never below 0, where the paper leaves it free.
    """
    acting = coef if entropy <= target else 0.0
    return acting, max(0.0, coef + (step if entropy < target else -step))
