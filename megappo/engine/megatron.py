"""Engine of a Megatron-core model: pipeline schedules, gradient reduction, optimizer, offload.

It takes the share of its data-parallel replica, cuts it into micro-batches, pads and shards them as the layout needs, and returns
per-token results in the share's order on the rank that reports. Losses are callables; their meaning is unknown here.

Description of an engine's state for a save, kept for the next one while the tensors are the same.

Describing costs some dozen calls of Python for every tensor, with caches cold from training: a tenth of the time for which a save
in the background holds training. Nothing in it changes from save to save but the values in the tensors and a few plain numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from megappo.checkpoint.ranges import keep_own
from megappo.config.role_sections import OffloadConfig
from megappo.data.packing import PackedBatch
from megappo.engine.base import LanguageLoss, LossFunction, LossOutput, PassResult, RouterSummary, ValueLoss
from megappo.engine.linear_output import LinearOutput
from megappo.engine.megatron_optimizer import Optimizer
from megappo.engine.megatron_schedule import run_schedule
from megappo.engine.micro_batches import MicroBatch, MicroBatches
from megappo.engine.offload import without_storages_of
from megappo.engine.results import combined_metrics, detached, in_order, names_of
from megappo.engine.role_engine import RoleEngine
from megappo.engine.translation import WEIGHT, Held, saved_position
from megappo.models.arch import ModelArch, vocab_shard
from megappo.models.gpt import CriticModel, PackedModel, PolicyModel
from megappo.models.hf_export import export_pretrained
from megappo.models.lora import ADAPTER_A, ADAPTER_B, Weights
from megappo.models.lora_linear import ModelAdapters, adapters_of, merged_parameters
from megappo.models.moe import share_router_state
from megappo.models.naming import named_parameters
from megappo.models.pieces import PieceMap
from megappo.models.weight_map import LOCAL_EMBEDDING, LOCAL_OUTPUT, LOCAL_VALUE_HEAD, VALUE_HEAD, piece_map
from megappo.parallel.balance import plan_micro_batches, split_by_budget
from megappo.parallel.consensus import told_by
from megappo.parallel.context import ContextShard
from megappo.parallel.groups import ProcessGroups


def sharded_adapters(chunk: PackedModel, groups: ProcessGroups) -> dict[str, ShardedTensor]:
    """Description of every adapter of the chunk, and of its value head, by key."""
    found: dict[str, ShardedTensor] = {}
    for adapters in adapters_of([chunk]):
        for one in adapters.each():
            rank, (rows, columns), box = len(one.lora_A), one.size, one.box
            a, b = one.module + ADAPTER_A, one.module + ADAPTER_B
            found[a] = _sharded(a, one.lora_A, (rank, columns), (0, box.c0), groups)
            found[b] = _sharded(b, one.lora_B, (rows, rank), (box.r0, 0), groups)
    if isinstance(chunk, CriticModel) and chunk.post_process:
        head = chunk.value_head.weight
        found[VALUE_HEAD] = _sharded(VALUE_HEAD, head, tuple(head.shape), (0, 0), groups)
    return found


def _sharded(key: str, parameter: Tensor, shape: tuple[int, ...], offset: tuple[int, ...], groups: ProcessGroups) -> ShardedTensor:
    # Copies of a whole tensor on tp ranks are told apart from parts of a tensor that is cut over them.
    copy = groups.coordinates.tp if tuple(parameter.shape) == shape else 0
    replica = (0, copy, groups.collection.dp_cp.rank())
    local = tuple(parameter.shape)
    return ShardedTensor(key, parameter, parameter.dtype, local, shape, offset, axis_fragmentations=None, replica_id=replica)


@torch.no_grad()
def load_adapters(chunk: PackedModel, values: Mapping[str, Tensor]) -> None:
    """Copy what the checkpoint's reader made of `sharded_adapters` into the chunk."""
    for adapters in adapters_of([chunk]):
        for one in adapters.each():
            one.lora_A.copy_(values[one.module + ADAPTER_A])
            one.lora_B.copy_(values[one.module + ADAPTER_B])
    if VALUE_HEAD in values:
        assert isinstance(chunk, CriticModel)
        chunk.value_head.weight.copy_(values[VALUE_HEAD])


_Memory = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


