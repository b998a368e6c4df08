"""Parts of adapters (`lora.py`) on the ranks of a layout, from the weight rules of the family. Pure arithmetic.

An adapter is cut as the weight of its module: B has the rows and A the columns of a rank's rectangle. The adapters of one matrix
of a rank's experts are one A [experts, rank, columns] and one B [experts, rows, rank].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megappo.models.arch import ModelArch
from megappo.models.int8_linear import most_blocks, num_blocks
from megappo.models.lora import ADAPTER_A, ADAPTER_B, expert_of, of_expert
from megappo.models.pieces import Box, Held, Piece, PieceMap, Section
from megappo.models.row_shards import layer_prefix
from megappo.models.weight_map import expert_linears, hf_cuts, hf_layer, layer_rules, rank_experts
from megappo.models.weight_rules import Cut, Rule
from megappo.parallel.layout import Coordinates, ParallelLayout

Modules = Mapping[str, tuple[int, int]]
"""Adapted modules of a model: Hugging Face name -> (out, in), of `lora.adapted_modules`."""


@dataclass(frozen=True)
class AdaptedLinear:
    """One local weight of a layer on a tp rank with at least one adapted module. Modules have Hugging Face names."""

    local: str  # name of the weight in its layer
    rows: tuple[tuple[str, int], ...]  # (module, adapted or not; its rows) in the order of the weight's rows
    boxes: Mapping[str, tuple[Box, ...]]  # adapted module -> blocks of rows of its own weight, in the order in which they are held
    dim: int | None
    """Dimension of the weight that tp cuts: 1 if the linear is row-parallel; None if every rank has it whole."""


def adapted_linears(arch: ModelArch, tp: int, tp_rank: int, layer: int, modules: Modules) -> Iterator[AdaptedLinear]:
    """Yield the adapted weights of a layer without those of experts. layer: global number, from 0."""
    return _adapted(arch, layer_rules(arch, layer), tp, tp_rank, layer, modules)


def adapted_experts(arch: ModelArch, etp: int, etp_rank: int, layer: int, modules: Modules) -> Iterator[AdaptedLinear]:
    """Yield the adapted weights of expert 0 of a layer, which are those of the others under other numbers."""
    rules = expert_linears(arch) if arch.kind(layer).sparse else ()
    return _adapted(arch, rules, etp, etp_rank, layer, modules)


def _adapted(
    arch: ModelArch, rules: Iterable[Rule], ranks: int, index: int, layer: int, modules: Modules
) -> Iterator[AdaptedLinear]:
    for rule in rules:
        boxes: dict[str, tuple[Box, ...]] = {}
        rows: list[tuple[str, int]] = []
        for tensor, box, _, _ in rule.parts(arch, ranks, index):
            module = hf_layer(layer) + tensor.removesuffix(".weight")
            rows.append((module, box.rows))
            if module in modules:
                # A module's blocks of rows lie among those of others; in its own weight most follow each other.
                *before, last = boxes.get(module, (box._replace(r1=box.r0),))
                boxes[module] = (*before, last._replace(r1=box.r1)) if last.r1 == box.r0 else (*before, last, box)
        if boxes:
            yield AdaptedLinear(rule.local, tuple(rows), boxes, rule.cut.dim)


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


def adapter_numel(arch: ModelArch, layout: ParallelLayout, stage: int, modules: Modules, rank: int) -> tuple[int, int]:
    """Count the numbers in the adapters of one rank of a pipeline stage: (beside experts, of experts). rank: of A and B."""

    def count(linears: Iterable[AdaptedLinear]) -> int:
        return sum(rank * (num_rows(boxes) + boxes[0].cols) for linear in linears for boxes in linear.boxes.values())

    layers = list(layout.stage_layers(arch.num_layers, stage))
    beside = sum(count(adapted_linears(arch, layout.tp, 0, layer, modules)) for layer in layers)
    of_one = sum(count(adapted_experts(arch, layout.etp, 0, layer, modules)) for layer in layers)
    return beside, of_one and of_one * len(rank_experts(arch, layout.ep, 0))


def int8_linears(arch: ModelArch, layout: ParallelLayout, stage: int, modules: Modules) -> list[tuple[int, int]]:
    """(numbers, scales) of every weight of a stage in 8 bits, on the tp rank with most. modules: those in 8 bits."""
    found = []
    for layer in layout.stage_layers(arch.num_layers, stage):
        for linear in adapted_linears(arch, layout.tp, 0, layer, modules):
            rows, columns = sum(map(num_rows, linear.boxes.values())), next(iter(linear.boxes.values()))[0].cols
            blocks = most_blocks(columns * layout.tp, layout.tp) if linear.dim == 1 else num_blocks(columns)
            found.append((rows * columns, rows * blocks))
    return found


def adapter_piece_map(arch: ModelArch, layout: ParallelLayout, modules: Modules, rank: int) -> PieceMap:
    """Rectangles of the adapters' tensors on every rank of the layout; parameters have the tensors' names, those of experts without
    the number of one."""
    stage = [layout.coordinates(position) for position in range(layout.ranks_per_stage)]  # every stage is laid out alike
    templates: list[tuple[Held, ...]] = [()]
    sections = [Section("", "", 0, 0)]
    kinds: dict[tuple[str, ...], int] = {}  # adapted modules of a layer, without its prefix -> template
    stage_of = {layer: pp for pp in range(layout.pp) for layer in layout.stage_layers(arch.num_layers, pp)}
    in_layers: dict[str, list[str]] = {}
    for name in modules:
        in_layers.setdefault(layer_prefix(name), []).append(name)
    for layer in range(arch.num_layers):
        prefix = hf_layer(layer)
        kind = tuple(name.removeprefix(prefix) for name in in_layers.get(prefix, ()))
        if kind not in kinds:
            kinds[kind] = len(templates)
            templates.append(_template(arch, layout, stage, layer, modules, rank))
        sections.append(Section(prefix, prefix, kinds[kind], stage_of[layer] * layout.ranks_per_stage))
    return PieceMap(layout.world_size, tuple(templates), tuple(sections))


def _template(
    arch: ModelArch, layout: ParallelLayout, stage: list[Coordinates], layer: int, modules: Modules, rank: int
) -> tuple[Held, ...]:
    prefix, holders = hf_layer(layer), dict[Piece, list[int]]()

    def hold(module: str, local: str, boxes: tuple[Box, ...], slot: int, positions: list[int]) -> None:
        parts, row = [(ADAPTER_A, Box(0, rank, boxes[0].c0, boxes[0].c1), 0)], 0
        for box in boxes:
            parts.append((ADAPTER_B, Box(box.r0, box.r1, 0, rank), row))
            row += box.rows
        for tensor, part, first in parts:
            piece = Piece(module.removeprefix(prefix) + tensor, part, local.removeprefix(prefix) + tensor, first, 0, slot)
            holders.setdefault(piece, []).extend(positions)

    for tp_rank in range(layout.tp):
        positions = [position for position, at in enumerate(stage) if at.tp == tp_rank]
        for linear in adapted_linears(arch, layout.tp, tp_rank, layer, modules):
            for module, boxes in linear.boxes.items():
                hold(module, module, boxes, 0, positions)
    for etp_rank in range(layout.etp):
        for linear in adapted_experts(arch, layout.etp, etp_rank, layer, modules):
            for module, boxes in linear.boxes.items():
                stack = stack_of(module)
                for ep in range(layout.ep):
                    positions = [position for position, at in enumerate(stage) if (at.ep, at.etp) == (ep, etp_rank)]
                    for slot, expert in enumerate(rank_experts(arch, layout.ep, ep)):
                        hold(of_expert(stack, expert), stack, boxes, slot, positions)
    return tuple(Held(piece, tuple(sorted(positions))) for piece, positions in holders.items())


def num_rows(boxes: Iterable[Box]) -> int:
    return sum(box.rows for box in boxes)


def stack_of(module: str) -> str:
    """Name of an expert's module without the number of the expert."""
    place = expert_of(module)
    assert place is not None, f"{module} is not of an expert"
    return place[0]
