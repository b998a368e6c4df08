"""A model of transformers' own classes under FSDP2: its shards on this rank, their gradients, and the source of its weights.

Tensor parallel cuts first (`models/tensor_parallel.py`); FSDP2 shards the rest over the ranks of the same tp coordinate (dp x cp).
Every layer is an FSDP2 group, and every block of a tower; embedding, last norm and output projection are the root's, the fp32 value
head and the rest of a tower have their own.
Optimizer, checkpoint and bridge see this rank's shards as plain tensors, with their rectangles (`models/row_shards.py`).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate

from megappo.config.role_sections import TrainableConfig
from megappo.engine.factory import EngineSpec
from megappo.engine.fsdp2_lora import Adapters
from megappo.models.any_model import constants_of
from megappo.models.freeze import frozen_whole
from megappo.models.hf_classes import (
    HIDDEN_METHOD,
    OUTPUT_METHOD,
    ValueModel,
    build_on_meta,
    check_packing,
    decoder_of,
    fill_buffers,
    names_of_embeddings,
    output_weight,
    tokens_of_all_tp_ranks,
    tower_in,
)
from megappo.models.hf_import import fill_piece, fill_value_head
from megappo.models.hf_tensors import CheckpointReader
from megappo.models.int8_linear import BLOCK, SCALE, Int8Linear, Quantised, fill_randomly
from megappo.models.kv_copies import sum_together
from megappo.models.lora import ADAPTER_A, ADAPTER_B, Adapted, AdaptedExperts, Weights, int8_modules, is_adapter, is_beside_base
from megappo.models.row_shards import own_parameters, shard_box, shard_piece_map, shards_of
from megappo.models.tensor_parallel import copied_names, cut_over_tp, partial_names
from megappo.models.vision import blocks_of
from megappo.models.weight_check import check_tied
from megappo.models.weight_map import VALUE_HEAD, hf_cuts, hf_tensors
from megappo.parallel.context import ContextShard
from megappo.parallel.groups import ProcessGroups
from megappo.parallel.layout import ParallelLayout


class ShardedModel:
    """A model and this rank's shards of it. logit_scale: from `check_packing`. adapters: LoRA adapters, or None."""

    def __init__(
        self,
        module: torch.nn.Module,
        spec: EngineSpec,
        groups: ProcessGroups,
        logit_scale: float,
        dtype: torch.dtype,
        adapters: Adapters | None = None,
    ) -> None:
        self.module, self.logit_scale, self.adapters, self._dtype = module, logit_scale, adapters, dtype
        # Buffers that the checkpoint brought, whole on every rank.
        self.constants = {name: torch.nn.Parameter(buffer, requires_grad=False) for name, buffer in constants_of(module).items()}
        self._root, self._groups = cast(FSDPModule, module), groups
        self._whole = {name: cast(DTensor, parameter.data) for name, parameter in module.named_parameters()}
        self._sharded = dict(module.named_parameters())  # FSDP2 swaps in others while layers are gathered
        # Shapes of the whole parameters, not of this rank's parts.
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self._sharded.items()}
        # This rank's part of a parameter, an adapter's too, sharing memory with FSDP2's own. Empty parts are left out.
        self.shards: dict[str, torch.nn.Parameter] = {}
        # First index of each shard in every dimension.
        self.starts: dict[str, tuple[int, ...]] = {}
        places = shards_of(spec.arch, groups.layout, groups.position, self.is_value_model)
        if adapters is not None:
            places |= {name: (start, shape) for name, start, shape in adapters.places(groups.position)}
        for linear in int8_modules(spec.arch, None if adapters is None else adapters.lora):
            if (rows := places.get(f"{linear}.weight")) is not None:
                places[linear + SCALE] = (rows[0][0], 0), (rows[1][0], self.shapes[linear + SCALE][1])
        for name, (start, shape) in places.items():
            trains = self._sharded[name].requires_grad
            self.shards[name] = torch.nn.Parameter(self._whole[name].to_local().detach(), requires_grad=trains)
            self.starts[name] = start
            assert self.shards[name].shape == shape, f"{name} was cut otherwise"
        self.trained = {name: shard for name, shard in self.shards.items() if shard.requires_grad}
        of_adapters = set() if adapters is None else adapters.copied
        partial = partial_names(spec.arch, self.is_value_model, sequence_parallel=groups.layout.sequence_parallel)
        # Parameters that tp does not cut, so that each tp rank has the same shard.
        self.copied = copied_names(spec.arch, self.is_value_model) | of_adapters
        self._partial = sorted(self.trained.keys() & (partial | of_adapters))

    @property
    def is_value_model(self) -> bool:
        return isinstance(self.module, ValueModel)

    def __call__(self, tokens: Tensor, cu_seqlens: Tensor, context: ContextShard | None = None) -> Tensor:
        """Return the final hidden states of this rank's tokens [T / cp, H], or the head's outputs fp32 [T] or [T, rows].
        Hidden states are [T / cp / tp, H] under sequence parallel. tokens: all T. cu_seqlens: on the host. context: this rank's
        part of the tokens under context parallel. Collective over the ranks."""
        rows = getattr(self.module, OUTPUT_METHOD)(tokens, cu_seqlens, context)[0]
        if not self.is_value_model:
            return rows
        values = tokens_of_all_tp_ranks(rows.squeeze(-1), self._groups)
        return values if context is None else context.gather(values)

    def output_weight(self) -> Tensor:
        """This tp rank's rows of the output projection [V / tp, H]; valid from a forward to its backward or `reshard`."""
        return output_weight(self.module)

    def reshard(self) -> None:
        # After a pass FSDP2 keeps the root's weights gathered and would not see new ones in the shards.
        self._root.reshard()

    def reduce_gradients(self, now: bool) -> None:
        """Say whether the next backward reduces gradients over ranks, with those kept before, or keeps whole ones."""
        self._root.set_requires_gradient_sync(now)

    def zero_gradients(self) -> None:
        """Set the gradients to zero, making those that are missing. A backward pass adds to them."""
        for name, parameter in self._sharded.items():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = cast(DTensor, parameter.grad).to_local()
            gradient.zero_()
            if name in self.shards:
                self.shards[name].grad = gradient

    def sum_partial_gradients(self) -> None:
        """Sum, over tp, gradients of copies that each saw a part of the heads, tokens or columns. Once, after a pass."""
        if self._groups.layout.tp == 1:
            return
        gradients = [gradient for name in self._partial if (gradient := self.shards[name].grad) is not None]
        sum_together(gradients, self._groups.tp)

    def free_gradients(self) -> None:
        for parameter in (*self._sharded.values(), *self.shards.values()):
            parameter.grad = None

    def merged(self) -> Weights:
        """Return the shards of the Hugging Face tensors, adapted ones with their adapters. Collective."""
        if self.adapters is None:
            return self.shards
        weights = self._base_weights()
        experts = {stack.parameter for stack in self.adapters.stacks} & self.shards.keys()
        weights |= dict(self.adapters.experts({name: self.shards[name] for name in experts}, self.shards))
        for module in self.adapters.alone:
            # Every rank needs the columns of A that its part of the weight has.
            a = self._whole[module + ADAPTER_A]
            a = a.redistribute(placements=(Replicate(), *a.placements[1:])).to_local()  # over FSDP2's axis alone
            if (name := f"{module}.weight") in self.shards:
                # Rows of B are cut as those of the weight: both have the module's outputs.
                base = weights[name]
                assert not isinstance(base, Adapted | AdaptedExperts)
                weights[name] = Adapted(base, a, self.shards[module + ADAPTER_B], self.adapters.scaling)
        return weights

    def _base_weights(self) -> dict[str, Tensor | Adapted | AdaptedExperts | Quantised]:
        weights: dict[str, Tensor | Adapted | AdaptedExperts | Quantised] = {}
        for name, shard in self.shards.items():
            if not is_adapter(name) and not name.endswith(SCALE):
                scales = self.shards.get(name.removesuffix(".weight") + SCALE)
                if scales is None:
                    weights[name] = shard
                else:
                    weights[name] = Quantised(shard, scales, self._dtype, self.starts[name][1] % BLOCK)
        return weights

    def gradients(self) -> dict[str, Tensor]:
        """Reduced gradients of this rank's shards, fp32; missing ones are left out."""
        return {name: shard.grad for name, shard in self.shards.items() if shard.grad is not None}


