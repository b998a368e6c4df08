"""Rectangles of Hugging Face tensors on the ranks of a model that FSDP2 shards by rows, after a tensor-parallel cut.

tp cuts columns or rows as the family's rules say; the rows left are cut over all ranks of the same tp coordinate (dp x cp). Both
cuts are torch.chunk's, like those of DTensor and FSDP2: ceil(rows / ranks) rows per rank, fewer or none for the last. Parameters
have the tensors' names, except those that hold all experts of a layer (`ModelArch.own`, without tp). Pure values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from megappo.models.arch import ModelArch, OwnParameter, Part
from megappo.models.pieces import Box, Held, Piece, PieceMap, Section, shape_as_2d
from megappo.models.weight_map import VALUE_HEAD, hf_cuts, hf_layer, hf_tensors
from megappo.models.weight_rules import Cut
from megappo.parallel.layout import ParallelLayout

_LAYER = re.compile(r"(?:.*?\.)??(?:layers|blocks)\.(\d+)\.")


def rows_of_rank(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Half-open range of the rows that a rank holds; empty at the end if there are fewer rows than ranks."""
    step = -(-rows // ranks)
    return min(rows, rank * step), min(rows, (rank + 1) * step)


def shard_box(shape: tuple[int, ...], cut: Cut, layout: ParallelLayout, position: int) -> Box | None:
    """Rectangle of a tensor at a position of a layout without pipeline; None if there are fewer rows than ranks."""
    at = layout.coordinates(position)
    rows, cols = shape_as_2d(shape)
    each = rows // shape[0]  # rows of an entry of the first dimension, which is cut: more than one of a convolution
    ranges = [(0, shape[0]), (0, cols)]
    if cut.dim is not None:
        ranges[cut.dim] = rows_of_rank(ranges[cut.dim][1], layout.tp, at.tp)
    (first, end), columns = ranges
    start, stop = rows_of_rank(end - first, layout.dp * layout.cp, at.cp + layout.cp * at.dp)
    return Box((first + start) * each, (first + stop) * each, *columns) if stop > start else None


def shard_piece_map(arch: ModelArch, layout: ParallelLayout, value_head: bool = False) -> PieceMap:
    """Rectangles of every position, from one template for each kind of layer."""
    if arch.own:
        return _own_piece_map(arch, layout, value_head)
    assert arch.moe is None, f"parameters of the experts of this {arch.family} model were not read"
    first = hf_layer(0)
    shapes, cuts = hf_tensors(arch, value_head), hf_cuts(arch, value_head)
    prefixes = tuple(map(hf_layer, range(arch.num_layers)))
    others = {name: shape for name, shape in shapes.items() if not name.startswith(prefixes)}
    layer = {name: shape for name, shape in shapes.items() if name.startswith(first)}
    templates = tuple(
        PieceMap.of({at: _pieces(tensors, cuts, layout, at, prefix) for at in range(layout.world_size)}).templates[0]
        for tensors, prefix in ((others, ""), (layer, first))
    )
    layers = (Section(hf_layer(number), hf_layer(number), 1, 0) for number in range(arch.num_layers))
    return PieceMap(layout.world_size, templates, (Section("", "", 0, 0), *layers))


def plain_piece_map(shapes: Mapping[str, tuple[int, ...]], cuts: Mapping[str, Cut], layout: ParallelLayout) -> PieceMap:
    """Rectangles of every position of tensors with these cuts over tp, listed one by one."""
    return PieceMap.of({at: _pieces(shapes, cuts, layout, at, "") for at in range(layout.world_size)})


def _pieces(
    shapes: Mapping[str, tuple[int, ...]], cuts: Mapping[str, Cut], layout: ParallelLayout, position: int, prefix: str
) -> list[Piece]:
    found = []  # named without `prefix`, which the section adds
    for whole_name, shape in shapes.items():
        name, box = whole_name.removeprefix(prefix), shard_box(shape, cuts[whole_name], layout, position)
        if box is not None:
            found.append(Piece(name, box, name, 0, 0))
    return found


def shards_of(
    arch: ModelArch, layout: ParallelLayout, position: int, value_head: bool = False
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Parameter -> (first index in every dimension, shape) of the shard that a position holds; without empty ones."""
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    if not arch.own:
        shapes = hf_tensors(arch, value_head)
        for piece in shard_piece_map(arch, layout, value_head)[position]:
            box, shape = piece.box, shapes[piece.hf]
            if len(shape) > 2:
                each = shape_as_2d(shape)[0] // shape[0]
                found[piece.hf] = (box.r0 // each, *(0 for _ in shape[1:])), (box.rows // each, *shape[1:])
            else:
                found[piece.hf] = (box.r0, box.c0)[: len(shape)], (box.rows, box.cols)[: len(shape)]
        return found
    for one in own_parameters(arch, value_head):
        start, stop = rows_of_rank(one.shape[0], layout.dp * layout.cp, position)
        if stop > start and not one.constant:
            found[one.name] = (start, *(0 for _ in one.shape[1:])), (stop - start, *one.shape[1:])
    return found


# ------------------------------------------------------------------------------------------ parameters of transformers' own class


class Stack(NamedTuple):
    """Adapters of one matrix of every expert of a layer: one A [experts, rank, columns] and one B [experts, rows, rank], which are
    cut by experts as the parameter that holds the matrices."""

    name: str  # of both parameters without their endings
    parameter: str  # [experts, ...]
    row: int  # of the matrix in its expert's part of it
    modules: tuple[str, ...]  # by expert
    turned: bool = False  # the parameter is a stack of the checkpoint's too, [experts, in, out]


def stacks_of(arch: ModelArch, modules: Collection[str]) -> list[Stack]:
    """Find the stacks of adapted modules (`lora.adapted_modules`) in a model of transformers' own class."""
    found: list[Stack] = []
    for one in arch.own:
        by_row: dict[int, dict[int, str]] = {}
        for first, module in _linears_in(one):
            if module in modules:
                expert, row = divmod(first, one.shape[1])
                by_row.setdefault(row, {})[expert] = module
        layer = one.name.rpartition(".")[0]
        for row, of_expert in by_row.items():
            names = tuple(of_expert[expert] for expert in range(one.shape[0]))
            found.append(Stack(f"{layer}.lora.{names[0].rpartition('.')[2]}", one.name, row, names, _is_stack(one.parts[0])))
    return found


def _linears_in(one: OwnParameter) -> Iterable[tuple[int, str]]:
    """Yield (first row, module) of the experts' matrices in a parameter, as `lora.tensors_to_adapt` names them."""
    for part in one.parts if len(one.shape) == 3 else ():
        if not _is_stack(part):
            yield part.row, part.hf.removesuffix(".weight")
            continue
        before, _, kind = part.hf.rpartition("experts.")
        for expert in range(part.shape[0]):
            yield expert * part.shape[1], f"{before}experts.{expert}.{kind}"


def _is_stack(part: Part) -> bool:
    return len(part.shape) == 3


def own_parameters(arch: ModelArch, value_head: bool = False) -> tuple[OwnParameter, ...]:
    """Parameters and constants of `arch.own`; a value model has its head in place of the output projection."""
    if not value_head:
        return arch.own
    shape = (arch.head_rows, arch.hidden_size)
    head = OwnParameter(VALUE_HEAD, shape, (Part(VALUE_HEAD, shape, 0),))
    return (*(one for one in arch.own if not one.of_head), head)


def layer_prefix(name: str) -> str:
    """Part of a parameter's name that only its layer, or block of a tower, has, such as `model.layers.3.`; empty outside them."""
    found = _LAYER.match(name)
    return found[0] if found else ""


def _own_piece_map(arch: ModelArch, layout: ParallelLayout, value_head: bool) -> PieceMap:
    assert layout.tp == 1, f"nothing says how tp cuts this {arch.family} model"
    by_layer: dict[str, list[OwnParameter]] = {"": []}
    for parameter in own_parameters(arch, value_head):
        prefix = layer_prefix(parameter.name)
        inside = all(part.hf.startswith(prefix) for part in parameter.parts)
        by_layer.setdefault(prefix if inside else "", []).append(parameter)
    kinds: dict[tuple[OwnParameter, ...], int] = {}
    templates: list[tuple[Held, ...]] = []
    sections = []
    ranks = layout.world_size
    for prefix, parameters in by_layer.items():
        kind = tuple(_without(parameter, len(prefix)) for parameter in parameters)
        if kind not in kinds:
            kinds[kind] = len(templates)
            pieces = {rank: [piece for one in kind for piece in _own_pieces(one, ranks, rank)] for rank in range(ranks)}
            templates.append(PieceMap.of(pieces).templates[0])
        sections.append(Section(prefix, prefix, kinds[kind], 0))
    return PieceMap(ranks, tuple(templates), tuple(sections))


def _without(parameter: OwnParameter, prefix: int) -> OwnParameter:
    parts = tuple(Part(part.hf[prefix:], part.shape, part.row) for part in parameter.parts)
    return replace(parameter, name=parameter.name[prefix:], parts=parts)


def _own_pieces(parameter: OwnParameter, ranks: int, rank: int) -> Iterable[Piece]:
    entries = parameter.shape[0]
    # Only the first rank holds constants.
    start, stop = rows_of_rank(entries, 1 if parameter.constant else ranks, rank)
    rows, cols = shape_as_2d(parameter.shape)
    each = rows // entries  # rows of an entry of the first dimension
    # Stacked experts are read one by one. A convolution has three dimensions too, over one row, or five: it is read as a whole.
    of_experts = len(parameter.shape) == 3 and each > 1
    return _cut(parameter, start * each, stop * each, cols, each if of_experts else rows)


def _cut(parameter: OwnParameter, first: int, last: int, cols: int, slot_rows: int) -> Iterable[Piece]:
    """Pieces within rows first..last - 1 of a parameter; none crosses a slot of its local tensor."""
    for part in parameter.parts:
        end = part.row + shape_as_2d(part.shape)[0]
        row = max(part.row, first)
        while row < min(end, last):
            slot, inside = divmod(row - first, slot_rows)
            stop = min(end, last, row + slot_rows - inside)
            yield Piece(part.hf, Box(row - part.row, stop - part.row, 0, cols), parameter.name, inside, 0, slot)
            row = stop
