"""Engine of transformers' own classes under FSDP2: data, tensor and context parallel, every weight sharded over the role's ranks.

A replica (tp x cp ranks) cuts its share into micro-batches by the token budget, as many as every other replica. Gradients are
reduced in fp32 at each micro-batch; kept to the last (`reduce_once`) they take the memory of the whole model on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from megappo.data.packing import PackedBatch
from megappo.data.tokenizers import Tokenizer
from megappo.engine.base import PassResult
from megappo.engine.fsdp2_lora import Adapters
from megappo.engine.fsdp2_model import ShardedModel
from megappo.engine.fsdp2_optimizer import ShardedOptimizer
from megappo.engine.linear_output import LinearOutput
from megappo.engine.losses import LanguageLoss, LossFunction, LossOutput, ValueLoss
from megappo.engine.micro_batches import MicroBatch, MicroBatches, combined_metrics, detached, in_order, names_of
from megappo.engine.role_engine import EngineSettings, RoleEngine
from megappo.engine.state_boxes import WEIGHT, Held
from megappo.models.arch import ModelArch, padded_vocab, vocab_shard
from megappo.models.hf_export import Written, export_pieces
from megappo.models.lora import Weights, is_beside_base
from megappo.models.peft_files import AdapterTensors
from megappo.models.pieces import PieceMap
from megappo.models.row_shards import plain_piece_map, shard_piece_map
from megappo.models.weight_map import VALUE_HEAD
from megappo.models.weight_rules import Cut
from megappo.parallel.context import ContextShard
from megappo.parallel.groups import ProcessGroups
from megappo.parallel.shares import plan_micro_batches, split_by_budget


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
        needed = split_by_budget(share.lengths.tolist(), self._micro_batch_tokens)
        # Every micro-batch gathers the layers from all ranks: a rank with fewer of them would leave its peers waiting.
        agreed = self.groups.agree(f"{kind} of the {self.name}", self._passes, share.lengths, needed)
        mine = plan_micro_batches(share.lengths.tolist(), self._micro_batch_tokens, agreed.micro_batches)
        outputs: list[LossOutput] = []
        with nullcontext() if forward_only else self._dropping():
            micro_batches = MicroBatches(share.only(reads), mine, self.groups, self.device)
            for number, micro in enumerate(micro_batches.of_chunk(), start=1):
                if self._reduce_once and not forward_only:
                    self._model.reduce_gradients(number == len(mine))
                outputs.append(self._run(micro, loss_fn, denominator, forward_only=forward_only))
        if not forward_only:
            self._model.sum_partial_gradients()
        names = names_of(outputs[0])
        reports = self.groups.is_reporter
        sums, maxima = combined_metrics(outputs, names, self.groups.everyone, self.device, reports=reports)
        tokens = in_order(share, mine, outputs, names["tokens"], self.device, reports=reports)
        return PassResult(tokens, sums, maxima, len(mine))

    def _dropping(self) -> AbstractContextManager[None]:
        adapters = self.adapters
        # Steps of the schedule are in checkpoints, unlike the number of passes.
        return (
            nullcontext()
            if adapters is None
            else adapters.dropping(self._trained().schedule_steps, self.groups.position // self.groups.layout.tp, self.device)
        )

    def _run(self, micro: MicroBatch, loss_fn: LossFunction, denominator: float, *, forward_only: bool) -> LossOutput:
        """Run one micro-batch, forward and, unless `forward_only`, backward. Collective over the role's ranks."""
        with torch.set_grad_enabled(not forward_only):
            raw = self._model(micro.batch.tokens, micro.cu_seqlens, micro.context)
            if self.value_head:
                output = cast(ValueLoss, loss_fn)(raw, micro.batch)
            else:
                output = cast(LanguageLoss, loss_fn)(self._language_output(raw, micro.context), micro.batch)
            if not forward_only:
                # 0 * raw: a loss that reads no output still runs the backward, which its peers wait for.
                loss = 0.0 * raw.sum() + (0.0 if output.loss_sum is None else output.loss_sum / denominator)
                loss.backward()
        self._model.reshard()  # the optimizer may change the shards next
        return detached(output, micro.real)

    def _language_output(self, hidden: Tensor, context: ContextShard | None) -> LinearOutput:
        layout = self.groups.layout
        start, num_valid = vocab_shard(self.arch, layout.tp, self.groups.coordinates.tp)
        return LinearOutput(
            hidden=hidden,
            weight=self._model.output_weight(),
            vocab_start=start,
            num_valid=num_valid,
            group=self.groups.tp,
            sequence_parallel=layout.sequence_parallel,
            context=context,
            widest=padded_vocab(self.arch, layout.tp) // layout.tp,
            logit_scale=self._model.logit_scale,
        )

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
