"""Rectangles of Hugging Face tensors in the state of a rank: the form in which checkpoints hold every engine's state.

A rank's parameters are such rectangles (`pieces()`) in any layout and engine; moments and fp32 main parameters lie like their
weights. So any rank can read, by name and place, what another wrote. Vocabulary padding, which is zero, is not stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megappo.checkpoint.state import Shape, StateBox
from megappo.models import pieces as model_pieces
from megappo.models.pieces import Box, Piece, PieceMap, as_2d, shape_as_2d
from megappo.models.weight_map import OUTPUT, VALUE_HEAD
from megappo.parallel.layout import ParallelLayout

WEIGHT, MAIN, MOMENTS = "weight", "fp32_param", ("exp_avg", "exp_avg_sq")
"""Kinds of state: a model's weights, the fp32 copies that the optimizer updates in place of bf16 ones, its moments."""
_HEADS = {OUTPUT, VALUE_HEAD}
_FIX = "use the architecture that wrote it"


class Held(NamedTuple):
    """State of one parameter on this rank: all of it, or values [n] of the flattened parameter from `start` on."""

    kind: str
    name: str  # of the parameter in `pieces()`
    shape: tuple[int, ...]  # of the whole parameter on this rank
    start: int
    values: Tensor
    is_alone: bool = False  # no other data-parallel rank has it


def key_of(kind: str, name: str) -> str:
    """Name of a state of the parameter `name` in a checkpoint."""
    return name if kind == WEIGHT else f"optimizer.state.{kind}.{name}"


def boxes_to_save(held: Iterable[Held], pieces: PieceMap, layout: ParallelLayout, position: int) -> list[StateBox]:
    """Boxes that a rank writes: what it alone has, and an equal part of what other data-parallel ranks have too."""
    writers = _writers(pieces, layout, position)
    mine = [piece for piece, positions in writers.items() if position in positions]
    written: list[StateBox] = []
    shared: dict[tuple[int, ...], list[StateBox]] = {}
    for part, piece, box in _boxes(held, mine):
        (written if part.is_alone else shared.setdefault(writers[piece], [])).append(box)
    for positions, boxes in shared.items():
        # Sorted, so that all writers cut the same sequence of boxes.
        written += _share(sorted(boxes, key=lambda box: box[:3]), len(positions), positions.index(position))
    return written


def boxes_to_load(
    held: Iterable[Held], pieces: Iterable[Piece], stored: Collection[str], *, with_optimizer: bool, with_head: bool
) -> Iterator[StateBox]:
    """Yield the checkpoint's boxes of a rank's state. pieces: of the rank. stored: names of the checkpoint's tensors."""
    for part, piece, box in _boxes(held, pieces):
        if with_head or piece.hf not in _HEADS:
            main = key_of(MAIN, piece.hf)
            # The optimizer updates the fp32 copy of a bf16 weight; fsdp2 has no copy, because its weights are fp32.
            if part.kind == WEIGHT and part.values.dtype == torch.float32 and with_optimizer and main in stored:
                box = box._replace(key=main)
            if part.kind == MAIN and main not in stored:
                box = box._replace(key=piece.hf)
            yield box


def require_same_tensors(
    wanted: Mapping[str, Shape],
    stored: Mapping[str, Shape],
    frozen: Collection[str] = (),
    *,
    with_optimizer: bool,
    with_head: bool = True,
) -> None:
    """Raise ValueError, the same on every rank, unless the checkpoint holds exactly the tensors of the model.
    wanted: shapes of the model's tensors by Hugging Face name. frozen: names without optimizer state."""
    wanted = {name: shape for name, shape in wanted.items() if with_head or name not in _HEADS}
    keys = dict(wanted)
    if with_optimizer:
        keys |= {key_of(kind, name): shape for name, shape in wanted.items() if name not in frozen for kind in MOMENTS}
    if missing := sorted(keys.keys() - stored.keys()):
        raise ValueError(f"only the model has {missing[0]} ({len(missing)} such tensors); {_FIX}")
    surplus = stored.keys() - keys.keys() - {key_of(MAIN, name) for name in wanted}
    if not with_optimizer:
        surplus = {key for key in surplus if not key.startswith("optimizer.")}
    if surplus := sorted(surplus if with_head else surplus - _HEADS):
        raise ValueError(f"only the checkpoint has {surplus[0]} ({len(surplus)} such tensors); {_FIX}")
    for key, shape in keys.items():
        if stored[key] != shape:
            raise ValueError(f"{key} has the shape {list(stored[key])} there and {list(shape)} here; {_FIX}")


