"""What engines of one role share, whatever their model: where they live, modes, offload, optimizer steps, saved state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config.role_sections import OffloadConfig
from megappo.engine.base import StepResult
from megappo.engine.offload import StorageOffload
from megappo.engine.skipped_steps import SkippedSteps
from megappo.models.lora import Weights
from megappo.models.pieces import PieceMap
from megappo.parallel.groups import ProcessGroups
from megappo.parallel.placement import Placement
from megappo.parallel.shares import Shares, shares_of


class Steps(Protocol):
    """An engine's own optimizer."""

    def step(self) -> StepResult: ...

    def advance_schedule(self) -> float: ...


OptimizerT = TypeVar("OptimizerT", bound=Steps)


class RoleEngine(ABC, Generic[OptimizerT]):
    """Base of engines (see base.py) with offload by storages.

    optimizer: None for a frozen role. parameters, optimizer_tensors: what is offloaded as the model and as its optimizer.
    """

    def __init__(
        self,
        name: str,
        groups: ProcessGroups,
        *,
        device: torch.device,
        micro_batch_tokens: int,
        optimizer: OptimizerT | None,
        offload: OffloadConfig,
        parameters: Callable[[], Iterable[Tensor]],
        optimizer_tensors: Callable[[], Iterable[Tensor]],
    ) -> None:
        self.name = name
        self.groups = groups
        self.device = device
        self._micro_batch_tokens = micro_batch_tokens
        self._optimizer = optimizer
        self._offload = offload
        self._passes = 0
        self._skipped_steps = SkippedSteps(name, groups)
        self._parameter_storages = StorageOffload(parameters)
        self._optimizer_storages = StorageOffload(optimizer_tensors)

    @property
    def placement(self) -> Placement:
        return self.groups.placement

    @property
    def host_group(self) -> dist.ProcessGroup:
        return self.groups.host

    @property
    def shares(self) -> Shares:
        return shares_of(self.groups.layout, self.groups.placement.ranks)

    @abstractmethod
    def named_parameters(self) -> Mapping[str, torch.nn.Parameter]: ...

    @abstractmethod
    def named_gradients(self) -> Mapping[str, Tensor]: ...

    # --------------------------------------------------------------------------------------- of an engine without adapters

    def merged_parameters(self) -> Weights:
        return self.named_parameters()

    def adapter_pieces(self) -> PieceMap:
        return PieceMap.of(dict.fromkeys(range(len(self.placement)), ()))

    def without_adapters(self) -> AbstractContextManager[None]:
        raise AssertionError(f"{self.name} has no adapters")

    # ------------------------------------------------------------------------------------------------ modes and memory

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        self.groups.meet(f"training the {self.name}")
        self._parameter_storages.restore()
        self._enter(trains=True)
        yield
        self.offload_idle()

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        self.groups.meet(f"passes of the {self.name}")
        self._parameter_storages.restore(to_change=False)
        self._enter(trains=False)
        with torch.no_grad():
            yield
        self.offload_idle()

    def to(self, device: Literal["host", "device"], *, model: bool = True, optimizer: bool = True) -> None:
        for wanted, storages in ((model, self._parameter_storages), (optimizer, self._optimizer_storages)):
            if wanted:
                storages.restore() if device == "device" else storages.offload()

    def offload_idle(self) -> None:
        """Offload the parts that this role's section offloads, to free memory for the next role or the rollout engine."""
        self.to("host", model=self._offload.parameters, optimizer=self._offload.optimizer)
        if self._offload.gradients:
            self._free_gradients()

    @abstractmethod
    def _enter(self, *, trains: bool) -> None:
        """Prepare the model, whose parameters are resident, for updates or for passes alone."""

    @abstractmethod
    def _free_gradients(self) -> None:
        """Free the gradients' memory, if it is not free."""

    # ------------------------------------------------------------------------------------------------------- optimizer

    def lr_scheduler_step(self) -> float:
        return self._trained().advance_schedule()

    def optimizer_step(self) -> StepResult:
        # Both stay until the mode is left, instead of one round trip to the host per mini-batch.
        self.to("device")
        result = self._trained().step()
        self._skipped_steps.count(result, self.named_gradients)
        return result

    def _trained(self) -> OptimizerT:
        assert self._optimizer is not None, f"{self.name} is frozen: it has no optimizer"
        return self._optimizer

    # ------------------------------------------------------------------------------------------------------ checkpoint

    def save_state(self, *, with_optimizer: bool) -> dict[str, Any]:
        for storages in (self._parameter_storages, self._optimizer_storages):
            storages.restore(to_change=False)  # unchanged by the save, so `release_state` copies nothing to the host
        return self._sharded_state(with_optimizer=with_optimizer)

    def release_state(self) -> None:
        """Offload again what `save_state` made resident."""
        self.offload_idle()

    @abstractmethod
    def _sharded_state(self, *, with_optimizer: bool) -> dict[str, Any]:
        """Tensors of the model and its optimizer, as the checkpoint's writer and reader take them."""
