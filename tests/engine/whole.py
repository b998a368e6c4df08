"""Engines and roles whose passes take a whole batch that every rank has, and give results per token everywhere."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from megappo.commands.verify.measure import DelegatingEngine
from megappo.data.packing import PackedBatch
from megappo.engine.base import PassResult
from megappo.engine.losses import LossFunction
from megappo.engine.whole_batch import pass_whole_batch

Role = TypeVar("Role", bound=Any)


class Whole(DelegatingEngine):
    """An engine that divides the batch of its passes itself."""

    def forward_backward(
        self,
        share: PackedBatch,
        loss_fn: LossFunction,
        *,
        reads: Collection[str] = (),
        denominator: float = 1.0,
        forward_only: bool = False,
    ) -> PassResult:
        return pass_whole_batch(self._engine, share, loss_fn, reads=reads, denominator=denominator, forward_only=forward_only)


def on_whole_batches(role: Role) -> Role:
    """The role (of trainer/roles.py) with passes over whole batches."""
    role.engine = Whole(role.engine)
    return role
