"""Engine of a Megatron-core model: pipeline schedules, gradient reduction, optimizer, offload."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from megappo.data.packing import PackedBatch
from megappo.data.tokenizers import Tokenizer
from megappo.engine.base import PassResult, RouterSummary
from megappo.engine.linear_output import LinearOutput
from megappo.engine.losses import LanguageLoss, LossFunction, LossOutput, ValueLoss
from megappo.engine.megatron_optimizer import Optimizer
from megappo.engine.megatron_schedule import run_schedule
from megappo.engine.micro_batches import MicroBatch, MicroBatches, combined_metrics, detached, in_order, names_of
from megappo.engine.offload import without_storages_of
from megappo.engine.role_engine import EngineSettings, RoleEngine
from megappo.engine.state_boxes import WEIGHT, Held
from megappo.models.arch import vocab_shard
from megappo.models.gpt import CriticModel, PackedModel, PolicyModel, named_parameters
from megappo.models.hf_export import export_pretrained
from megappo.models.lora import Weights
from megappo.models.lora_linear import ModelAdapters, merged_parameters
from megappo.models.moe import share_router_state
from megappo.models.pieces import PieceMap
from megappo.models.weight_map import piece_map
from megappo.parallel.consensus import told_by
from megappo.parallel.context import ContextShard
from megappo.parallel.groups import ProcessGroups
from megappo.parallel.shares import plan_micro_batches, split_by_budget


class MegatronEngine(RoleEngine[Optimizer]):
    """Engine (see base.py) of one role. `optimizer` is None for a frozen role.

    chunks: the model chunks of `models/build.py`, each wrapped in DDP when they train. adapters: of the chunks, if they have some.
    """

    def __init__(
        self,
        name: str,
        chunks: Sequence[torch.nn.Module],
        groups: ProcessGroups,
        settings: EngineSettings,
        *,
        optimizer: Optimizer | None = None,
        router_aux_coef: float = 0.0,
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
        self._router_aux_coef = router_aux_coef
        self._config.finalize_model_grads_func = _sum_gradients
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

    def forward_backward(
        self,
        share: PackedBatch,
        loss_fn: LossFunction,
        *,
        reads: Collection[str] = (),
        denominator: float = 1.0,
        forward_only: bool = False,
    ) -> PassResult:
        self._passes += 1
        kind = "a forward pass" if forward_only else "forward and backward"
        lengths = share.lengths
        needed = split_by_budget(lengths.tolist(), self._micro_batch_tokens)
        # A rank that runs another pass than its peers would hang or abort inside it, without a name.
        agreed = self.groups.agree(f"{kind} of the {self.name}", self._passes, lengths, needed)
        mine = plan_micro_batches(lengths.tolist(), self._micro_batch_tokens, self._rounded(agreed.micro_batches))
        read = share.only(reads if self.groups.is_last_stage else ())  # only the last stage computes the loss
        micro_batches = MicroBatches(read, mine, self.groups, self.device)
        outputs: list[LossOutput] = []
        if self._router_state is not None:
            self._router_state.begin(self._router_aux_coef, max(1, agreed.sequences))
        if self._adapters is not None and not forward_only:
            self._adapters.start_dropping(self._trained().schedule_steps)
        compute_loss = partial(self._compute_loss, loss_fn, denominator, outputs)
        run_schedule(self._wrapped, micro_batches, compute_loss, self.groups, forward_only=forward_only)
        names, reports = self._agree_on_names(outputs), self.groups.is_reporter
        sums, maxima = combined_metrics(outputs, names, self.groups.everyone, self.device, reports=reports)
        router = None if forward_only else self._combine_router_load(agreed.sequences)
        tokens = in_order(share, mine, outputs, names["tokens"], self.device, reports=reports)
        return PassResult(tokens, sums, maxima, len(mine), router)

    def _rounded(self, micro_batches: int) -> int:
        # The interleaved schedule passes micro-batches through the stages in groups of pp, so the number is rounded up.
        multiple = self.groups.layout.pp if self.groups.layout.vpp > 1 else 1
        return -(-micro_batches // multiple) * multiple

    def _compute_loss(
        self, loss_fn: LossFunction, denominator: float, outputs: list[LossOutput], micro: MicroBatch, raw: Tensor
    ) -> tuple[Tensor, Tensor, dict]:
        model = self.chunks[-1]
        if isinstance(model, PolicyModel):
            output = cast(LanguageLoss, loss_fn)(self._language_output(model, raw, micro.context), micro.batch)
        else:
            output = cast(ValueLoss, loss_fn)(raw, micro.batch)
        outputs.append(detached(output, micro.real))
        loss = raw.new_zeros(()) if output.loss_sum is None else output.loss_sum / denominator
        # Megatron normalises by the token count; our loss is normalised already, so a count of one is reported and never used.
        return loss, torch.ones((), dtype=torch.int, device=self.device), {}

    def _language_output(self, model: PolicyModel, raw: Tensor, context: ContextShard | None) -> LinearOutput:
        layout = self.groups.layout
        start, num_valid = vocab_shard(model.arch, layout.tp, self.groups.coordinates.tp)
        return LinearOutput(
            hidden=raw.squeeze(1),
            weight=model.output_weight(),
            vocab_start=start,
            num_valid=num_valid,
            group=self.groups.tp,
            sequence_parallel=layout.sequence_parallel,
            context=context,
        )

    def _agree_on_names(self, outputs: list[LossOutput]) -> dict[str, list[str]]:
        # Only the last stage has results, but combining them is collective: every rank needs their names.
        layout = self.groups.layout
        names: dict[str, list[str]] | None = None
        if outputs:
            names = names_of(outputs[0])
        if layout.pp == 1:
            assert names is not None
            return names
        agreed = told_by(self.groups.world_rank(pp=layout.pp - 1), names, self.groups.everyone)
        assert agreed is not None, "the last stage computed no loss"
        return agreed

    def _combine_router_load(self, num_sequences: int) -> RouterSummary | None:
        """Sum the load of the routers of all ranks in this pass; None for a dense model. Collective over the role."""
        if self._router_state is None:
            return None
        load = self._router_state.collect()
        combined = torch.cat([load.tokens, load.loss[:, None]], dim=1)
        dist.all_reduce(combined, group=self.groups.everyone)
        tokens, loss = combined[:, :-1], combined[:, -1]
        return RouterSummary(tokens.cpu(), float(loss.sum()) / max(1, num_sequences))

    # ------------------------------------------------------------------------------------------------------- optimizer

    def optimizer_zero_grad(self) -> None:
        for chunk in self._with_gradients:
            chunk.zero_grad_buffer()
        self._trained().zero_grad()

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


def _sum_gradients(model: list, num_tokens: Tensor, pg_collection: Any, force_all_reduce: bool = False) -> None:
    """Run Megatron's reduction over dp, sequence-parallel and tied-embedding copies, without its division by the token count."""
    finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
