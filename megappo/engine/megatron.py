"""Engine of a Megatron-core model: pipeline schedules, gradient reduction, optimizer, offload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from megappo.data.tokenizers import Tokenizer
from megappo.engine.base import RouterSummary, StepResult
from megappo.engine.losses import LossFunction, LossOutput
from megappo.engine.megatron_optimizer import Optimizer
from megappo.engine.megatron_schedule import run_schedule
from megappo.engine.micro_batches import MicroBatch, MicroBatches, detached
from megappo.engine.offload import without_storages_of
from megappo.engine.role_engine import EngineSettings, RoleEngine
from megappo.engine.state_boxes import WEIGHT, Held
from megappo.models.gpt import CriticModel, PackedModel, PolicyModel, named_parameters
from megappo.models.hf_export import export_pretrained
from megappo.models.kv_copies import sum_copies
from megappo.models.lora import Weights
from megappo.models.lora_experts import sum_gradients_of_copies
from megappo.models.lora_linear import ModelAdapters, merged_parameters
from megappo.models.moe import correct, share_router_state
from megappo.models.pieces import PieceMap
from megappo.models.weight_map import piece_map
from megappo.parallel.groups import ProcessGroups


class MegatronEngine(RoleEngine[Optimizer]):
    """Engine (see base.py) of one role. `optimizer` is None for a frozen role.

    chunks: the model chunks of `models/build.py`, each wrapped in DDP when they train. adapters: of the chunks, if they have some.
    balance: router_aux_coef and router_bias_rate of the role's section.
    """

    def __init__(
        self,
        name: str,
        chunks: Sequence[torch.nn.Module],
        groups: ProcessGroups,
        settings: EngineSettings,
        *,
        optimizer: Optimizer | None = None,
        balance: tuple[float, float] = (0.0, 0.0),
        adapters: ModelAdapters | None = None,
    ) -> None:
        super().__init__(name, groups, settings, optimizer)
        self._wrapped = list(chunks)
        self._with_gradients = [c for c in chunks if isinstance(c, DistributedDataParallel)]  # all chunks, if the model trains
        # To the type checker DDP's `module` is any module.
        self.chunks = [cast(PackedModel, c.module if isinstance(c, DistributedDataParallel) else c) for c in chunks]
        self.arch, self.value_head = self.chunks[0].arch, isinstance(self.chunks[0], CriticModel)
        self._config = self.chunks[0].config
        self._router_state = share_router_state(self.chunks)
        self._router_aux_coef, self._router_bias_rate = balance
        self._router_load: Tensor | float = 0.0  # [layers, experts] tokens since the gradients were cleared
        copies = self.arch.kv_copies(groups.layout.tp)
        self._config.finalize_model_grads_func = partial(_sum_gradients, groups, copies)
        self._gradients_freed = False
        self._adapters = adapters

    @property
    def adapters(self) -> ModelAdapters | None:
        return self._adapters

    # --------------------------------------------------------------------------------------------------------- weights

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Canonical name (`models/gpt.py`) -> parameter of this rank."""
        return named_parameters(self.chunks)

    def named_gradients(self) -> dict[str, Tensor]:
        """Views of DDP's fp32 buffers; the distributed optimizer leaves each rank the reduced sum of its own shard only."""
        # main_grad: an attribute that DDP adds to what trains.
        trained = {name: parameter for name, parameter in self.named_parameters().items() if parameter.requires_grad}
        return {name: cast(Any, parameter).main_grad for name, parameter in trained.items()}

    def main_parameters(self, *, gather: bool = False) -> Iterator[tuple[str, Tensor]]:
        if self._optimizer is not None:
            self._optimizer_storages.restore(to_change=False)
            names = {id(parameter): name for name, parameter in self.named_parameters().items()}
            for parameter, copy in self._optimizer.main_parameters(gather=gather):
                yield names[id(parameter)], copy

    def merged_parameters(self) -> Weights:
        return merged_parameters(self.chunks)

    def pieces(self) -> PieceMap:
        return piece_map(self.arch, self.groups.layout, self.value_head)

    def export(self, directory: Path, source: Path, tokenizer: Tokenizer | None = None) -> None:
        with self.eval_mode():
            adapter = None if self._adapters is None else self._adapters.tensors()
            export_pretrained(self.chunks, self.arch, self.groups, directory, source, tokenizer, adapter)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for chunk in self.chunks:
            yield from chunk.parameters()

    # ------------------------------------------------------------------------------------------------ modes and memory

    def _enter(self, *, trains: bool) -> None:
        for chunk in self._wrapped:
            chunk.train(trains)
        if trains and self._gradients_freed:
            for chunk in self._with_gradients:
                chunk.restore_grad_buffers()
            self._gradients_freed = False

    def _free_gradients(self) -> None:
        if self._optimizer is not None and not self._gradients_freed:
            for chunk in self._with_gradients:
                chunk.offload_grad_buffers(empty_cache=self.device.type == "cuda")
            self._gradients_freed = True

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        # The optimizer updates fp32 parameters in place, also the fp32 head of a bf16 critic: they belong to the parameters.
        if self._optimizer is not None:
            yield from without_storages_of(self._parameters(), self._optimizer.tensors())

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
    ) -> RouterSummary | None:
        if self._router_state is not None:
            self._router_state.begin(self._router_aux_coef, max(1, num_sequences))
        if self._adapters is not None and not forward_only:
            self._adapters.start_dropping(self._trained().schedule_steps)
        compute_loss = partial(self._compute_loss, loss_fn, denominator, outputs)
        run_schedule(self._wrapped, micro_batches, compute_loss, self.groups, forward_only=forward_only)
        return None if forward_only else self._combine_router_load(num_sequences)

    def _compute_loss(
        self, loss_fn: LossFunction, denominator: float, outputs: list[LossOutput], micro: MicroBatch, raw: Tensor
    ) -> tuple[Tensor, Tensor, dict]:
        output = self._loss_of(loss_fn, micro, raw if self.value_head else raw.squeeze(1))
        outputs.append(detached(output, micro.real))
        loss = raw.new_zeros(()) if output.loss_sum is None else output.loss_sum / denominator
        # Megatron normalises by the token count; our loss is normalised already, so a count of one is reported and never used.
        return loss, torch.ones((), dtype=torch.int, device=self.device), {}

    def _output_projection(self) -> tuple[Tensor, float]:
        return cast(PolicyModel, self.chunks[-1]).output_weight(), 1.0

    @property
    def _replayed(self) -> Tensor:
        assert self._router_state is not None
        return self._router_state.replayed

    def _combine_router_load(self, num_sequences: int) -> RouterSummary | None:
        """Sum the load of the routers of all ranks in this pass; None for a dense model. Collective over the role."""
        if (state := self._router_state) is None:
            return None
        combined = torch.cat([state.tokens, state.loss[:, None]], dim=1)
        dist.all_reduce(combined, group=self.groups.everyone)
        tokens, loss = combined[:, :-1], combined[:, -1]
        self._router_load = self._router_load + tokens
        return RouterSummary(tokens.cpu(), float(loss.sum()) / max(1, num_sequences))

    # ------------------------------------------------------------------------------------------------------- optimizer

    def optimizer_zero_grad(self) -> None:
        for chunk in self._with_gradients:
            chunk.zero_grad_buffer()
        self._router_load = 0.0
        self._trained().zero_grad()

    def optimizer_step(self) -> StepResult:
        result = super().optimizer_step()
        if result.applied and self._router_bias_rate and isinstance(self._router_load, Tensor):
            correct(self.named_parameters(), self._router_load, self._router_bias_rate, self._frozen)
        return result

    # ------------------------------------------------------------------------------------------------------ checkpoint

    def _held(self, *, with_optimizer: bool) -> Iterator[Held]:
        names = {id(parameter): name for name, parameter in self.named_parameters().items()}
        for name, parameter in self.named_parameters().items():
            yield Held(WEIGHT, name, tuple(parameter.shape), 0, parameter.data)
        for kind, parameter, start, values, is_alone in self._trained().held_state() if with_optimizer else ():
            yield Held(kind, names[id(parameter)], tuple(parameter.shape), start, values, is_alone)

    def _take_new_weights(self) -> None:
        if self._optimizer is not None:
            self._optimizer.reload_main_parameters()


def _sum_gradients(
    groups: ProcessGroups, copies: int, model: list, num_tokens: Tensor, pg_collection: Any, force_all_reduce: bool = False
) -> None:
    """Run Megatron's reduction over dp, sequence-parallel and tied-embedding copies, without its division by the token count, and
    one over the copies of KV heads."""
    sum_gradients_of_copies(model, groups)
    finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
    for chunk in model if copies > 1 else ():
        sum_copies(chunk.parameters(), copies, pg_collection.tp)