def _writers(pieces: PieceMap, layout: ParallelLayout, position: int) -> dict[Piece, tuple[int, ...]]:
    """Pieces of a position -> the positions, in order, that write it: the first that holds it, and its data-parallel copies.
    Copies on other tp ranks and stages (replicated weights, tied embeddings) write nothing."""
    found: dict[Piece, tuple[int, ...]] = {}
    known: dict[tuple[int, int], list[tuple[Piece, tuple[int, ...]]]] = {}  # layers of a stage are alike
    for section in pieces.sections:
        kind = section.template, section.first
        if kind not in known:
            known[kind] = list(_own_pieces(pieces.templates[section.template], section.first, layout, position))
        for piece, writers in known[kind]:
            found[piece._replace(hf=section.hf + piece.hf, local=section.local + piece.local)] = writers
    return found


def _own_pieces(
    template: Sequence[model_pieces.Held], first: int, layout: ParallelLayout, position: int
) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    holders: dict[tuple[str, Box], set[int]] = {}
    for piece, positions in template:
        holders.setdefault((piece.hf, piece.box), set()).update(first + at for at in positions)
    for piece, positions in template:
        if position - first in positions:
            everyone = sorted(holders[piece.hf, piece.box])
            main = _part(piece, layout, everyone[0])
            yield piece, tuple(at for at in everyone if _part(piece, layout, at) == main)


def _part(piece: Piece, layout: ParallelLayout, position: int) -> tuple[int, ...]:
    # Data-parallel copies share these coordinates.
    at = layout.coordinates(position)
    return (at.pp, at.ep, at.etp) if ".experts." in piece.local else (at.pp, at.tp)


def _share(boxes: Sequence[StateBox], number: int, index: int) -> Iterator[StateBox]:
    # Part `index` of `number` about equal parts, cut by rows.
    total, at = sum(box.values.nbytes for box in boxes), 0
    begin, end = total * index // number, total * (index + 1) // number
    for box in boxes:
        rows, nbytes = len(box.values), box.values.nbytes
        # Neighbouring parts round their common border to the same row.
        first, last = (min(max(0, edge - at) * rows // nbytes, rows) for edge in (begin, end))
        if first < last:
            yield box._replace(row=box.row + first, values=box.values[first:last])
        at += nbytes


def _boxes(held: Iterable[Held], pieces: Iterable[Piece]) -> Iterator[tuple[Held, Piece, StateBox]]:
    """Yield (state, piece, the box of the piece's Hugging Face tensor in this state). pieces: of the rank."""
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.local, []).append(piece)
    for part in held:
        for region, values in _regions(part):
            for piece in by_name.get(part.name, ()):
                top = piece.row + (piece.slot * part.shape[1] if len(part.shape) == 3 else 0)
                there = Box(top, top + piece.box.rows, piece.col, piece.col + piece.box.cols)
                if (common := there.intersect(region)) is not None:
                    row, col = piece.box.r0 + common.r0 - there.r0, piece.box.c0 + common.c0 - there.c0
                    rows = slice(common.r0 - region.r0, common.r1 - region.r0)
                    cols = slice(common.c0 - region.c0, common.c1 - region.c0)
                    yield part, piece, StateBox(key_of(part.kind, piece.hf), row, col, values[rows, cols])


def _regions(part: Held) -> Iterator[tuple[Box, Tensor]]:
    """Yield (box of the parameter seen as 2-D, its values [rows, cols]) of the held state."""
    rows, cols = shape_as_2d(part.shape)
    if tuple(part.values.shape) == part.shape:
        yield Box(0, rows, 0, cols), as_2d(part.values)
        return
    at = 0
    for box in flat_boxes(rows, cols, part.start, part.start + part.values.numel()):
        yield box, part.values[at : at + box.area].view(box.rows, box.cols)
        at += box.area


@cache  # layers repeat their shapes, optimizers their ranges
def flat_boxes(rows: int, cols: int, start: int, stop: int) -> Sequence[Box]:
    """Boxes, in order, of elements start..stop - 1 of a flattened matrix: end of a row, whole rows, beginning of a row."""
    first, last = -(-start // cols), stop // cols
    if first > last:  # all within one row
        ends = [Box(last, last + 1, start - last * cols, stop - last * cols)]
    else:
        ends = [
            Box(first - 1, first, start - (first - 1) * cols, cols),
            Box(first, last, 0, cols),
            Box(last, last + 1, 0, stop - last * cols),
        ]
    return tuple(box for box in ends if box.rows > 0 and box.cols > 0)
