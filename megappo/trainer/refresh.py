"""The reference refreshed with the policy's weights, or their average, after some of the steps; and its state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megappo.checkpoint.stored import Shape, StoredBox
from megappo.config.role_sections import ReferenceConfig
from megappo.engine.base import Engine
from megappo.parallel.placement import Placement
from megappo.trainer.average import PolicyAverage, parameters_to_change

REFERENCE = "reference"
"""Name of a refreshed reference among the models of a checkpoint."""


class ReferenceRefresh:
    """Copies of a run. policy, reference: None on ranks without them, which are the same; their parameters are alike but for the
    type. average: None unless it is what is copied.
    """

    def __init__(
        self, settings: ReferenceConfig, policy: Engine | None, reference: Engine | None, average: PolicyAverage | None
    ) -> None:
        self._settings, self._policy, self._reference = settings, policy, reference
        self._average = average if settings.refresh_from == "ema" else None

    def is_due(self, step: int, kl_per_response: float) -> bool:
        """True if the reference is refreshed after `step`. kl_per_response: of the step, in nats."""
        every, above = self._settings.refresh_every, self._settings.refresh_above_kl
        return (every > 0 and step % every == 0) or (above is not None and kl_per_response > above)

    def copy(self) -> None:
        """Copy the weights of now into the reference, shard to shard. Collective over its ranks."""
        if self._policy is None or self._reference is None:
            return
        with nullcontext() if self._average is not None else self._policy.eval_mode():
            weights = self._policy.named_parameters() if self._average is None else self._average.weights
            replace_weights(self._reference, weights)


def replace_weights(engine: Engine, weights: Mapping[str, Tensor]) -> None:
    """Copy values into all parameters of a frozen engine, rounded to their type. Collective over its ranks."""
    with parameters_to_change(engine) as parameters:
        for name, parameter in parameters.items():
            assert parameter.shape == weights[name].shape, f"{name} of the {engine.name} is cut in another way"
            parameter.copy_(weights[name])


class FrozenModel:
    """A frozen engine whose weights change in a run, as a `checkpoint.state.StatefulModel`: its weights alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def placement(self) -> Placement:
        return self._engine.placement

    @property
    def host_group(self) -> dist.ProcessGroup:
        return self._engine.host_group

    @property
    def head_names(self) -> tuple[str, ...]:
        return self._engine.head_names

    def save_state(self, *, with_optimizer: bool) -> dict[str, Any]:
        return self._engine.save_state(with_optimizer=False)

    def release_state(self) -> None:
        self._engine.release_state()

    def state_to_load(self, *, with_optimizer: bool, with_head: bool = True) -> dict[str, Any]:
        return self._engine.state_to_load(with_optimizer=False, with_head=with_head)

    def load_state(self, state: dict[str, Any]) -> None:
        self._engine.load_state(state)

    def boxes_to_load(
        self, stored: Mapping[str, Shape], *, with_optimizer: bool, with_head: bool = True
    ) -> Sequence[StoredBox] | None:
        return self._engine.boxes_to_load(stored, with_optimizer=False, with_head=with_head)

    def boxes_loaded(self, saved: Mapping[str, Any]) -> None:
        self._engine.boxes_loaded({})  # of the writer's plain values none is of weights
