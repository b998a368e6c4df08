"""Assembly of sharded tensors under their Hugging Face names on one rank, with the largest difference of their copies. For models
small enough to compare whole; export (`models/hf_export.py`) writes large ones tensor by tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megappo.engine.base import Engine
from megappo.models.pieces import Box, Piece, as_2d, rectangle, sizes_of
from megappo.models.weight_map import hf_tensors
from megappo.parallel.consensus import gathered_at


@dataclass(frozen=True)
class Gathered:
    """Assembled tensors of a role; both fields are empty on ranks other than the role's first."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Hugging Face name -> whole tensor, fp32 on the host."""
    spread: dict[str, float] = field(default_factory=dict)
    """Name -> largest difference of its copies on tp, cp, dp or edp ranks, or on both ends of a pipeline (tied embeddings)."""


def gather_tensors(local: Mapping[str, Tensor], engine: Engine) -> Gathered:
    """Assemble `local`: this rank's parameters of the engine, or their gradients, by the engine's names. Collective over its ranks.
    Frozen tensors may be missing, because they have no gradients."""
    rank, placement, adapters = dist.get_rank(), engine.placement, engine.adapter_pieces()
    position, first = placement.position_of(rank), placement.rank_of(0)
    of_adapters = sizes_of(adapters)
    frozen = {name for name, parameter in engine.named_parameters().items() if not parameter.requires_grad} - local.keys()
    held = [*engine.pieces()[position], *adapters[position]]
    mine = [(one.hf, tuple(one.box), None if one.local in frozen else _part(local[one.local], one)) for one in held]
    parts = gathered_at(first, mine, engine.host_group)
    if rank != first:
        return Gathered()
    absent: set[str] = set()
    copies: dict[str, dict[Box, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    for name, box, values in (part for rank in parts for part in rank):
        if values is None:
            absent.add(name)
        else:
            copies[name][Box(*box)].append(torch.from_numpy(values))
    gathered = Gathered()
    assert not absent & copies.keys(), f"frozen on some ranks alone: {sorted(absent & copies.keys())}"
    for name, shape in {**hf_tensors(engine.arch, engine.value_head), **of_adapters}.items():
        if name in absent:
            continue
        gathered.tensors[name], gathered.spread[name] = _assemble(name, torch.zeros(shape), copies[name])
    return gathered


def _part(tensor: Tensor, piece: Piece) -> NDArray[numpy.float32]:
    # A copy: the next step changes the parameter in place. NumPy: torch's tensors take five times as long to pickle.
    part = rectangle(tensor.detach(), piece.slot, piece.row, piece.col, piece.box.rows, piece.box.cols)
    return part.float().cpu().clone().numpy()


def _assemble(name: str, whole: Tensor, boxes: Mapping[Box, list[Tensor]]) -> tuple[Tensor, float]:
    """(the tensor from the first copy of each box, largest difference of another copy). Boxes are equal or disjoint."""
    covered = sum(box.area for box in boxes)
    assert covered == whole.numel(), f"{name}: pieces cover {covered} of {whole.numel()} elements"
    spread = 0.0
    for box, (first, *others) in boxes.items():
        as_2d(whole)[box.r0 : box.r1, box.c0 : box.c1] = first
        spread = max([spread, *(float((other - first).abs().max()) for other in others)])
    return whole, spread