def build_sharded(
    spec: EngineSpec, groups: ProcessGroups, *, dtype: torch.dtype, device: torch.device, trains: bool
) -> ShardedModel:
    """Build, cut, shard and fill the model of `spec` over the role's ranks. Collective over them.
    Weights that train have fp32 shards and compute in `dtype`; frozen ones are kept in `dtype`, or in 8 bits with `lora.base_bits`;
    a value head and adapters in fp32. ValueError if the checkpoint or the architecture does not fit."""
    section, lora, recompute, layout = spec.section, None, "none", groups.layout
    inputs_on_host = False
    if isinstance(section, TrainableConfig):
        lora, recompute = section.lora, section.recomputed if trains else "none"
        inputs_on_host = trains and section.recompute == "offload"
    module = build_on_meta(
        spec.model,
        head_rows=0 if spec.value_head is None else spec.arch.head_rows,
        dtype=torch.float32 if trains and lora is None else dtype,
        recompute=recompute,
        inputs_on_host=inputs_on_host,
        draws=lora is not None and lora.dropout > 0,
        compiled=section.compile,
        vision=spec.arch.vision,
    )
    over_fsdp, over_tp = _meshes(groups, device)
    if layout.tp > 1:
        cut_over_tp(module, spec.arch, over_tp, sequence_parallel=layout.sequence_parallel)
    adapters = None
    # The cut of one dp x cp rank alone, which has rows of every tensor.
    cuts, one_tp_rank = hf_cuts(spec.arch), ParallelLayout(layout.tp, tp=layout.tp)
    for name, size in int8_modules(spec.arch, lora).items():
        linear = module.get_submodule(name)
        linear.__class__ = Int8Linear
        box = shard_box(size, cuts[f"{name}.weight"], one_tp_rank, groups.coordinates.tp)
        assert box is not None
        cast(Int8Linear, linear).become(box.c0 % BLOCK)
    if lora is not None:
        adapters = Adapters(spec.arch, lora, groups.layout, spec.seed)
        adapters.add_to(module)
    still = frozen_whole(spec.arch, spec.frozen, value_head=spec.value_head is not None)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trains and (lora is None or is_beside_base(name)) and name not in still)
        if name in still:
            parameter.data = parameter.data.to(dtype)
    module.eval()  # no dropout, as in every engine; it does not turn off gradients
    _shard(module, over_fsdp, dtype)
    module.to_empty(device=device)
    fill_buffers(module)
    with torch.no_grad():
        _fill(module, spec, groups, adapters)
    logit_scale = check_packing(module, dtype, device, groups)
    if (tower := tower_in(module)) is not None:
        tower.images, tower.shards = spec.images, groups.collection.dp_cp
        tower.tp = groups.tp if layout.sequence_parallel else None
    cast(FSDPModule, module).reshard()
    return ShardedModel(module, spec, groups, logit_scale, dtype, adapters)