class LastState:
    """Sharded description that was returned last. It shares memory with the tensors that it describes, offloaded ones too."""

    def __init__(self) -> None:
        self._key: tuple[bool, list[_Memory]] | None = None
        self._state: dict[str, Any] = {}

    def get(self, tensors: Sequence[Tensor], *, with_optimizer: bool) -> dict[str, Any] | None:
        """The description, if it was made of tensors that lie where these do, in this order; else None."""
        return self._state if self._key == (with_optimizer, [_memory(tensor) for tensor in tensors]) else None

    def keep(self, state: dict[str, Any], tensors: Sequence[Tensor], *, with_optimizer: bool) -> None:
        """Keep the description of these tensors in place of the one before."""
        # A layer's extra state (FP8) is no tensor of the list: nobody would see it change.
        if any(_has_content(entry) for entry in nested_values(state) if isinstance(entry, ShardedObject)):
            self._key, self._state = None, {}
        else:
            self._key, self._state = (with_optimizer, [_memory(tensor) for tensor in tensors]), state


def _has_content(entry: ShardedObject) -> bool:
    """False for the extra state of a layer without FP8, which TransformerEngine gives as an empty tensor."""
    return entry.data is not None and not (isinstance(entry.data, Tensor) and entry.data.numel() == 0)


def _memory(tensor: Tensor) -> _Memory:
    """Place of a tensor's values, and how they lie there."""
    # The storage's identity, not its memory's address: offload resizes storages. The description keeps them alive, so none takes
    # the place of another.
    storage = tensor.untyped_storage()._cdata
    return storage, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


