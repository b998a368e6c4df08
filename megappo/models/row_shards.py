"""Rectangles of Hugging Face tensors on the ranks of a model that FSDP2 shards, by rows, beside a tensor-parallel cut.

tp cuts first, columns or rows, as the family's rules say; the rows that are left are cut over all ranks of the same tp coordinate
(dp x cp). Both cuts are torch.chunk's, which DTensor and FSDP2 take: ceil(rows / ranks) rows for each rank, fewer or none for the
last. The names of the parameters are the tensors' own. Pure values, as `pieces.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from megappo.models.arch import ModelArch
from megappo.models.pieces import Box, Piece, PieceMap, Section
from megappo.models.weight_map import hf_cuts, hf_layer, hf_tensors
from megappo.models.weight_rules import Cut
from megappo.parallel.layout import ParallelLayout


def rows_of_rank(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Half-open range of the rows that a rank holds; empty at the end if there are fewer than ranks."""
    step = -(-rows // ranks)
    return min(rows, rank * step), min(rows, (rank + 1) * step)


def shard_box(shape: tuple[int, ...], cut: Cut, layout: ParallelLayout, position: int) -> Box | None:
    """Rectangle of a tensor at a position of a layout without pipeline; None if there are fewer rows than ranks."""
    at = layout.coordinates(position)
    ranges = [(0, shape[0]), (0, (*shape, 1)[1])]
    if cut.dim is not None:
        ranges[cut.dim] = rows_of_rank(ranges[cut.dim][1], layout.tp, at.tp)
    (first, end), columns = ranges
    start, stop = rows_of_rank(end - first, layout.dp * layout.cp, at.cp + layout.cp * at.dp)
    return Box(first + start, first + stop, *columns) if stop > start else None


def shard_piece_map(arch: ModelArch, layout: ParallelLayout, value_head: bool = False) -> PieceMap:
    """Rectangles of every position, from one template for all layers. For a model without experts."""
    assert arch.moe is None, "experts are one parameter in transformers, and many tensors in its checkpoints"
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


def plain_piece_map(shapes: Mapping[str, tuple[int, ...]], layout: ParallelLayout) -> PieceMap:
    """Rectangles of every position of tensors that tp does not cut, listed one by one."""
    cuts = dict.fromkeys(shapes, Cut(None))
    return PieceMap.of({at: _pieces(shapes, cuts, layout, at, "") for at in range(layout.world_size)})


def _pieces(
    shapes: Mapping[str, tuple[int, ...]], cuts: Mapping[str, Cut], layout: ParallelLayout, position: int, prefix: str
) -> list[Piece]:
    """prefix: what the template leaves out of the names."""
    found = []
    for whole_name, shape in shapes.items():
        name, box = whole_name.removeprefix(prefix), shard_box(shape, cuts[whole_name], layout, position)
        if box is not None:
            found.append(Piece(name, box, name, 0, 0))
    return found
