"""Checkpoints of one engine under another: places of this rank's state in the tensors that the other engine saved.

Megatron's checkpoints hold the tensors of one rank without parallelism (fused, in its order), those of fsdp2 the Hugging Face
tensors. Both are rectangles of Hugging Face tensors, as this rank's parameters are (`pieces()`), so a part of one is found in the
other by intersecting rectangles, whatever the layouts. Moments and fp32 main parameters lie like the weights that they belong to.
The experts of a layer are one tensor [experts, rows, columns] in either's checkpoints, seen as a matrix here, one expert below the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from megappo.checkpoint.ranges import boxes
from megappo.checkpoint.stored import Shape, StoredBox
from megappo.models.arch import ModelArch
from megappo.models.pieces import Box, Piece, as_2d, shape_as_2d
from megappo.models.row_shards import own_parameters, shard_piece_map
from megappo.models.weight_map import (
    EMBEDDING,
    LOCAL_EMBEDDING,
    LOCAL_OUTPUT,
    LOCAL_VALUE_HEAD,
    OUTPUT,
    VALUE_HEAD,
    hf_tensors,
    local_shapes,
    megatron_pieces,
)
from megappo.parallel.layout import ParallelLayout

WEIGHT, MAIN, MOMENTS = "weight", "fp32_param", ("exp_avg", "exp_avg_sq")
"""Kinds of state: a model's weights, the fp32 copies that the optimizer updates in place of bf16 ones, its moments."""
_OF_EXPERT, _OF_EXPERTS = ".mlp.experts.local_experts.", ".mlp.experts.experts."
"""In the canonical name of an expert's parameter, and in the name of Megatron's stored tensor of all experts."""
_HEADS = {OUTPUT, VALUE_HEAD, LOCAL_OUTPUT, LOCAL_VALUE_HEAD}
_FIX = "use the architecture that wrote it"


class Held(NamedTuple):
    """State of one parameter on this rank: all of it, or elements start, ... of the flattened parameter as values [n].

    name: of the parameter in `pieces()`. shape: of the whole parameter on this rank.
    """

    kind: str
    name: str
    shape: Shape
    start: int
    values: Tensor


@dataclass(frozen=True)
class Saved:
    """Tensors of a model as one engine saves them. pieces: their rectangles of Hugging Face tensors, none with a slot. shapes: by
    name."""

    pieces: Sequence[Piece]
    shapes: Mapping[str, Shape]


def _by_megatron(arch: ModelArch, value_head: bool, source: str) -> Saved:
    alone = ParallelLayout(1)
    shapes: dict[str, Shape] = {}
    for local, shape in local_shapes(arch, alone, 0, value_head).items():
        name, expert = _stored_name(local)
        shapes[name] = shape if expert is None else (max(expert + 1, *shapes.get(name, (0,))[:1]), *shape)
    pieces = []
    for piece in megatron_pieces(arch, alone, 0, value_head):
        name, expert = _stored_name(piece.local)
        pieces.append(_without_slot(piece._replace(local=name, slot=expert or 0), shapes[name]))
    return Saved(pieces, shapes)


def _stored_name(local: str) -> tuple[str, int | None]:
    """(name in Megatron's checkpoints, number of the expert) of a parameter by its canonical name."""
    before, _, inside = local.partition(_OF_EXPERT)
    if not inside:
        return local, None
    number, _, tensor = inside.partition(".")
    return f"{before}{_OF_EXPERTS}{tensor}", int(number)


def _by_fsdp2(arch: ModelArch, value_head: bool, source: str) -> Saved:
    if arch.moe is None:
        return Saved(shard_piece_map(arch, ParallelLayout(1), value_head)[0], hf_tensors(arch, value_head))
    # Imports transformers, whose class says how it holds the experts.
    from megappo.models.any_model import with_own_parameters

    arch = arch if arch.own else with_own_parameters(arch, source)
    shapes = {one.name: one.shape for one in own_parameters(arch, value_head) if not one.constant}
    pieces = (piece for piece in shard_piece_map(arch, ParallelLayout(1), value_head)[0] if piece.local in shapes)
    return Saved([_without_slot(piece, shapes[piece.local]) for piece in pieces], shapes)


def _without_slot(piece: Piece, shape: Shape) -> Piece:
    """The piece in its local tensor of this shape, seen as 2-D."""
    return piece._replace(row=piece.row + piece.slot * shape[1], slot=0) if len(shape) == 3 else piece


_WRITERS: dict[str, Callable[[ModelArch, bool, str], Saved]] = {LOCAL_EMBEDDING: _by_megatron, EMBEDDING: _by_fsdp2}
"""Name of the embedding, which every model has and each engine calls otherwise -> tensors of that engine."""


def saved_by_another(stored: Collection[str], own: str, arch: ModelArch, value_head: bool, source: str) -> Saved | None:
    """Tensors of the engine that wrote a checkpoint; None if this one did, or an unknown one.

    own: this engine's name of the embedding. source: directory that the model was read from.
    """
    other = next((name for name in _WRITERS if name != own and name in stored), None)
    if own in stored or other is None:
        return None
    return _WRITERS[other](arch, value_head, source)


