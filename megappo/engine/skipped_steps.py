"""Steps whose gradient is not finite: how many in a row a run survives, and the tensors and ranks that had one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.engine.base import StepResult
from megappo.parallel.groups import ProcessGroups
from megappo.runtime.faults import Unrecoverable
from megappo.runtime.ranks import name_ranks

# Skipped steps in a row after which the run stops: a diverged model does not recover by itself.
MAX_SKIPPED_STEPS = 3


# Tensors that one rank names in a message.
MAX_NAMED = 4


class NonFiniteGradient(Unrecoverable):
    """Gradients were NaN or infinite several steps in a row. The same message on every rank."""


class SkippedSteps:
    """Skipped steps of one model in a row."""

    def __init__(self, role: str, groups: ProcessGroups) -> None:
        self._role, self._groups, self._count = role, groups, 0

    def count(self, result: StepResult, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        """Count a step. gradients: of this rank by name, asked for at the end only.

        NonFiniteGradient on every rank at the last one that a run survives.
        """
        self._count = 0 if result.applied else self._count + 1
        if self._count >= MAX_SKIPPED_STEPS:
            found = _non_finite_ranks(gradients(), self._groups)
            raise NonFiniteGradient(f"{self._role}: gradient norm not finite in {self._count} steps in a row; {found}")


def _non_finite_ranks(gradients: Mapping[str, Tensor], groups: ProcessGroups) -> str:
    """Tensors with such gradients, rank by rank. Collective over the role, on the host."""
    bad = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
    found: list = [None] * groups.layout.world_size
    dist.all_gather_object(found, (len(bad), bad[:MAX_NAMED]), group=groups.host)
    at, ranks = groups.layout.coordinates, groups.placement.ranks
    named = [
        f"rank {ranks[position]} (stage {at(position).pp}, tp {at(position).tp}): {', '.join(names)}"
        + (f" and {count - len(names)} more" if count > len(names) else "")
        for position, (count, names) in enumerate(found)
        if count
    ]
    clean = [rank for rank, (count, _) in zip(ranks, found) if not count]
    if not named:  # every tensor is finite, but not the norm
        return "no rank has one among its own tensors: the norm overflows"
    return "; ".join([*named, *([f"{name_ranks(clean)}: none of their own tensors"] if clean else [])])
