"""Figures about how evenly a model's tokens fall on its experts. Pure; the counts come from the routers (`models/moe.py`)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ExpertLoad(NamedTuple):
    """max_violation: how far the busiest expert of any layer is above its even share, relative to it (MaxVio, arXiv:2408.15664).
    idle: share of all experts that no token chose."""

    max_violation: float
    idle: float


def expert_load(tokens: Tensor) -> ExpertLoad:
    """tokens: [layers, experts] choices over the whole batch; layers without any (dense ones) are left out."""
    sparse = tokens[tokens.sum(1) > 0]
    if not len(sparse):
        return ExpertLoad(0.0, 0.0)
    violation = sparse.amax(1) / sparse.mean(1) - 1
    return ExpertLoad(float(violation.max()), float((sparse == 0).double().mean()))
