"""Base of engines: where a role lives, modes, offload, passes, optimizer steps, saved state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Literal, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.checkpoint.state import ModelState, ReadGoingOn, Shape, StateBox
from megappo.config.role_sections import Offload
from megappo.data.images import IMAGE_BASE
from megappo.data.packing import ROUTES, PackedBatch, Ragged, route_dtype
from megappo.engine.base import Engine, PassResult, RouterSummary, StepResult
from megappo.engine.linear_output import LinearOutput
from megappo.engine.losses import LanguageLoss, LossFunction, LossOutput, ValueLoss
from megappo.engine.micro_batches import MicroBatch, MicroBatches, combined_metrics, in_order, names_of
from megappo.engine.offload import StorageOffload
from megappo.engine.state_boxes import WEIGHT, Held, boxes_to_load, boxes_to_save, key_of, require_same_tensors
from megappo.models.arch import ModelArch, padded_vocab, vocab_shard
from megappo.models.pieces import PieceMap, Section, sizes_of
from megappo.models.weight_map import VALUE_HEAD, constants
from megappo.parallel.consensus import gathered, told_by
from megappo.parallel.context import ContextShard
from megappo.parallel.groups import ProcessGroups
from megappo.parallel.layout import Placement
from megappo.parallel.shares import Units, plan_micro_batches, shares_of, split_by_budget
from megappo.runtime.ending import Unrecoverable
from megappo.runtime.messages import name_ranks

# Skipped steps in a row after which the run stops: a diverged model does not recover by itself.
MAX_SKIPPED_STEPS = 3
MAX_NAMED = 4  # tensors that one rank names in a message


class NonFiniteGradient(Unrecoverable):
    """Gradients were NaN or infinite several steps in a row. The same message on every rank."""


_Memory = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
_Tensors = tuple[bool, list[_Memory]]


def places_of(tensors: Iterable[Tensor]) -> list[_Memory]:
    """Describe where the tensors' values lie; equal as long as the tensors are the same, offloaded or not."""
    # By the storage's identity, not its address: offload resizes storages. Described tensors stay alive, so no identity is reused.
    return [
        (tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)
        for tensor in tensors
    ]


