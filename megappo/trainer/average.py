"""Exponential moving average (EMA) of the policy's weights, in fp32. It is sharded like `Engine.named_parameters`; a checkpoint
holds it as rectangles of Hugging Face tensors, which any layout or engine can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.checkpoint.state import ModelState, ReadGoingOn, Shape, StateBox
from megappo.config.role_sections import EmaConfig
from megappo.engine.base import Engine
from megappo.parallel.layout import Placement


class PolicyAverage:
    """Average of one engine's weights, a `checkpoint.state.StatefulModel` without optimizer. Methods are collective over its ranks.
    It starts as the engine's weights, and is on the host, where it takes 4 bytes for each of a rank's parameters.
    decay: average = decay * average + (1 - decay) * weights at every `update`."""

    def __init__(self, engine: Engine, decay: float) -> None:
        self._engine, self._decay = engine, decay
        self._values: dict[str, Tensor] = {}
        self._save = ReadGoingOn()
        self.start()

    def start(self) -> None:
        """Restart from the engine's current weights."""
        self._boxes: Sequence[StateBox] | None = None  # of the values, from the first save on
        with self._engine.eval_mode():
            for name, weights in _fp32_weights(self._engine):
                self._values[name] = self._placed(weights)

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the engine's current weights."""
        self._save.finish()
        with self._engine.eval_mode():
            for name, weights in _fp32_weights(self._engine):
                average = self._values[name]
                average.lerp_(weights.detach().to(average.device), 1.0 - self._decay)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self._values

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average, rounded to the parameters' dtype, into the engine; restore the weights bit for bit on exit."""
        weights = self._swap(self._values)
        try:
            yield
        finally:
            self._swap(weights)

    def _swap(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        before = {}
        with parameters_to_change(self._engine) as parameters:
            for name, parameter in parameters.items():
                before[name] = self._placed(parameter, parameter.dtype)
                parameter.copy_(values[name])
        return before

    def _placed(self, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return tensor.detach().to("cpu", dtype, copy=True)

    # ------------------------------------------------------------------------------------------------------ checkpoint

    @property
    def placement(self) -> Placement:
        return self._engine.placement

    @property
    def host_group(self) -> dist.ProcessGroup:
        return self._engine.host_group

    def save_state(self, *, with_optimizer: bool) -> ModelState:
        if self._boxes is None:
            self._boxes = self._engine.boxes_of(self._values, to_save=True)
        return ModelState(self._boxes, self._values, {})

    def release_state(self, read: Callable[[], None] | None = None) -> None:
        self._save.begin(read)

    def boxes_to_load(self, stored: Mapping[str, Shape], *, with_optimizer: bool, with_head: bool = True) -> Sequence[StateBox]:
        self._save.finish()
        return self._engine.boxes_of(self._values, to_save=False)

    def boxes_loaded(self, position: Mapping[str, int]) -> None:
        """Do nothing: the values are read in place."""


def _fp32_weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield (parameter name, fp32 values on this rank) of what the optimizer updates, not its bf16 rounding.
    Each tensor is valid until the next one. Call it inside a mode; collective over ranks that share a sharded optimizer."""
    updated = set()
    for name, copy in engine.main_parameters(gather=True):
        updated.add(name)
        yield name, copy
    yield from ((name, one.detach().float()) for name, one in engine.named_parameters().items() if name not in updated)


@contextmanager
def parameters_to_change(engine: Engine) -> Iterator[Mapping[str, torch.nn.Parameter]]:
    """Give the engine's parameters, resident on the device and writable. Collective over its ranks."""
    with torch.no_grad(), engine.eval_mode():
        engine.to("device", optimizer=False)  # what an offload left on the host will not be theirs any more
        yield engine.named_parameters()


def average_of(ema: EmaConfig | None, policy: Engine | None) -> PolicyAverage | None:
    """Build the average for `policy.ema`; None if it is not set and on ranks without the policy."""
    return None if ema is None or policy is None else PolicyAverage(policy, ema.decay)
