"""Plan of a weight transfer for one rank: the rectangles that it sends and receives.

A move is the intersection of a source piece and a destination piece of a Hugging Face tensor, sent by one of the piece's holders.
Every rank knows both layouts as templates (`models/pieces.py`, `target.py`), and the sender is a pure function of move and
destination, so both ends plan a move without talking; `RankPlan.sent` and `received` prove that they agree.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import lcm
from operator import attrgetter
from typing import NamedTuple

import torch

from megappo.bridge.destination import Move
from megappo.bridge.target import Parameter, Target, whole_name
from megappo.models.pieces import Box, Held, Piece, PieceMap, Section, check_tiling

_MASK = (1 << 64) - 1
# An odd multiplier (of splitmix64), so that the hash in `_Plan._prove` depends on the order of moves.
_ODD = 0x9E3779B97F4A7C15
# Bytes of engine modules that one phase of a push may hold in loader format, beside their live parameters.
OPEN_BYTES = 2 << 30


@dataclass(frozen=True)
class Ends:
    """Both ends of a transfer, equal on every rank."""

    pieces: PieceMap
    sources: tuple[int, ...]
    """World rank of each of the policy's positions, which `pieces` describes."""
    destinations: tuple[int, ...]
    """World ranks of the engine, replica after replica of tp neighbours."""
    targets: tuple[Target, ...]
    """One per tp rank."""
    ranks_per_node: int = 1
    """Neighbouring world ranks that share a node."""

    @property
    def replicas(self) -> int:
        return len(self.destinations) // len(self.targets)

    def parameters(self, tp_rank: int) -> dict[str, Parameter]:
        """Return the parameters of an engine tp rank that receive anything, by their whole names."""
        target = self.targets[tp_rank]
        return {
            whole_name(name, section): parameter
            for section, template in zip(self.pieces.sections, target.sections)
            for name, parameter in target.parameters[template].items()
        }

    def unused(self) -> list[str]:
        """Return Hugging Face names of the policy's tensors that no engine rank takes, in order."""
        missing: dict[tuple[int, ...], list[str]] = {}
        unused = []
        for number, section in enumerate(self.pieces.sections):
            kind = section.template, *(target.sections[number] for target in self.targets)
            if kind not in missing:
                taken = {piece.hf for target in self.targets for piece in target.templates[target.sections[number]]}
                held = dict.fromkeys(piece.hf for piece, _ in self.pieces.templates[section.template])
                missing[kind] = [name for name in held if name not in taken]
            unused += [section.hf + name for name in missing[kind]]
        return unused


class RankPlan(NamedTuple):
    """Moves of one rank, by step. `incoming` holds its moves to itself, `outgoing` does not. steps: of the whole transfer. sent[d]
    of rank s equals received[s] of rank d if and only if both planned the same moves in the same order (64-bit hashes)."""

    incoming: list[Move]
    outgoing: list[Move]
    steps: int
    sent: Mapping[int, int]
    received: Mapping[int, int]


def plan_rank(ends: Ends, rank: int) -> RankPlan:
    """Plan the moves that `rank` takes part in; every destination piece is filled exactly once. ValueError, with the names, if the
    sources do not cover a destination piece of this rank exactly."""
    plan = _Plan(ends, rank)
    if rank in ends.destinations:
        plan.receive(ends.destinations.index(rank))
    if rank in ends.sources:
        plan.send(ends.sources.index(rank))
    # Stable: moves of a step keep the order in which both ends find them.
    plan.incoming.sort(key=attrgetter("step"))
    plan.outgoing.sort(key=attrgetter("step"))
    return RankPlan(plan.incoming, plan.outgoing, plan.order.steps, plan.sent, plan.received)


class _Source:
    """A box of a policy template and its holders: several `Held` if ranks keep it in different places (tied tensors). group: number
    of its set of positions, shared by all boxes that the same positions hold."""

    def __init__(self, held: Sequence[Held], groups: dict[tuple[int, ...], int]) -> None:
        self.box, self.held = held[0].piece.box, held
        self.positions = held[0].positions if len(held) == 1 else tuple(sorted({at for one in held for at in one.positions}))
        self.group = groups.setdefault(self.positions, len(groups))

    def piece_of(self, position: int) -> Piece:
        if len(self.held) == 1:
            return self.held[0].piece
        return next(piece for piece, positions in self.held if position in positions)


_Boxes = Mapping[str, Sequence[_Source]]  # of a template, by Hugging Face name


class _Cut(NamedTuple):
    """One move of a template. turn: shifts the choice of the sender. step: within the section. mark: hash of all that its moves
    depend on."""

    box: Box
    source: _Source
    target: Piece
    dtype: torch.dtype
    turn: int
    step: int
    mark: int