class MegatronEngine(RoleEngine[Optimizer]):
    """Engine (see base.py) of one role.

    chunks: the model chunks of `models/build.py`, each wrapped in DDP when they train. `optimizer` is None for a frozen role.
    adapters: those of the chunks, if they have some. frozen, source: see `RoleEngine`.
    """

    embedding_name = LOCAL_EMBEDDING
    head_names = (LOCAL_OUTPUT, LOCAL_VALUE_HEAD, VALUE_HEAD)  # the last: beside adapters, in any engine's checkpoint

    def __init__(
        self,
        name: str,
        chunks: Sequence[torch.nn.Module],
        groups: ProcessGroups,
        *,
        device: torch.device,
        micro_batch_tokens: int,
        optimizer: Optimizer | None = None,
        offload: OffloadConfig = OffloadConfig(),
        router_aux_coef: float = 0.0,
        adapters: ModelAdapters | None = None,
        frozen: frozenset[str] = frozenset(),
        source: str = "",
    ) -> None:
        super().__init__(
            name,
            groups,
            device=device,
            micro_batch_tokens=micro_batch_tokens,
            optimizer=optimizer,
            offload=offload,
            parameters=self._parameters,
            optimizer_tensors=self._optimizer_tensors,
            frozen=frozen,
            source=source,
        )
        self._wrapped = list(chunks)
        self._with_gradients = [c for c in chunks if isinstance(c, DistributedDataParallel)]  # all of a model that trains
        # DDP's `module` has the type of any module.
        self.chunks = [cast(PackedModel, c.module if isinstance(c, DistributedDataParallel) else c) for c in chunks]
        self._config = self.chunks[0].config
        self._router_state = share_router_state(self.chunks)
        self._router_aux_coef = router_aux_coef
        self._config.finalize_model_grads_func = _sum_gradients
        self._gradients_freed = False
        self._adapters = adapters
        self._last_state = LastState()

    @property
    def arch(self) -> ModelArch:
        return self.chunks[0].arch

    @property
    def value_head(self) -> bool:
        return isinstance(self.chunks[0], CriticModel)

    # --------------------------------------------------------------------------------------------------------- weights

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Canonical name (see `models/naming.py`) -> parameter of this rank."""
        return named_parameters(self.chunks)

    def named_gradients(self) -> dict[str, Tensor]:
        """Views of DDP's fp32 buffers; the distributed optimizer leaves each rank with the reduced sum of its own shard only."""
        # main_grad: an attribute that DDP adds to what trains.
        trained = {name: parameter for name, parameter in self.named_parameters().items() if parameter.requires_grad}
        return {name: cast(Any, parameter).main_grad for name, parameter in trained.items()}

    def main_parameters(self) -> dict[str, Tensor]:
        if self._optimizer is None:
            return {}
        self._optimizer_storages.restore(to_change=False)
        main = {id(parameter): copy for parameter, copy in self._optimizer.main_parameters()}
        return {name: main[id(parameter)] for name, parameter in self.named_parameters().items() if id(parameter) in main}

    def fp32_weights(self) -> Iterator[tuple[str, Tensor]]:
        names = {id(parameter): name for name, parameter in self.named_parameters().items()}
        if self._optimizer is not None:
            self._optimizer_storages.restore(to_change=False)
            for parameter, copy in self._optimizer.gathered_main_parameters():
                yield names.pop(id(parameter)), copy
        yield from ((name, values) for name, values in super().fp32_weights() if name in names.values())

    def merged_parameters(self) -> Weights:
        return merged_parameters(self.chunks)

    def without_adapters(self) -> AbstractContextManager[None]:
        return super().without_adapters() if self._adapters is None else self._adapters.off()

    def pieces(self) -> PieceMap:
        return piece_map(self.arch, self.groups.layout, self.value_head)

    def adapter_pieces(self) -> PieceMap:
        return super().adapter_pieces() if self._adapters is None else self._adapters.pieces()

    def export(self, directory: Path, source: Path) -> None:
        with self.eval_mode():
            adapter = None if self._adapters is None else self._adapters.tensors()
            export_pretrained(self.chunks, self.arch, self.groups, directory, source, adapter=adapter)

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
        """Optimizer state without tensors that are model parameters themselves."""
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
        """Number of micro-batches that the schedule can run: at least so many."""
        # The interleaved schedule passes micro-batches through the stages in groups of pp.
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
        """Argument of a language model's loss. raw: final hidden states, the output of the last model chunk."""
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
        """Tell every rank the names of the results: only the last stage has them, but combining them is collective."""
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
        """Load of the routers of all ranks in this pass; None for a dense model."""
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

    def state_to_load(self, *, with_optimizer: bool, with_head: bool = True) -> dict[str, Any]:
        """Sharded description for `load_state`: the engine's own tensors, which the checkpoint reader fills in place.

        Without `with_head` the head keeps its weights.
        """
        self.to("device")
        state = self._described(with_optimizer=with_optimizer)
        for weights in () if with_head else state["model"].values():
            for name, entry in list(weights.items()):
                if getattr(entry, "key", None) in self.head_names:  # a tied output projection has the embedding's key
                    weights[name] = keep_own(entry.data)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        self.to("device")
        for index, chunk in enumerate(self.chunks):
            if self._adapters is not None:
                load_adapters(chunk, state["model"][str(index)])
            else:
                chunk.load_state_dict(state["model"][str(index)])
        if "updates" in state.get("optimizer", {}):  # adapters have the same names under every engine: fsdp2 saved these
            self._trained().set_position(*saved_position(state))
        elif "optimizer" in state:
            self._trained().load_state_dict(state["optimizer"])
        else:
            self._take_new_weights()
        self.offload_idle()

    def _held(self, *, with_optimizer: bool) -> Iterator[Held]:
        names = {id(parameter): name for name, parameter in self.named_parameters().items()}
        for name, parameter in self.named_parameters().items():
            yield Held(WEIGHT, name, tuple(parameter.shape), 0, parameter.data)
        for kind, parameter, start, values in self._trained().held_state() if with_optimizer else ():
            yield Held(kind, names[id(parameter)], tuple(parameter.shape), start, values)

    def _take_new_weights(self) -> None:
        if self._optimizer is not None:
            self._optimizer.reload_main_parameters()

    def _sharded_state(self, *, with_optimizer: bool) -> dict[str, Any]:
        tensors = [tensor for chunk in self.chunks for part in (chunk.parameters(), chunk.buffers()) for tensor in part]
        held = [*tensors, *self._trained().tensors()] if with_optimizer else tensors
        state = self._last_state.get(held, with_optimizer=with_optimizer)
        if state is None:
            state = self._described(with_optimizer=with_optimizer)
            self._last_state.keep(state, held, with_optimizer=with_optimizer)
        elif with_optimizer:
            self._trained().update_position(state["optimizer"])
        return state

    def _described(self, *, with_optimizer: bool) -> dict[str, Any]:
        # With the group Megatron does not read its globals; with names per layer any pipeline split can read the checkpoint.
        metadata = {"dp_cp_group": self.groups.collection.dp_cp, "non_homogeneous_layers": True}
        model_state = {
            str(index): sharded_adapters(chunk, self.groups)
            if self._adapters is not None
            else chunk.sharded_state_dict(metadata=metadata)
            for index, chunk in enumerate(self.chunks)
        }
        state: dict[str, Any] = {"model": model_state}
        if with_optimizer:
            state["optimizer"] = self._trained().sharded_state_dict(model_state)
        return state


def _sum_gradients(model: list, num_tokens: Tensor, pg_collection: Any, force_all_reduce: bool = False) -> None:
    """Megatron's reduction over dp, sequence-parallel and tied-embedding copies, without its division by the token count."""
    finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
