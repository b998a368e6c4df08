"""Engine of transformers' own classes under FSDP2: data, tensor and context parallel, every weight sharded over the role's ranks.

A replica (tp x cp ranks) cuts its share into micro-batches by the token budget, as many as every other replica. Gradients are
reduced in fp32 at each micro-batch; kept to the last (`reduce_once`) they take the memory of the whole model on every rank.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
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
from megappo.models.lora import Weights, is_beside_base
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
        beside = {name: shape for name, shape in self._model.shapes.items() if is_beside_base(name)}
        cuts = {VALUE_HEAD: Cut(None), **adapters.cuts}
        return AdapterTensors(adapters.lora, self._model.shards, plain_piece_map(beside, cuts, self.groups.layout))

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
        with torch.set_grad_enabled(not forward_only):
            raw = self._model(micro.batch.tokens, micro.batch.host_offsets, micro.context)
            output = self._loss_of(loss_fn, micro, raw)
            if not forward_only:
                # 0 * raw: a loss that reads no output still runs the backward, which its peers wait for.
                loss = 0.0 * raw.sum() + (0.0 if output.loss_sum is None else output.loss_sum / denominator)
                loss.backward()
        self._model.reshard()  # the optimizer may change the shards next
        return detached(output, micro.real)

    def _output_projection(self) -> tuple[Tensor, float]:
        return self._model.output_weight(), self._model.logit_scale

    # ------------------------------------------------------------------------------------------------------- optimizer

    def optimizer_zero_grad(self) -> None:
        self._model.zero_gradients()

    # ------------------------------------------------------------------------------------------------------ checkpoint

    def _held(self, *, with_optimizer: bool) -> Iterator[Held]:
        for name, shard in self._model.shards.items():
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