class SkippedSteps:
    def __init__(self, role: str, groups: ProcessGroups) -> None:
        self._role, self._groups, self._count = role, groups, 0

    def count(self, result: StepResult, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        """Count a step. gradients: of this rank by name, asked for only before the run stops.
        NonFiniteGradient on every rank after `MAX_SKIPPED_STEPS` skipped steps in a row."""
        self._count = 0 if result.applied else self._count + 1
        if self._count >= MAX_SKIPPED_STEPS:
            found = _non_finite_ranks(gradients(), self._groups)
            raise NonFiniteGradient(f"{self._role}: gradient norm not finite in {self._count} steps in a row; {found}")


def _non_finite_ranks(gradients: Mapping[str, Tensor], groups: ProcessGroups) -> str:
    """Name the tensors with such gradients, rank by rank. Collective over the role, on the host."""
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
    """Interface of an engine's own optimizer."""

    def step(self) -> StepResult: ...

    def advance_schedule(self) -> float: ...

    def tensors(self) -> Iterator[Tensor]: ...

    def position(self) -> dict[str, int]: ...

    def set_position(self, updates: int, schedule_steps: int) -> None: ...


OptimizerT = TypeVar("OptimizerT", bound=Steps)


@dataclass(frozen=True)
class EngineSettings:
    """Settings of any engine. frozen: Hugging Face names of weights of a trained role that do not train."""

    device: torch.device
    micro_batch_tokens: int
    offload: tuple[Offload, ...] = ()
    frozen: frozenset[str] = frozenset()


class RoleEngine(Engine, Generic[OptimizerT]):
    """Base of engines with offload by storages, passes by micro-batches of a token budget, and state as in `state_boxes.py`.
    optimizer: None for a frozen role."""

    arch: ModelArch
    value_head: bool

    def __init__(self, name: str, groups: ProcessGroups, settings: EngineSettings, optimizer: OptimizerT | None) -> None:
        self.name = name
        self.groups = groups
        self.shares = shares_of(groups.layout, groups.placement.ranks)
        self.device = settings.device
        self._micro_batch_tokens = settings.micro_batch_tokens
        self._optimizer = optimizer
        self._offload = settings.offload
        self._frozen = settings.frozen
        self._passes = 0
        self._save = ReadGoingOn()
        self._described: tuple[_Tensors, Sequence[StateBox], Mapping[str, Tensor]] | None = None
        self._skipped_steps = SkippedSteps(name, groups)
        self._parameter_storages = StorageOffload(self._parameters)
        self._optimizer_storages = StorageOffload(self._optimizer_tensors)

    @abstractmethod
    def _parameters(self) -> Iterable[Tensor]:
        """Parameters that this rank holds, offloaded as the model."""

    @abstractmethod
    def _optimizer_tensors(self) -> Iterable[Tensor]:
        """Optimizer state that is not a parameter itself, offloaded as the optimizer."""

    @property
    def placement(self) -> Placement:
        return self.groups.placement

    @property
    def host_group(self) -> dist.ProcessGroup:
        return self.groups.host

    # ------------------------------------------------------------------------------------------------ modes and memory

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        self.groups.meet(f"training the {self.name}")
        self._save.finish()  # a background save still reads what an update would change
        self._parameter_storages.restore()
        self._enter(trains=True)
        yield
        self.offload_idle()

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        self.groups.meet(f"passes of the {self.name}")
        self._parameter_storages.restore(to_change=False)  # only read, so the host's copy stays current
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
        """Offload what this role's section offloads, to free memory for the next role or the rollout engine."""
        self.to("host", model="parameters" in self._offload, optimizer="optimizer" in self._offload)
        if "gradients" in self._offload:
            self._free_gradients()

    @abstractmethod
    def _enter(self, *, trains: bool) -> None:
        """Prepare the model, whose parameters are resident, for updates or for passes alone."""

    @abstractmethod
    def _free_gradients(self) -> None:
        """Free the gradients' memory, if it is not free."""

    # ---------------------------------------------------------------------------------------------------------- passes

    def forward_backward(
        self,
        share: PackedBatch,
        loss_fn: LossFunction,
        *,
        reads: Collection[str] = (),
        denominator: float = 1.0,
        forward_only: bool = False,
        together: Sequence[int] = (),
    ) -> PassResult:
        self._passes += 1
        kind = "a forward pass" if forward_only else "forward and backward"
        groups, units = self.groups, Units.of(share.lengths, together)
        lengths = units.lengths
        needed = split_by_budget(lengths, self._micro_batch_tokens)
        # A rank that runs another pass than its peers, or fewer micro-batches, would hang or abort inside it, without a name.
        agreed = groups.agree(f"{kind} of the {self.name}", self._passes, share.lengths, needed)
        # The interleaved schedule passes micro-batches through the stages in groups of pp, so the number is rounded up.
        multiple = groups.layout.pp if groups.layout.vpp > 1 else 1
        mine = units.sequences(
            plan_micro_batches(lengths, self._micro_batch_tokens, -(-agreed.micro_batches // multiple) * multiple)
        )
        read = share.only(reads if groups.is_last_stage else ())  # only the last stage computes the loss
        routes = self._routes_of(share) if ROUTES in reads and self.arch.moe is not None else None
        if routes is not None:
            read = read.with_fields(ragged_fields={ROUTES: routes})
        outputs: list[LossOutput] = []
        micro_batches = MicroBatches(read, mine, groups, self.device)
        router = self._run(micro_batches, loss_fn, denominator, outputs, agreed.sequences, forward_only=forward_only)
        names, reports = self._agree_on_names(outputs), groups.is_reporter
        sums, maxima = combined_metrics(outputs, names, groups.everyone, self.device, reports=reports)
        if routes is not None:
            replayed = self._replayed.clone()
            dist.all_reduce(replayed, group=groups.everyone)
            sums |= dict(zip(("routes_sum", "rerouted_sum"), replayed.tolist()))
        tokens = in_order(share, mine, outputs, names["tokens"], self.device, reports=reports)
        return PassResult(tokens, sums, maxima, len(mine), router)

    def _routes_of(self, share: PackedBatch) -> Ragged | None:
        """Return the sampler's choice of experts on every stage; the last one holds it. Collective over the stages."""
        routes, groups = share.ragged_fields.get(ROUTES), self.groups
        if groups.layout.pp == 1:
            return routes
        at, moe = groups.coordinates, self.arch.moe
        assert moe is not None
        last = groups.world_rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=groups.layout.pp - 1)
        size = torch.tensor(-1 if routes is None else routes.ids.numel(), device=self.device)
        dist.broadcast(size, last, group=groups.pp)
        if int(size) < 0:
            return None
        if routes is None:
            ids = torch.empty(int(size), dtype=route_dtype(moe.num_experts), device=self.device)
            counts = torch.empty(share.num_tokens, dtype=torch.int32, device=self.device)
        else:
            ids, counts = routes.ids.to(self.device), routes.counts.to(self.device)
        for part in (ids.view(torch.uint8), counts):
            dist.broadcast(part, last, group=groups.pp)
        return Ragged(ids, counts.cpu()) if routes is None else routes

    @property
    @abstractmethod
    def _replayed(self) -> Tensor:
        """[2] fp64, replayed choices of this rank's last pass and those unlike the routers' own (`models.moe.Replay`)."""

    @abstractmethod
    def _run(
        self,
        micro_batches: MicroBatches,
        loss_fn: LossFunction,
        denominator: float,
        outputs: list[LossOutput],
        num_sequences: int,
        *,
        forward_only: bool,
    ) -> RouterSummary | None:
        """Run a pass and add the results of each micro-batch, detached, to `outputs` where the loss is computed; return the load of
        the routers after training with experts. num_sequences: of the whole batch. Collective over the role's ranks."""

    def _loss_of(self, loss_fn: LossFunction, micro: MicroBatch, output: Tensor) -> LossOutput:
        """Compute the loss from hidden states [T, H] of a language model, or the values of a value model."""
        if self.value_head:
            return cast(ValueLoss, loss_fn)(output, micro.batch)
        return cast(LanguageLoss, loss_fn)(self._language_output(output, micro.context), micro.batch)

    def _language_output(self, hidden: Tensor, context: ContextShard | None) -> LinearOutput:
        layout = self.groups.layout
        start, num_valid = vocab_shard(self.arch, layout.tp, self.groups.coordinates.tp)
        weight, logit_scale = self._output_projection()
        return LinearOutput(
            hidden=hidden,
            weight=weight,
            vocab_start=start,
            num_valid=num_valid,
            group=self.groups.tp,
            sequence_parallel=layout.sequence_parallel,
            context=context,
            widest=padded_vocab(self.arch, layout.tp) // layout.tp,
            logit_scale=logit_scale,
            first_feature=None if self.arch.vision is None else IMAGE_BASE,
        )

    @abstractmethod
    def _output_projection(self) -> tuple[Tensor, float]:
        """Return this tp rank's rows of the output projection, and the factor of its products."""

    def _agree_on_names(self, outputs: list[LossOutput]) -> dict[str, list[str]]:
        # Only the last stage has results, but combining them is collective: every rank needs their names.
        names, pp = names_of(outputs[0]) if outputs else None, self.groups.layout.pp
        if pp > 1:
            names = told_by(self.groups.world_rank(pp=pp - 1), names, self.groups.everyone)
        assert names is not None, "the last stage computed no loss"
        return names

    # ------------------------------------------------------------------------------------------------------- optimizer

    def lr_scheduler_step(self) -> float:
        return self._trained().advance_schedule()

    def optimizer_step(self) -> StepResult:
        # Parameters and optimizer state stay until the mode is left, instead of one round trip to the host per mini-batch.
        self.to("device")
        result = self._trained().step()
        self._skipped_steps.count(result, self.named_gradients)
        return result

    def _trained(self) -> OptimizerT:
        assert self._optimizer is not None, f"{self.name} is frozen: it has no optimizer"
        return self._optimizer

    # ------------------------------------------------------------------------------------------------------ checkpoint

    def save_state(self, *, with_optimizer: bool) -> ModelState:
        with_optimizer &= self._optimizer is not None
        for storages in (self._parameter_storages, self._optimizer_storages):
            storages.restore(to_change=False)  # unchanged by the save, so `release_state` copies nothing to the host
        # Describing takes a tenth of the time for which a background save holds training; the description is reused while the
        # tensors stay where they are.
        tensors = (*self._parameters(), *(self._trained().tensors() if with_optimizer else ()))
        key = with_optimizer, places_of(tensors)
        if self._described is None or self._described[0] != key:
            saved = {piece.local for piece in self._saved_pieces[self.groups.position]}
            held = [part for part in self._held(with_optimizer=with_optimizer) if part.name in saved]
            named = {key_of(part.kind, part.name): part.values for part in held}
            self._described = key, boxes_to_save(held, self._saved_pieces, self.groups.layout, self.groups.position), named
        _, boxes, named = self._described
        position = self._trained().position() if with_optimizer else {}
        return ModelState(boxes, named, position)

    def release_state(self, read: Callable[[], None] | None = None) -> None:
        """Offload again what `save_state` made resident, after `read`; without offload training waits for `read`."""
        self._save.begin(read)
        self.offload_idle()

    def boxes_of(self, values: Mapping[str, Tensor], *, to_save: bool) -> Sequence[StateBox]:
        held, pieces = [Held(WEIGHT, name, tuple(one.shape), 0, one) for name, one in values.items()], self.pieces()
        if to_save:
            return boxes_to_save(held, pieces, self.groups.layout, self.groups.position)
        return list(boxes_to_load(held, pieces[self.groups.position], (), with_optimizer=False, with_head=True))

    def boxes_to_load(self, stored: Mapping[str, Shape], *, with_optimizer: bool, with_head: bool = True) -> Sequence[StateBox]:
        with_optimizer &= self._optimizer is not None
        still = constants(self.arch)
        unsaved = still - stored.keys()  # by a version that took them from the model's source
        wanted = {name: shape for name, shape in sizes_of(self._saved_pieces).items() if name not in unsaved}
        require_same_tensors(wanted, stored, self._frozen | still, with_optimizer=with_optimizer, with_head=with_head)
        self.to("device")
        held = self._held(with_optimizer=with_optimizer)
        own = [piece for piece in self._saved_pieces[self.groups.position] if piece.hf not in unsaved]
        return list(boxes_to_load(held, own, stored, with_optimizer=with_optimizer, with_head=with_head))

    def boxes_loaded(self, position: Mapping[str, int]) -> None:
        if position:
            self._trained().set_position(**position)
        else:
            self._take_new_weights()
        self.offload_idle()

    @cached_property
    def _saved_pieces(self) -> PieceMap:
        """Pieces of what checkpoints hold: all, or with adapters only those and the value head beside a frozen base."""
        whole = self.pieces()
        if self.adapters is None:
            return whole
        adapters = self.adapters.pieces()
        heads = tuple(held for held in whole.templates[whole.sections[0].template] if held.piece.hf == VALUE_HEAD)
        sections = (*adapters.sections, Section("", "", len(adapters.templates), 0))
        return PieceMap(len(whole), (*adapters.templates, heads), sections)

    @abstractmethod
    def _held(self, *, with_optimizer: bool) -> Iterator[Held]:
        """State of this rank's parameters, resident: weights, and with the optimizer moments and main parameters."""

    @abstractmethod
    def _take_new_weights(self) -> None:
        """Go on from weights that were loaded without an optimizer."""
