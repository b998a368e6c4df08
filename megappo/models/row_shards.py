"""Rows of Hugging Face tensors on the ranks of a model that is sharded over its data-parallel ranks by the first dimension.

The cut is torch.chunk's, which FSDP2 takes: ceil(rows / ranks) rows for each rank, fewer or none for the last. The names of the
parameters are the tensors' own. Pure values, as `pieces.py`.
"""

from __future__ import annotations

from megappo.models.arch import ModelArch
from megappo.models.pieces import Box, Piece, PieceMap, Section
from megappo.models.weight_map import hf_layer, hf_tensors


def rows_of_rank(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Half-open range of the rows that a rank holds; empty at the end if there are fewer than ranks."""
    step = -(-rows // ranks)
    return min(rows, rank * step), min(rows, (rank + 1) * step)


def row_piece_map(arch: ModelArch, ranks: int, value_head: bool = False) -> PieceMap:
    """Rectangles of every rank, from one template for all layers. For a model without experts."""
    assert arch.moe is None, "experts are one parameter in transformers, and many tensors in its checkpoints"
    first = hf_layer(0)
    shapes = hf_tensors(arch, value_head)
    layer = {name.removeprefix(first): shape for name, shape in shapes.items() if name.startswith(first)}
    prefixes = tuple(map(hf_layer, range(arch.num_layers)))
    others = {name: shape for name, shape in shapes.items() if not name.startswith(prefixes)}
    templates = tuple(
        PieceMap.of({rank: _pieces(tensors, ranks, rank) for rank in range(ranks)}).templates[0] for tensors in (others, layer)
    )
    layers = (Section(hf_layer(number), hf_layer(number), 1, 0) for number in range(arch.num_layers))
    return PieceMap(ranks, templates, (Section("", "", 0, 0), *layers))


def _pieces(shapes: dict[str, tuple[int, ...]], ranks: int, rank: int) -> list[Piece]:
    found = []
    for name, shape in shapes.items():
        start, stop = rows_of_rank(shape[0], ranks, rank)
        if stop > start:
            found.append(Piece(name, Box(start, stop, 0, (*shape, 1)[1]), name, 0, 0))
    return found
