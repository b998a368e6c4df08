"""What engines of one role share, whatever their model: where they live, modes, offload, optimizer steps, saved state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.checkpoint.state import ReadGoingOn
from megappo.checkpoint.stored import Shape, StoredBox
from megappo.config.role_sections import OffloadConfig
from megappo.engine.base import StepResult, WithoutAdapters
from megappo.engine.offload import StorageOffload
from megappo.engine.translation import Held, require_same_tensors, saved_by_another, saved_position, stored_boxes
from megappo.models.arch import ModelArch
from megappo.models.pieces import PieceMap
from megappo.parallel.consensus import gathered
from megappo.parallel.groups import ProcessGroups
from megappo.parallel.placement import Placement
from megappo.parallel.shares import Shares, shares_of
from megappo.runtime.ending import Unrecoverable
from megappo.runtime.messages import name_ranks

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
    found = gathered((len(bad), bad[:MAX_NAMED]), groups.host)
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


class Steps(Protocol):
    """An engine's own optimizer."""

    def step(self) -> StepResult: ...

    def advance_schedule(self) -> float: ...

    def set_position(self, updates: int, schedule_steps: int) -> None: ...


OptimizerT = TypeVar("OptimizerT", bound=Steps)


class RoleEngine(WithoutAdapters, ABC, Generic[OptimizerT]):
    """Base of engines (see base.py) with offload by storages.

    optimizer: None for a frozen role. parameters, optimizer_tensors: what is offloaded as the model and as its optimizer. frozen:
    Hugging Face names of weights of a trained role that do not train. source: directory that the model was read from.
    """

    embedding_name: ClassVar[str]
    """Name under which checkpoints of this engine hold the embedding."""

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
        frozen: frozenset[str] = frozenset(),
        source: str = "",
    ) -> None:
        self.name = name
        self.groups = groups
        self.device = device
        self._micro_batch_tokens = micro_batch_tokens
        self._optimizer = optimizer
        self._offload = offload
        self._frozen, self._source = frozen, source
        self._passes = 0
        self._save = ReadGoingOn()
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

    @property
    @abstractmethod
    def arch(self) -> ModelArch: ...

    @property
    @abstractmethod
    def value_head(self) -> bool: ...

    @abstractmethod
    def named_parameters(self) -> Mapping[str, torch.nn.Parameter]: ...

    @abstractmethod
    def named_gradients(self) -> Mapping[str, Tensor]: ...

    @abstractmethod
    def pieces(self) -> PieceMap: ...

    def fp32_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named_parameters().items():
            yield name, parameter.detach().float()

    # ------------------------------------------------------------------------------------------------ modes and memory

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        self.groups.meet(f"training the {self.name}")
        self._save.finish()
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
        if model or optimizer:
            self._save.finish()
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

    def release_state(self, read: Callable[[], None] | None = None) -> None:
        """Offload again what `save_state` made resident, which waits for `read`; without offload training waits for it."""
        self._save.begin(read)
        self.offload_idle()

    @abstractmethod
    def _sharded_state(self, *, with_optimizer: bool) -> dict[str, Any]:
        """Tensors of the model and its optimizer, as the checkpoint's writer takes them, who does not change what this returns."""

    def boxes_to_load(
        self, stored: Mapping[str, Shape], *, with_optimizer: bool, with_head: bool = True
    ) -> Sequence[StoredBox] | None:
        how = {"with_optimizer": with_optimizer, "with_head": with_head}
        saved = saved_by_another(stored, self.embedding_name, self.arch, self.value_head, self._source)
        if saved is None:
            return None
        require_same_tensors(saved, stored, self._frozen, **how)
        self.to("device")
        own = self.pieces()[self.groups.position]
        return list(stored_boxes(self._held(with_optimizer=with_optimizer), own, saved, stored, **how))

    def boxes_loaded(self, saved: Mapping[str, Any]) -> None:
        if saved:
            self._trained().set_position(*saved_position(saved))
        else:
            self._take_new_weights()
        self.offload_idle()

    @abstractmethod
    def _held(self, *, with_optimizer: bool) -> Iterator[Held]:
        """State of this rank's parameters, resident: their weights, and with the optimizer its moments and main parameters."""

    @abstractmethod
    def _take_new_weights(self) -> None:
        """Go on from weights that were loaded without an optimizer."""
