"""Layout of the engine's ranks as templates, small enough to send to every rank: replicas are laid out alike, so tp descriptions
serve them all, and each kind of layer is held once. 30 to 60 KB for one tp rank of 128 to 256 experts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist

from megappo.bridge.checksum import block_bytes
from megappo.bridge.destination import Destination, Shape
from megappo.bridge.wire import Wire
from megappo.models.pieces import Box, Held, Piece, PieceMap, Section

# In the engine's names it stands for the part that numbers the layer, "layers.7.".
_LAYER = "<layer>"


class Parameter(NamedTuple):
    """An engine's parameter as a template names it. block: bytes that a checksum adds up at once, see `checksum.py`."""

    name: str
    shape: Shape
    dtype: torch.dtype
    block: int


class Target(NamedTuple):
    """Destination of one engine tp rank. sections: template number of every section of the policy's `PieceMap`."""

    templates: tuple[tuple[Piece, ...], ...]
    parameters: tuple[Mapping[str, Parameter], ...]  # of every template, by the pieces' local name
    sections: tuple[int, ...]

    @classmethod
    def of(cls, destination: Destination, pieces: PieceMap) -> Target:
        """Describe `destination` by the sections of the policy."""
        fills: dict[str, list[Box]] = defaultdict(list)
        for fill in destination.fills:
            fills[fill.target].append(fill.box)
        kinds: dict[tuple, int] = {}
        parameters: list[dict[str, Parameter]] = []
        sections: list[int] = []
        owner: dict[str, Section] = {}
        for section, held in zip(pieces.sections, _by_section(destination.pieces, pieces)):
            names: dict[str, str] = {}  # generic -> whole
            known: dict[str, str] = {}
            for name in dict.fromkeys(piece.local for piece in held):
                known[name] = _generic(name, section)
                names[known[name]] = name
                assert owner.setdefault(name, section) is section, f"{name} holds tensors of {owner[name].hf} and {section.hf}"
            skip = len(section.hf)
            template = tuple(p._replace(hf=p.hf[skip:], local=known[p.local]) for p in held)
            # Layers of equal pieces with other sources, shapes, types or constants are of different kinds.
            facts = tuple(
                (destination.shapes[name], destination.dtype_of(name), tuple(fills.get(name, ()))) for name in names.values()
            )
            kind = section.template, template, facts
            if kind not in kinds:
                kinds[kind] = len(kinds)
                columns = _cut_columns(template, pieces.templates[section.template])
                for generic, (shape, _, boxes) in zip(names, facts):
                    columns[generic].update((shape.cols, *(col for box in boxes for col in (box.c0, box.c1))))
                parameters.append(
                    {
                        generic: Parameter(generic, shape, dtype, block_bytes(dtype.itemsize, columns[generic]))
                        for generic, (shape, dtype, _) in zip(names, facts)
                    }
                )
            sections.append(kinds[kind])
        return cls(tuple(template for _, template, _ in kinds), tuple(parameters), tuple(sections))

    def encode(self) -> bytes:
        templates = [[tuple(piece) for piece in template] for template in self.templates]
        parameters = [[(name, shape, str(dtype), block) for name, shape, dtype, block in one.values()] for one in self.parameters]
        return json.dumps([templates, parameters, self.sections], separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Target:
        templates, parameters, sections = json.loads(data)
        return cls(
            tuple(tuple(Piece(hf, Box(*box), *rest) for hf, box, *rest in template) for template in templates),
            tuple(
                {
                    name: Parameter(name, Shape(*shape), getattr(torch, dtype.removeprefix("torch.")), block)
                    for name, shape, dtype, block in one
                }
                for one in parameters
            ),
            tuple(sections),
        )


def whole_name(name: str, section: Section) -> str:
    """Return the engine's name of a parameter of this section."""
    return name.replace(_LAYER, _number(section), 1)


def _generic(name: str, section: Section) -> str:
    number = _number(section)
    return name.replace(number, _LAYER, 1) if number else name


def _number(section: Section) -> str:
    return section.hf.partition(".")[2]  # "model.layers.7." -> "layers.7."


def _by_section(wanted: Sequence[Piece], pieces: PieceMap) -> list[list[Piece]]:
    index = {section.hf: number for number, section in enumerate(pieces.sections)}
    depth = max(section.hf.count(".") for section in pieces.sections)
    sections: list[list[Piece]] = [[] for _ in pieces.sections]
    for piece in wanted:
        parts = piece.hf.split(".", depth)
        sections[index.get(".".join((*parts[:depth], "")), 0)].append(piece)
    return sections


def _cut_columns(template: Sequence[Piece], sources: Sequence[Held]) -> dict[str, set[int]]:
    """Map each parameter to the columns at which a rectangle that moves into it may begin or end."""
    boxes: dict[str, set[Box]] = defaultdict(set)
    for piece, _ in sources:
        boxes[piece.hf].add(piece.box)
    columns: dict[str, set[int]] = defaultdict(set)
    for piece in template:
        places = (piece.place_of(part) for box in boxes[piece.hf] if (part := box.intersect(piece.box)))
        columns[piece.local].update(col for place in (piece.place_of(piece.box), *places) for col in (place.c0, place.c1))
    return columns


def exchange_targets(
    mine: Target | None, tp_rank: int, in_first_replica: bool, tp: int, wire: Wire
) -> tuple[tuple[Target, ...], str | None]:
    """Return the targets of all tp ranks, as the first replica describes them, and what is wrong with this rank's own. Collective.
    mine: None on a rank without engine; its tp_rank and in_first_replica are then ignored."""
    data = b"" if mine is None else mine.encode()
    speaks = mine is not None and in_first_replica
    sizes = wire.reduce([len(data) if speaks and one == tp_rank else 0 for one in range(tp)], dist.ReduceOp.SUM)
    ends = list(accumulate(sizes, initial=0))
    told = torch.zeros(ends[-1], dtype=torch.uint8)
    if speaks:
        told[ends[tp_rank] : ends[tp_rank + 1]] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    told = told.to(wire.device)
    dist.all_reduce(told, group=wire.group)  # each byte comes from one rank, the others add 0
    parts = [told[start:end].cpu().numpy().tobytes() for start, end in zip(ends, ends[1:])]
    problem = None
    if mine is not None and data != parts[tp_rank]:
        problem = "the engine's parameters are laid out unlike those of the same tp rank in the first replica"
    return tuple(Target.decode(part) for part in parts), problem