def _meshes(groups: ProcessGroups, device: torch.device) -> tuple[DeviceMesh, DeviceMesh]:
    axes = [groups.collection.dp_cp, groups.tp]
    # FSDP2 shards over dp x cp. tp is the fastest axis of a layout: a row of positions is of one dp x cp coordinate.
    ranks = torch.tensor(groups.placement.ranks).view(-1, groups.layout.tp)
    # DTensor remembers decisions, and the groups in them, by ranks and names of a mesh: another role, or an engine that is gone,
    # may have had groups of its own on the same ranks.
    names = tuple(f"{kind} {group.group_name}" for kind, group in zip(("fsdp", "tp"), axes))
    mesh = DeviceMesh.from_group(axes, device.type, mesh=ranks, mesh_dim_names=names)
    return mesh[names[0]], mesh[names[1]]


def _shard(module: torch.nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    computing = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in decoder_of(module).layers:
        fully_shard(layer, mesh=mesh, mp_policy=computing)
    if (tower := tower_in(module)) is not None:
        # Rotary tables of a tower stay in fp32.
        of_tower = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for part in (*blocks_of(tower.module), tower.module):
            fully_shard(part, mesh=mesh, mp_policy=of_tower)
    if isinstance(module, ValueModel):
        fully_shard(module.score, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    fully_shard(module, mesh=mesh, mp_policy=computing)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Sums over ranks: losses are divided by global counts already. gloo has no scaled sum, which the factor alone asks for.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    for method in (OUTPUT_METHOD, HIDDEN_METHOD):
        if hasattr(module, method):
            register_fsdp_forward_method(module, method)


def _fill(module: torch.nn.Module, spec: EngineSpec, groups: ProcessGroups, adapters: Adapters | None) -> None:
    """Fill this rank's rectangles from the checkpoint, or with small random numbers for timing."""
    local = {name: cast(DTensor, parameter).to_local() for name, parameter in module.named_parameters()}
    if spec.random_weights:
        generator = torch.Generator().manual_seed(0)
        for name, part in local.items():
            if part.dtype == torch.int8:
                fill_randomly(part, local[name.removesuffix(".weight") + SCALE], generator)
            elif not name.endswith(SCALE):
                part.copy_(torch.randn(part.shape, generator=generator) * 0.02 if part.dim() > 1 else torch.ones(part.shape))
        return
    if adapters is not None:
        parts = {name: local.pop(name) for name in list(local) if is_adapter(name)}
        adapters.start(parts, adapters.pieces()[groups.position])
    reader, is_value_model = CheckpointReader(spec.model), spec.value_head is not None
    shapes, constants = hf_tensors(spec.arch, is_value_model), constants_of(module)
    wanted = {one.name for one in own_parameters(spec.arch, is_value_model)} if spec.arch.own else shapes.keys()
    found = {name for name in local if not name.endswith(SCALE)} | constants.keys()
    if wanted != found:
        other = min(wanted ^ found)
        raise ValueError(f"{spec.model}: transformers and megappo differ on the tensor {other}; use engine megatron")
    pieces = shard_piece_map(spec.arch, groups.layout, is_value_model)[groups.position]
    for piece in pieces:
        if piece.hf != VALUE_HEAD and piece.local in local:
            fill_piece(local, piece, reader.slice(piece.hf, shapes[piece.hf])[0])
    for one in spec.arch.own:
        if one.constant:
            (part,) = one.parts
            constants[one.name].copy_(reader.slice(part.hf, part.shape)[0][:])
    # Every rank reads the whole head or embedding, so that all refuse a bad checkpoint and none waits in the next collective.
    if is_value_model:
        head = torch.empty(shapes[VALUE_HEAD])
        fill_value_head(head, spec.arch, reader, spec.value_head or "zero", spec.seed)
        for piece in pieces:
            if piece.hf == VALUE_HEAD:
                local[VALUE_HEAD].copy_(head[piece.box.r0 : piece.box.r1])
    elif spec.arch.tied_embeddings:
        check_tied(reader, spec.arch, *names_of_embeddings(module))