class _Holders:
    """Ranks that hold a box in one section, and the choice of the sender for every destination."""

    def __init__(self, ranks: tuple[int, ...], ends: Ends) -> None:
        self._ranks, self._ends = ranks, ends
        self._tp, self._replicas = len(ends.targets), ends.replicas  # asked for with every move
        self._set = frozenset(ranks)
        self._near: dict[int, tuple[int, ...]] = {}
        self._fed: dict[tuple[int, int], tuple[int, ...]] = {}

    def _candidates(self, dst: int) -> tuple[int, ...]:
        # The destination itself needs no wire; next come holders on its node, then all.
        return (dst,) if dst in self._set else self._on_node(dst) or self._ranks

    def _on_node(self, dst: int) -> tuple[int, ...]:
        size = self._ends.ranks_per_node
        node = dst // size
        if node not in self._near:
            self._near[node] = tuple(rank for rank in self._ranks if rank // size == node)
        return self._near[node]

    def sender(self, turn: int, position: int) -> int:
        candidates = self._candidates(self._ends.destinations[position])
        # Neighbouring replicas, then neighbouring tp ranks, ask different holders.
        replica, tp_rank = divmod(position, self._tp)
        return candidates[(turn + tp_rank * self._replicas + replica) % len(candidates)]

    def fed_by(self, rank: int, turn: int, tp_rank: int) -> tuple[int, ...]:
        """Return the destinations of this tp rank, other than `rank`, that `rank` sends to."""
        period = lcm(len(self._ranks), len(self._on_node(rank)) or 1)
        # Without the rank: an object is always asked about the same one
        key = tp_rank, turn % period
        if key not in self._fed:
            positions = range(tp_rank, len(self._ends.destinations), self._tp)
            fed = (self._ends.destinations[one] for one in positions if self.sender(turn, one) == rank)
            self._fed[key] = tuple(dst for dst in fed if dst != rank)
        return self._fed[key]


class _Order(NamedTuple):
    """Order of a push: sections with the step that each begins at, and the number of steps."""

    begins: list[tuple[int, int]]  # (section, first step)
    steps: int

    @classmethod
    def of(cls, ends: Ends, lengths: Sequence[int]) -> _Order:
        """Order the sections. lengths: steps of every template of the policy."""
        layers = [
            sum(piece.box.area * parameters[piece.local].dtype.itemsize for piece in template)
            for target in ends.targets
            for template, parameters in zip(target.templates, target.parameters)
        ]
        at_once = max(1, OPEN_BYTES // max(1, *layers))
        # Sections of different pipeline stages share steps, so that all stages send at once, as long as the open modules fit
        # OPEN_BYTES.
        stages: dict[int, list[int]] = defaultdict(list)
        for number, section in enumerate(ends.pieces.sections[1:], start=1):
            stages[section.first].append(number)
        phases = [[0]]
        for across in zip_longest(*stages.values()):  # the first layer of every stage, then the second
            layer = [number for number in across if number is not None]
            phases += [layer[at : at + at_once] for at in range(0, len(layer), at_once)]
        begins, step = [], 0
        for phase in phases:
            begins += [(number, step) for number in phase]
            step += max(lengths[ends.pieces.sections[number].template] for number in phase)
        return cls(begins, step)


class _Plan:
    def __init__(self, ends: Ends, rank: int) -> None:
        self.ends, self.rank = ends, rank
        self.incoming: list[Move] = []
        self.outgoing: list[Move] = []
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self._groups: dict[tuple[int, ...], int] = {}
        self._boxes = [_by_tensor(template, self._groups) for template in ends.pieces.templates]
        self._steps = [_steps(boxes) for boxes in self._boxes]
        self.order = _Order.of(ends, [1 + max(steps.values(), default=-1) for steps in self._steps])
        self._members = list(self._groups)
        self._holders: dict[tuple[int, int], _Holders] = {}
        self._position = {source: position for position, source in enumerate(ends.sources)}

    def receive(self, position: int) -> None:
        target = self.ends.targets[position % len(self.ends.targets)]
        known: dict[tuple[int, int], list[_Cut]] = {}
        for number, begin in self.order.begins:
            section = self.ends.pieces.sections[number]
            kind = section.template, target.sections[number]
            if kind not in known:
                known[kind] = list(self._cuts(self._boxes[kind[0]], kind[0], target, kind[1]))
                self._check(target.templates[kind[1]], known[kind], section)
            for cut in known[kind]:
                src = self._holding(cut, section).sender(cut.turn + number, position)
                self.incoming += self._moves(cut, section, begin, src, (self.rank,))
                if src != self.rank:
                    self._prove(self.received, src, cut.mark, number, begin)

    def send(self, position: int) -> None:
        own: dict[tuple[int, int], _Boxes] = {}
        known: dict[tuple[int, int, int, int], list[_Cut]] = {}
        for number, begin in self.order.begins:
            section = self.ends.pieces.sections[number]
            here = section.template, position - section.first
            if here not in own:
                own[here] = _held_at(self._boxes[section.template], here[1])
            for tp_rank, target in enumerate(self.ends.targets if own[here] else ()):
                key = (*here, tp_rank, target.sections[number])
                if key not in known:
                    known[key] = list(self._cuts(own[here], section.template, target, key[3]))
                for cut in known[key]:
                    fed = self._holding(cut, section).fed_by(self.rank, cut.turn + number, tp_rank)
                    self.outgoing += self._moves(cut, section, begin, self.rank, fed)
                    for dst in fed:
                        self._prove(self.sent, dst, cut.mark, number, begin)

    def _cuts(self, boxes: _Boxes, template: int, target: Target, wanted: int) -> Iterator[_Cut]:
        """Yield the moves from these boxes in the order of the pieces of template `wanted` of a target; within a piece by box."""
        for turn, piece in enumerate(target.templates[wanted]):
            if piece.hf not in boxes:  # a sender holds few of all experts
                continue
            parts = [(box, one) for one in boxes[piece.hf] if (box := one.box.intersect(piece.box))]
            for box, source in sorted(parts, key=lambda part: part[0]):
                step = self._steps[template][piece.hf]
                dtype = target.parameters[wanted][piece.local].dtype
                facts = box, [held.piece for held in source.held], piece, dtype, turn, step
                mark = int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little")
                yield _Cut(box, source, piece, dtype, turn, step, mark)

    def _check(self, wanted: Sequence[Piece], cuts: Sequence[_Cut], section: Section) -> None:
        # check_tiling raises ValueError unless the cuts fill each wanted piece exactly
        parts: dict[int, list[Box]] = defaultdict(list)
        for cut in cuts:
            parts[cut.turn].append(cut.box)
        for turn, piece in enumerate(wanted):
            local = whole_name(piece.local, section)
            check_tiling(piece.box, parts[turn], f"{section.hf}{piece.hf} -> {local} of rank {self.rank}")

    def _holding(self, cut: _Cut, section: Section) -> _Holders:
        key = cut.source.group, section.first
        if key not in self._holders:
            ranks = tuple(self.ends.sources[section.first + at] for at in self._members[cut.source.group])
            self._holders[key] = _Holders(ranks, self.ends)
        return self._holders[key]

    def _moves(self, cut: _Cut, section: Section, begin: int, src: int, dsts: Sequence[int]) -> list[Move]:
        if not dsts:
            return []
        box, target = cut.box, cut.target
        source = cut.source.piece_of(self._position[src] - section.first)
        hf, local, engine = section.hf + target.hf, section.local + source.local, whole_name(target.local, section)
        origin, place = source.place_of(box), target.place_of(box)
        there, here = (hf, local, origin.r0, origin.c0, source.slot), (engine, place.r0, place.c0, target.slot)
        how = place.rows, place.cols, cut.dtype, source.turned != target.turned
        return [Move(begin + cut.step, src, dst, *there, *here, *how) for dst in dsts]

    @staticmethod
    def _prove(proofs: dict[int, int], peer: int, mark: int, section: int, begin: int) -> None:
        """Add a move to the hash of a pair of ranks; both ends find a pair's moves in the same order."""
        proofs[peer] = (proofs.get(peer, 0) * _ODD + (mark ^ (section << 32 | begin))) & _MASK


def _by_tensor(template: Sequence[Held], groups: dict[tuple[int, ...], int]) -> _Boxes:
    same: dict[str, dict[Box, list[Held]]] = defaultdict(dict)
    for held in template:
        same[held.piece.hf].setdefault(held.piece.box, []).append(held)
    return {hf: [_Source(held, groups) for held in boxes.values()] for hf, boxes in same.items()}


def _held_at(boxes: _Boxes, position: int) -> _Boxes:
    held = {hf: [one for one in of_tensor if position in one.positions] for hf, of_tensor in boxes.items()}
    return {hf: of_tensor for hf, of_tensor in held.items() if of_tensor}


def _steps(boxes: _Boxes) -> dict[str, int]:
    # Tensors of the same holders follow each other, those of different holders share a step: all ep ranks send an expert at once.
    last: dict[tuple[int, ...], int] = defaultdict(lambda: -1)
    steps = {}
    for hf, of_tensor in boxes.items():
        holders = tuple(one.group for one in of_tensor)
        last[holders] += 1
        steps[hf] = last[holders]
    return steps
