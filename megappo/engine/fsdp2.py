"""Engine of transformers' own classes under FSDP2: data, tensor and context parallel, every weight sharded over the role's ranks.

A replica (tp x cp ranks) cuts its share into micro-batches by the token budget, as many as every other replica. Gradients are
reduced in fp32 at each micro-batch; kept to the last (`reduce_once`) they take the memory of the whole model on every rank.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config.errors import ConfigError, problem
from megappo.config.role_sections import FrozenConfig, Offload, TrainableConfig, key_of_role
from megappo.data.tokenizers import Tokenizer
from megappo.engine.factory import EngineSpec
from megappo.engine.fsdp2_lora import Adapters
from megappo.engine.fsdp2_model import ShardedModel, build_sharded
from megappo.engine.fsdp2_optimizer import ShardedOptimizer
from megappo.engine.losses import LossFunction, LossOutput
from megappo.engine.micro_batches import MicroBatch, MicroBatches, detached
from megappo.engine.role_engine import EngineSettings, RoleEngine
from megappo.engine.state_boxes import WEIGHT, Held
from megappo.models.arch import ModelArch
from megappo.models.hf_export import Written, export_pieces
from megappo.models.hf_routers import ReplayedRouters
from megappo.models.lora import Weights
from megappo.models.peft_files import AdapterTensors
from megappo.models.pieces import PieceMap
from megappo.models.row_shards import plain_piece_map, shard_piece_map
from megappo.models.weight_map import VALUE_HEAD
from megappo.models.weight_rules import Cut
from megappo.parallel.device import DTYPES
from megappo.parallel.groups import ProcessGroups


class Fsdp2Engine(RoleEngine[ShardedOptimizer]):
    """Engine (see base.py) of one role. dtype: of computation and export. `optimizer` is None for a frozen role.
    reduce_once: gradients are reduced after the last micro-batch of a pass, not after each."""

    def __init__(
        self,
        name: str,
        model: ShardedModel,
        arch: ModelArch,
        groups: ProcessGroups,
        settings: EngineSettings,
        *,
        dtype: torch.dtype,
        optimizer: ShardedOptimizer | None = None,
        reduce_once: bool = False,
    ) -> None:
        super().__init__(name, groups, settings, optimizer)
        self.arch, self.value_head = arch, model.is_value_model
        self._model = model
        self._dtype = dtype
        self._reduce_once = reduce_once

    @property
    def adapters(self) -> Adapters | None:
        return self._model.adapters

    # --------------------------------------------------------------------------------------------------------- weights

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Name of a parameter or adapter -> this rank's part, fp32 if it trains. Empty parts are left out."""
        return {**self._model.shards, **self._constants()}

    def named_gradients(self) -> dict[str, Tensor]:
        return self._model.gradients()

    def merged_parameters(self) -> Weights:
        return {**self._model.merged(), **self._constants()}

    def _constants(self) -> dict[str, torch.nn.Parameter]:
        # Constants are whole and the same on every rank: the first one reports them.
        return self._model.constants if self.groups.position == 0 else {}

    def main_parameters(self, *, gather: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: parameters that train are fp32 themselves."""
        return iter(())

    def pieces(self) -> PieceMap:
        return shard_piece_map(self.arch, self.groups.layout, self.value_head)

    def export(self, directory: Path, source: Path, tokenizer: Tokenizer | None = None) -> None:
        with self.eval_mode():
            export_pieces(
                self.merged_parameters(),
                self.pieces(),
                Written(self.arch, self._dtype, self.value_head),
                self.groups,
                directory,
                source,
                tokenizer=tokenizer,
                adapter=self._adapter_tensors(),
            )

    def _adapter_tensors(self) -> AdapterTensors | None:
        if (adapters := self.adapters) is None:
            return None
        beside = adapters.pieces()
        if self.value_head:
            head = plain_piece_map({VALUE_HEAD: self._model.shapes[VALUE_HEAD]}, {VALUE_HEAD: Cut(None)}, self.groups.layout)
            beside = PieceMap.of({position: [*held, *head[position]] for position, held in beside.items()})
        return AdapterTensors(adapters.lora, self._model.shards, beside, self.arch)

    # ------------------------------------------------------------------------------------------------ modes and memory

    def _parameters(self) -> Iterable[Tensor]:
        return self._model.shards.values()

    def _optimizer_tensors(self) -> Iterable[Tensor]:
        return () if self._optimizer is None else self._optimizer.tensors()

    def _enter(self, *, trains: bool) -> None:
        """Do nothing: the mode of the modules makes no difference to these models."""

    def _free_gradients(self) -> None:
        self._model.free_gradients()

    # ---------------------------------------------------------------------------------------------------------- passes

    def _run(
        self,
        micro_batches: MicroBatches,
        loss_fn: LossFunction,
        denominator: float,
        outputs: list[LossOutput],
        num_sequences: int,
        *,
        forward_only: bool,
    ) -> None:
        self._replayed.zero_()
        with nullcontext() if forward_only else self._dropping():
            for number, micro in enumerate(micro_batches.of_chunk(), start=1):
                if self._reduce_once and not forward_only:
                    self._model.reduce_gradients(number == len(micro_batches))
                outputs.append(self._run_one(micro, loss_fn, denominator, forward_only=forward_only))
        if not forward_only:
            self._model.sum_partial_gradients()

    def _dropping(self) -> AbstractContextManager[None]:
        if self.adapters is None:
            return nullcontext()
        # Steps of the schedule are in checkpoints, unlike the number of passes.
        step, replica = self._trained().schedule_steps, self.groups.position // self.groups.layout.tp
        return self.adapters.dropping(step, replica, self.device)

    def _run_one(self, micro: MicroBatch, loss_fn: LossFunction, denominator: float, *, forward_only: bool) -> LossOutput:
        """Run one micro-batch, forward and, unless `forward_only`, backward. Collective over the role's ranks."""
        # One micro-batch after the other, forward and backward: a recomputed forward finds its own routes.
        with torch.set_grad_enabled(not forward_only), self._replaying(micro):
            raw = self._model(micro.batch.tokens, micro.batch.host_offsets, micro.context)
            output = self._loss_of(loss_fn, micro, raw)
            if not forward_only:
                # 0 * raw: a loss that reads no output still runs the backward, which its peers wait for.
                loss = 0.0 * raw.sum() + (0.0 if output.loss_sum is None else output.loss_sum / denominator)
                loss.backward()
        self._model.reshard()  # the optimizer may change the shards next
        return detached(output, micro.real)

    @cached_property
    def _routers(self) -> ReplayedRouters | None:
        moe = self.arch.moe
        return None if moe is None else ReplayedRouters(self._model.module, moe.num_experts, moe.top_k, self._replayed)

    @cached_property
    def _replayed(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self.device)

    def _replaying(self, micro: MicroBatch) -> AbstractContextManager[None]:
        if micro.routes is None or self._routers is None:
            return nullcontext()
        return self._routers.replaying(micro.routes if micro.context is None else micro.context.take(micro.routes))

    def _output_projection(self) -> tuple[Tensor, float]:
        return self._model.output_weight(), self._model.logit_scale

    # ------------------------------------------------------------------------------------------------------- optimizer

    def optimizer_zero_grad(self) -> None:
        self._model.zero_gradients()

    # ------------------------------------------------------------------------------------------------------ checkpoint

    def boxes_loaded(self, position: Mapping[str, int]) -> None:
        for constant in self._model.constants.values():
            dist.broadcast(constant.data, group=self.groups.everyone, group_src=0)  # which alone has read it
        super().boxes_loaded(position)

    def _held(self, *, with_optimizer: bool) -> Iterator[Held]:
        for name, shard in self.named_parameters().items():
            yield Held(WEIGHT, name, tuple(shard.shape), 0, shard.data)
        for moment, name, values in self._trained().moments() if with_optimizer else ():
            yield Held(moment, name, tuple(values.shape), 0, values)

    def _take_new_weights(self) -> None:
        """Do nothing: the optimizer updates the weights themselves."""


def build_fsdp2(spec: EngineSpec, groups: ProcessGroups, device: torch.device) -> Fsdp2Engine:
    """Build the engine of a role. Collective over the role's ranks. ValueError if the model or the checkpoint does not fit.
    The section of a role that trains is a `TrainableConfig`."""
    section, dtype = spec.section, DTYPES[spec.section.dtype]
    if section.compile:
        _check_compiler(spec.role)
    model = build_sharded(spec, groups, dtype=dtype, device=device, trains=spec.total_updates is not None)
    reduce_once = isinstance(section, TrainableConfig) and section.reduce_once
    optimizer = None
    offload: tuple[Offload, ...] = section.offload if isinstance(section, FrozenConfig) else ()
    if spec.total_updates is not None:
        assert isinstance(section, TrainableConfig), f"{spec.role} has no optimizer to train with"
        optimizer = ShardedOptimizer(model.trained, model.copied, groups, section.optimizer, spec.total_updates, device)
        offload = section.offload
    settings = EngineSettings(device, section.micro_batch_tokens, offload, spec.frozen)
    engine = Fsdp2Engine(spec.role, model, spec.arch, groups, settings, dtype=dtype, optimizer=optimizer, reduce_once=reduce_once)
    engine.offload_idle()
    return engine


def _check_compiler(role: str) -> None:
    """Raise ConfigError without the C++ compiler that torch.compile calls for kernels on the CPU and launchers on a GPU."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        fix = f"torch.compile calls {compiler}, which is not on PATH; install it, name another one in CXX, or remove the key"
        raise ConfigError(problem(f"{key_of_role(role)}.compile", True, fix))
