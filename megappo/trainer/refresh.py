"""Refreshes the reference with the policy's weights or their average. A reference with the policy's layout is copied shard to
shard; otherwise rectangles of Hugging Face tensors are sent (`bridge/sync.py`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from megappo.bridge.destination import ParameterReceiver
from megappo.bridge.sync import OtherWeights, Route, WeightSync
from megappo.config.role_sections import RefreshConfig
from megappo.engine.base import Engine
from megappo.parallel.layout import Placement
from megappo.rollout.build import PolicyPlace
from megappo.trainer.average import PolicyAverage, parameters_to_change
from megappo.trainer.extras import Extra
from megappo.trainer.step_record import StepRecord

REFERENCE = "reference"
"""Name of a refreshed reference among the models of a checkpoint."""


class ReferenceRefresh(Extra):
    """Copies weights into the reference by `reference.refresh.every` and `reference.refresh.above_kl`. policy, reference: None on
    ranks without them. average: None unless it is the source. sync: transfer to a reference with another layout; None if ranks and
    parameters match the policy's, up to dtype. note: tells the log."""

    def __init__(
        self,
        settings: RefreshConfig,
        policy: Engine | None,
        reference: Engine | None,
        average: PolicyAverage | None,
        sync: WeightSync | None,
        note: Callable[[str], None],
    ) -> None:
        self._settings, self._policy, self._reference, self._sync = settings, policy, reference, sync
        self._average, self._note = average if settings.source == "ema" else None, note

    def after_step(self, record: StepRecord) -> None:
        """Copy the weights into the reference if due. Collective over the world."""
        step, every, above = record.step, self._settings.every, self._settings.above_kl
        if (every is not None and step % every == 0) or (above is not None and record.kl_per_response() > above):
            self.copy(step)
            self._note(f"reference: refreshed from the {self._settings.source} after step {step}")

    def copy(self, step: int) -> None:
        """Copy the weights after `step` into the reference. Collective over the world."""
        reads = self._policy is not None and self._average is None
        with self._policy.eval_mode() if reads and self._policy is not None else nullcontext():
            if self._sync is not None:
                self._sync.push(step)
            elif self._policy is not None and self._reference is not None:
                weights = self._policy.named_parameters() if self._average is None else self._average.weights
                with parameters_to_change(self._reference) as parameters:
                    for name, parameter in parameters.items():
                        assert parameter.shape == weights[name].shape, f"{name} of the reference is cut in another way"
                        parameter.copy_(weights[name])  # rounded to its dtype


def refresh_sync(
    place: PolicyPlace,
    policy: Engine | None,
    average: PolicyAverage | None,
    reference: Engine | None,
    placement: Placement,
    device: torch.device,
) -> WeightSync:
    """Plan the transfer from the policy, or its average, to a reference with another layout. Collective over the world.
    place: of the policy. policy, average, reference: None where they do not live; average also if the policy is copied. placement:
    ranks of the reference. Errors as `WeightSync`."""
    # Each rank of the reference describes itself: one replica of as many ranks as it has.
    route = Route(place.arch, place.pieces(), tuple(place.placement.ranks), tuple(placement.ranks), len(placement))
    source = policy if policy is None or average is None else OtherWeights(policy, lambda: average.weights)
    target = None
    if reference is not None:
        position = placement.position_of(dist.get_rank())
        target = ParameterReceiver(reference.pieces(), position, partial(parameters_to_change, reference))
    with policy.eval_mode() if policy is not None else nullcontext():
        return WeightSync(source, target, route, device)
