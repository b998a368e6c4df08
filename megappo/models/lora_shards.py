"""Parts of adapters (`lora.py`) on the ranks of a layout, from the weight rules of the family. Pure arithmetic.

An adapter is cut as the weight of its module: B has the rows and A the columns of a rank's rectangle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megappo.models.arch import ModelArch
from megappo.models.int8_linear import most_blocks, num_blocks
from megappo.models.lora import ADAPTER_A, ADAPTER_B
from megappo.models.pieces import Box, Held, Piece, PieceMap, Section
from megappo.models.weight_map import hf_cuts, hf_layer, layer_rules
from megappo.models.weight_rules import Cut, RowParallel
from megappo.parallel.layout import ParallelLayout

Modules = Mapping[str, tuple[int, int]]
"""Adapted modules of a model: Hugging Face name -> (out, in), of `lora.adapted_modules`."""


@dataclass(frozen=True)
class AdaptedLinear:
    """One local weight of a layer on a tp rank with at least one adapted module. Modules have Hugging Face names."""

    local: str  # name of the weight in its layer
    rows: tuple[tuple[str, int], ...]  # (module, adapted or not; its rows) in the order of the weight's rows
    boxes: Mapping[str, Box]  # adapted module -> rectangle of the module's own weight
    row_parallel: bool


def adapted_linears(arch: ModelArch, tp: int, tp_rank: int, layer: int, modules: Modules) -> Iterator[AdaptedLinear]:
    """Yield the adapted weights of a layer. layer: global number, from 0. Experts have no adapters."""
    for rule in layer_rules(arch, layer):
        boxes: dict[str, Box] = {}
        rows: list[tuple[str, int]] = []
        for tensor, box, _, _ in rule.parts(arch, tp, tp_rank):
            module = hf_layer(layer) + tensor.removesuffix(".weight")
            rows.append((module, box.rows))
            if module in modules:
                # A module's blocks of rows lie among those of others; in its own weight they follow each other.
                boxes[module] = boxes[module]._replace(r1=box.r1) if module in boxes else box
        if boxes:
            yield AdaptedLinear(rule.local, tuple(rows), boxes, isinstance(rule, RowParallel))


def adapter_cuts(arch: ModelArch, modules: Iterable[str]) -> dict[str, Cut]:
    """Cut over tp of every adapter tensor: B by the rows of the module's weight, or A by its columns; the other one is copied."""
    cuts, found = hf_cuts(arch), {}
    for module in modules:
        dim = cuts[f"{module}.weight"].dim
        found[module + ADAPTER_A] = Cut(1 if dim == 1 else None)
        found[module + ADAPTER_B] = Cut(0 if dim == 0 else None)
    return found


def check_stages(arch: ModelArch, layout: ParallelLayout, modules: Modules) -> None:
    """Raise ValueError if a model chunk of a pipeline stage has no adapter, and so nothing to train."""
    for stage in range(layout.pp):
        for chunk in range(layout.vpp):
            layers = layout.chunk_layers(arch.num_layers, stage, chunk)
            if not any(name.startswith(hf_layer(layer)) for layer in layers for name in modules):
                which = f"layer {layers.start}" if len(layers) == 1 else f"layers {layers.start} to {layers.stop - 1}"
                what = f"pipeline stage {stage}" + (f", chunk {chunk}" if layout.vpp > 1 else "")
                raise ValueError(f"adapts no layer of {what} ({which}), which must train some; name one there, or lower pp")


def adapter_numel(arch: ModelArch, layout: ParallelLayout, stage: int, modules: Modules, rank: int) -> int:
    """Count the numbers in the adapters of one rank of a pipeline stage. rank: of A and B."""
    linears = (
        linear
        for layer in layout.stage_layers(arch.num_layers, stage)
        for linear in adapted_linears(arch, layout.tp, 0, layer, modules)
    )
    return sum(rank * (box.rows + box.cols) for linear in linears for box in linear.boxes.values())


def int8_linears(arch: ModelArch, layout: ParallelLayout, stage: int, modules: Modules) -> list[tuple[int, int]]:
    """(numbers, scales) of every weight of a stage in 8 bits, on the tp rank with most. modules: those in 8 bits."""
    found = []
    for layer in layout.stage_layers(arch.num_layers, stage):
        for linear in adapted_linears(arch, layout.tp, 0, layer, modules):
            rows, columns = sum(box.rows for box in linear.boxes.values()), next(iter(linear.boxes.values())).cols
            blocks = most_blocks(columns * layout.tp, layout.tp) if linear.row_parallel else num_blocks(columns)
            found.append((rows * columns, rows * blocks))
    return found


def adapter_piece_map(arch: ModelArch, layout: ParallelLayout, modules: Modules, rank: int) -> PieceMap:
    """Rectangles of the adapters' tensors on every rank of the layout; parameters have the tensors' names."""
    stage = [layout.coordinates(position).tp for position in range(layout.ranks_per_stage)]  # every stage is laid out alike
    templates: list[tuple[Held, ...]] = [()]
    sections = [Section("", "", 0, 0)]
    kinds: dict[tuple[str, ...], int] = {}  # adapted modules of a layer, without its prefix -> template
    stage_of = {layer: pp for pp in range(layout.pp) for layer in layout.stage_layers(arch.num_layers, pp)}
    for layer in range(arch.num_layers):
        prefix = hf_layer(layer)
        kind = tuple(name.removeprefix(prefix) for name in modules if name.startswith(prefix))
        if kind not in kinds:
            kinds[kind] = len(templates)
            templates.append(_template(arch, layout.tp, stage, layer, modules, rank))
        sections.append(Section(prefix, prefix, kinds[kind], stage_of[layer] * layout.ranks_per_stage))
    return PieceMap(layout.world_size, tuple(templates), tuple(sections))


def _template(arch: ModelArch, tp: int, stage: list[int], layer: int, modules: Modules, rank: int) -> tuple[Held, ...]:
    holders: dict[Piece, list[int]] = {}
    for tp_rank in range(tp):
        positions = [position for position, its_rank in enumerate(stage) if its_rank == tp_rank]
        for linear in adapted_linears(arch, tp, tp_rank, layer, modules):
            for module, box in linear.boxes.items():
                name = module.removeprefix(hf_layer(layer))
                for tensor, part in ((ADAPTER_A, Box(0, rank, box.c0, box.c1)), (ADAPTER_B, Box(box.r0, box.r1, 0, rank))):
                    holders.setdefault(Piece(name + tensor, part, name + tensor, 0, 0), []).extend(positions)
    return tuple(Held(piece, tuple(sorted(positions))) for piece, positions in holders.items())
