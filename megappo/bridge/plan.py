"""Static plan of a weight transfer: the rectangles to move from rank to rank.

Sources and destinations are pieces of Hugging Face tensors; the plan is the intersection of their boxes, with one sender chosen
among the replicas. A pure function of the two layouts, so every rank computes the same plan and only a digest is compared.
`transfer.py` executes it; `models/weight_map.py` and `vllm_layout.py` provide the pieces.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megappo.models.pieces import Box, Piece


class Move(NamedTuple):
    """A rectangle of `rows` x `cols` elements of HF tensor `hf`, from (s_row, s_col) of rank `src`'s tensor `source` to (d_row,
    d_col) of rank `dst`'s tensor `target`. `s_slot`, `d_slot`: leading index of 3-D tensors, else 0."""

    src: int
    dst: int
    hf: str
    source: str
    s_row: int
    s_col: int
    s_slot: int
    target: str
    d_row: int
    d_col: int
    d_slot: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols


Holders = dict[int, Piece]  # rank -> its piece of a box


def make_plan(
    sources: Mapping[int, Sequence[Piece]],
    destinations: Mapping[int, Sequence[Piece]],
    itemsize: int,
    ranks_per_node: int = 1,
) -> list[Move]:
    """Moves that fill every destination piece exactly once, ordered by destination rank and piece.

    sources, destinations: pieces per rank of one world. itemsize: bytes of an element on the wire; loads are balanced in bytes.
    ValueError, with the names, if the sources do not cover a destination piece exactly.
    """
    held = _holders(sources)
    sent: dict[int, int] = defaultdict(int)
    plan: list[Move] = []
    cut: dict[tuple[str, Box], list[tuple[Box, Holders]]] = {}  # replicas of the engine want the same boxes
    for dst in sorted(destinations):  # in one order, so that every rank balances the senders alike
        for piece in destinations[dst]:
            wanted = piece.hf, piece.box
            if wanted not in cut:
                cut[wanted] = _parts(piece, held.get(piece.hf, {}), f"{piece.hf} -> {piece.local} of rank {dst}")
            for box, holders in cut[wanted]:
                src = _choose(holders, dst, sent, ranks_per_node)
                if src != dst:  # a local copy costs the sender nothing
                    sent[src] += box.area * itemsize
                plan.append(_move(src, dst, box, holders[src], piece))
    return plan


def _parts(piece: Piece, held: Mapping[Box, Holders], what: str) -> list[tuple[Box, Holders]]:
    """Boxes that make up a destination piece, in order, each with its holders."""
    parts = [(box, holders) for source, holders in held.items() if (box := source.intersect(piece.box))]
    check_tiling(piece.box, [box for box, _ in parts], what)
    return sorted(parts, key=lambda part: part[0])


def _holders(sources: Mapping[int, Sequence[Piece]]) -> dict[str, dict[Box, Holders]]:
    """HF name -> box -> ranks that hold exactly this box. A rank that holds a box twice (tied tensors) counts once."""
    held: dict[str, dict[Box, Holders]] = defaultdict(dict)
    for rank in sorted(sources):
        for piece in sources[rank]:
            held[piece.hf].setdefault(piece.box, {}).setdefault(rank, piece)
    return held


def _choose(holders: Holders, dst: int, sent: Mapping[int, int], ranks_per_node: int) -> int:
    if dst in holders:  # no wire at all
        return dst
    # A rank of the same node, then the one that has sent least, then the lowest.
    node = dst // ranks_per_node
    return min(holders, key=lambda rank: (rank // ranks_per_node != node, sent.get(rank, 0), rank))


def _move(src: int, dst: int, box: Box, source: Piece, target: Piece) -> Move:
    return Move(
        src=src,
        dst=dst,
        hf=target.hf,
        source=source.local,
        # Offsets within the local tensors: the piece's place plus the box's offset in the piece.
        s_row=source.row + box.r0 - source.box.r0,
        s_col=source.col + box.c0 - source.box.c0,
        s_slot=source.slot,
        target=target.local,
        d_row=target.row + box.r0 - target.box.r0,
        d_col=target.col + box.c0 - target.box.c0,
        d_slot=target.slot,
        rows=box.rows,
        cols=box.cols,
    )


def check_tiling(whole: Box, parts: Sequence[Box], what: str) -> None:
    """ValueError unless the parts, all inside `whole`, cover it without overlap."""
    # Area and overlap together: parts inside `whole` without overlap and of the same area cover it.
    covered = sum(part.area for part in parts)
    if covered < whole.area:
        raise ValueError(f"{what}: {covered} of {whole.area} elements have a source")
    ordered = sorted(parts)
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if b.r0 >= a.r1:  # sorted by r0: no later box reaches back into a
                break
            if a.intersect(b):
                raise ValueError(f"{what}: {tuple(a)} and {tuple(b)} overlap")


def digest(plan: Iterable[Move]) -> str:
    """Short fingerprint of a plan; ranks that disagree on it must not exchange anything."""
    hasher = hashlib.sha256()
    for move in plan:
        hasher.update(repr(tuple(move)).encode())
    return hasher.hexdigest()[:16]  # 64 bits: only to notice ranks that computed different plans


def module_of(target: str) -> str:
    """Module path of a parameter: "model.norm.weight" -> "model.norm"."""
    return target.rpartition(".")[0]


def make_buckets(plan: Sequence[Move], module_order: Sequence[str], itemsize: int, cap_bytes: int) -> list[list[Move]]:
    """Cut the plan into rounds, in the destination's order of modules; together they hold every move once.

    No rank sends or receives more than `cap_bytes` over the wire in one round, unless a single module is larger.
    """
    position = {name: i for i, name in enumerate(module_order)}
    # By module, so that each is complete, and leaves loader format, as early as possible.
    by_module: dict[int, list[Move]] = defaultdict(list)
    for move in plan:
        by_module[position[module_of(move.target)]].append(move)
    buckets: list[list[Move]] = []
    current: list[Move] = []
    load: dict[tuple[str, int], int] = defaultdict(int)
    for index in sorted(by_module):
        extra = _wire_load(by_module[index], itemsize)
        if current and any(load[key] + n > cap_bytes for key, n in extra.items()):
            buckets.append(current)
            current, load = [], defaultdict(int)
        current.extend(by_module[index])
        for key, n in extra.items():
            load[key] += n
    return buckets + [current] if current else buckets


def _wire_load(moves: Iterable[Move], itemsize: int) -> dict[tuple[str, int], int]:
    """Bytes that each rank sends ("out", rank) and receives ("in", rank) over the wire."""
    load: dict[tuple[str, int], int] = defaultdict(int)
    for move in moves:
        if move.src != move.dst:
            load["out", move.src] += move.numel * itemsize
            load["in", move.dst] += move.numel * itemsize
    return load