def require_same_tensors(
    saved: Saved, stored: Mapping[str, Shape], frozen: Collection[str] = (), *, with_optimizer: bool, with_head: bool
) -> None:
    """ValueError, the same on every rank, unless the checkpoint holds exactly the tensors of the model.

    frozen: Hugging Face names of weights without optimizer state.
    """
    wanted = {name: shape for name, shape in saved.shapes.items() if with_head or name not in _HEADS}
    still = {piece.local for piece in saved.pieces if piece.hf in frozen}
    trained = {name for name in wanted if name not in still} if with_optimizer else ()
    keys = {key: shape for name, shape in wanted.items() for key, shape in _keys_of(name, shape, name in trained)}
    if missing := sorted(keys.keys() - stored.keys()):
        raise ValueError(f"only the model has {missing[0]} ({len(missing)} such tensors); {_FIX}")
    mains = {_key(MAIN, name) for name in wanted} if with_optimizer else set()
    surplus = stored.keys() - keys.keys() - mains
    if not with_optimizer:
        surplus = {key for key in surplus if not key.startswith("optimizer.")}
    if surplus := sorted(surplus if with_head else surplus - _HEADS):
        raise ValueError(f"only the checkpoint has {surplus[0]} ({len(surplus)} such tensors); {_FIX}")
    for key, shape in keys.items():
        rows, *cols = stored[key]
        # Megatron's vocabulary is padded for the tp ranks that wrote it.
        padded = key.endswith((LOCAL_EMBEDDING, LOCAL_OUTPUT)) and rows > shape[0]
        if (*cols,) != shape[1:] or (rows != shape[0] and not padded):
            raise ValueError(f"{key} has the shape {list(stored[key])} there and {list(shape)} here; {_FIX}")


def _keys_of(name: str, shape: Shape, with_optimizer: bool) -> Iterator[tuple[str, Shape]]:
    yield name, shape
    for kind in MOMENTS if with_optimizer else ():
        yield _key(kind, name), shape


def _key(kind: str, name: str) -> str:
    """Name in a checkpoint of a state of the parameter that is saved as `name`."""
    return name if kind == WEIGHT else f"optimizer.state.{kind}.{name}"


def stored_boxes(
    held: Iterable[Held], own: Iterable[Piece], saved: Saved, stored: Collection[str], *, with_optimizer: bool, with_head: bool
) -> Iterator[StoredBox]:
    """Places in the checkpoint of this rank's state. own: this rank's pieces."""
    mine, theirs = _by(own, lambda piece: piece.local), _by(saved.pieces, lambda piece: piece.hf)
    for part in held:
        for region, values in _regions(part):
            for piece in (_without_slot(piece, part.shape) for piece in mine.get(part.name, ())):
                if with_head or piece.hf not in _HEADS:
                    for name, common, row, col in _overlaps(region, piece, theirs[piece.hf]):
                        kind = part.kind
                        if kind in (WEIGHT, MAIN):  # of both, the one that was updated
                            kind = MAIN if with_optimizer and _key(MAIN, name) in stored else WEIGHT
                        rows = slice(common.r0 - region.r0, common.r1 - region.r0)
                        cols = slice(common.c0 - region.c0, common.c1 - region.c0)
                        yield StoredBox(_key(kind, name), row, col, values[rows, cols])


def _by(pieces: Iterable[Piece], key: Callable[[Piece], str]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(key(piece), []).append(piece)
    return found


def _regions(part: Held) -> Iterator[tuple[Box, Tensor]]:
    """(box of the parameter seen as 2-D, its values [rows, cols]) of which the held state is made."""
    rows, cols = shape_as_2d(part.shape)
    if tuple(part.values.shape) == part.shape:
        yield Box(0, rows, 0, cols), as_2d(part.values)
        return
    at = 0
    for (row, col), (height, width) in boxes((rows, cols), part.start, part.start + part.values.numel()):
        yield Box(row, row + height, col, col + width), part.values[at : at + height * width].view(height, width)
        at += height * width


def _overlaps(region: Box, piece: Piece, sources: Iterable[Piece]) -> Iterator[tuple[str, Box, int, int]]:
    """(stored tensor, box of the own parameter, row and column in the stored tensor) of what a piece shares with others of its
    Hugging Face tensor, within `region` of the parameter."""
    down, right = piece.box.r0 - piece.row, piece.box.c0 - piece.col
    for source in sources:
        there = Box(source.box.r0 - down, source.box.r1 - down, source.box.c0 - right, source.box.c1 - right)
        here = Box(piece.row, piece.row + piece.box.rows, piece.col, piece.col + piece.box.cols).intersect(there)
        if here is not None and (common := here.intersect(region)) is not None:
            row, col = common.r0 - there.r0 + source.row, common.c0 - there.c0 + source.col
            yield source.local, common, row, col


def saved_position(saved: Mapping[str, Any]) -> tuple[int, int]:
    """(updates of the weights, steps of the schedule) from the plain values of an optimizer's saved state, by either engine."""
    optimizer = saved["optimizer"]
    updates = optimizer["updates"] if "updates" in optimizer else optimizer["optimizers"]["0"]["step"]
    return int(updates), int(optimizer["schedule_steps"])
