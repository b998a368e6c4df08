"""A model of transformers' own classes under FSDP2: its shards on this rank, their gradients, and the source of its weights.

Every layer is a group of FSDP2, gathered for its forward and backward; embedding, last norm and output projection are the root's
group, the value head one of its own, in fp32. The optimizer, the checkpoint and the bridge work on this rank's shards as plain
tensors: a DTensor of one mesh axis is its rows and their number.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from megappo.config.role_sections import TrainableConfig
from megappo.engine.factory import EngineSpec
from megappo.models.hf_import import check_tied, fill_value_head, read_box
from megappo.models.hf_tensors import CheckpointReader
from megappo.models.own_classes import (
    HIDDEN_METHOD,
    OUTPUT_METHOD,
    ValueModel,
    build_on_meta,
    check_packing,
    decoder_of,
    fill_buffers,
    output_weight,
)
from megappo.models.pieces import as_2d
from megappo.models.row_shards import row_piece_map, rows_of_rank
from megappo.models.weight_map import VALUE_HEAD, hf_tensors


class ShardedModel:
    """A model and this rank's shards of it.

    shards: name of a Hugging Face tensor -> this rank's rows, sharing memory with FSDP2's own; tensors of which the rank holds no
    row are left out. shapes: of the whole tensors, all of them. first_rows: where the shards start.
    """

    def __init__(self, module: torch.nn.Module, group: dist.ProcessGroup) -> None:
        self.module = module
        self._root = cast(FSDPModule, module)
        self._whole = {name: cast(DTensor, parameter.data) for name, parameter in module.named_parameters()}
        self._sharded = dict(module.named_parameters())  # FSDP2 puts others in their place while they are gathered
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self._sharded.items()}
        self.shards: dict[str, torch.nn.Parameter] = {}
        self.first_rows: dict[str, int] = {}
        for name, whole in self._whole.items():
            start, stop = rows_of_rank(whole.shape[0], group.size(), group.rank())
            if stop > start:
                self.shards[name] = torch.nn.Parameter(whole.to_local().detach())
                self.first_rows[name] = start
                assert len(self.shards[name]) == stop - start, f"{name} was cut otherwise"

    @property
    def is_value_model(self) -> bool:
        return isinstance(self.module, ValueModel)

    def __call__(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Final hidden states [T, H], or values [T] fp32. cu_seqlens: on the host. Collective over the ranks."""
        rows = getattr(self.module, OUTPUT_METHOD)(tokens, cu_seqlens)[0]
        return rows.squeeze(-1) if self.is_value_model else rows

    def output_weight(self) -> Tensor:
        """The whole output projection [V, H], between a forward and its backward or the next `reshard`."""
        return output_weight(self.module)

    def reshard(self) -> None:
        """Let go of gathered weights after a pass: FSDP2 keeps the root's, and would not see new weights in the shards."""
        self._root.reshard()

    def zero_gradients(self) -> None:
        """Set the gradients to zero, and make those that are not there. A backward pass adds to them."""
        for name, parameter in self._sharded.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = cast(DTensor, parameter.grad).to_local()
            gradient.zero_()
            if name in self.shards:
                self.shards[name].grad = gradient

    def free_gradients(self) -> None:
        for parameter in (*self._sharded.values(), *self.shards.values()):
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Reduced gradients of this rank's shards, fp32; those that are not there are left out."""
        return {name: shard.grad for name, shard in self.shards.items() if shard.grad is not None}


def build_sharded(
    spec: EngineSpec, group: dist.ProcessGroup, *, dtype: torch.dtype, device: torch.device, trains: bool
) -> ShardedModel:
    """Build, shard and fill the model of `spec` over `group`. Collective over it.

    A model that trains keeps fp32 shards and computes in `dtype`; a frozen one keeps `dtype`, and fp32 for a value head. ValueError
    if the checkpoint or the architecture does not fit.
    """
    kept = torch.float32 if trains else dtype
    recompute = spec.section.recompute if trains and isinstance(spec.section, TrainableConfig) else "none"
    module = build_on_meta(spec.model, value_head=spec.value_head is not None, dtype=kept, recompute=recompute)
    module.requires_grad_(trains)
    module.eval()  # no dropout, as in every engine; it does not turn off gradients
    _shard(module, DeviceMesh.from_group(group, device.type), dtype)
    module.to_empty(device=device)
    fill_buffers(module, device)
    with torch.no_grad():
        _fill(module, spec, group)
    check_packing(module, dtype, device)
    cast(FSDPModule, module).reshard()
    return ShardedModel(module, group)


def _shard(module: torch.nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    computing = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in decoder_of(module).layers:
        fully_shard(layer, mesh=mesh, mp_policy=computing)
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


def _fill(module: torch.nn.Module, spec: EngineSpec, group: dist.ProcessGroup) -> None:
    """Read this rank's rows from the checkpoint; or small random ones, for timing."""
    local = {name: cast(DTensor, parameter).to_local() for name, parameter in module.named_parameters()}
    if spec.random_weights:
        generator = torch.Generator().manual_seed(0)
        for part in local.values():
            part.copy_(torch.randn(part.shape, generator=generator) * 0.02 if part.dim() > 1 else torch.ones(part.shape))
        return
    reader, is_value_model = CheckpointReader(spec.model), spec.value_head is not None
    shapes = hf_tensors(spec.arch, is_value_model)
    if local.keys() != shapes.keys():
        other = min(local.keys() ^ shapes.keys())
        raise ValueError(f"{spec.model}: transformers and megappo differ on the tensor {other}; use engine megatron")
    pieces = row_piece_map(spec.arch, group.size(), is_value_model)[group.rank()]
    for piece in pieces:
        if piece.hf == VALUE_HEAD:
            continue
        source, _ = reader.slice(piece.hf, shapes[piece.hf])
        as_2d(local[piece.local]).copy_(read_box(source, piece.box))
    # Both by every rank in whole, so that all of them refuse a checkpoint, and none waits for the others in the next collective.
    if is_value_model:
        head = torch.empty(shapes[VALUE_HEAD])
        fill_value_head(head, spec.arch, reader, spec.value_head or "zero", spec.seed)
        local[VALUE_HEAD].copy_(head[slice(*rows_of_rank(1, group.size(), group.rank()))])
    elif spec.arch.tied_embeddings:
        check_tied(reader, spec.arch, row_piece_map(spec.arch, 1)[0])
