"""Layers of one kind, found by the names and shapes of their tensors, so that one layer's places give those of all others. A layer
is everything with the same first number in its path."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megappo.bridge.destination import Fill
from megappo.models.pieces import Piece

_NUMBERED = re.compile(r"(.*?\.)(\d+)(\..*)")


def number_of(name: str) -> str:
    """Return the first number in a dotted name: "model.layers.7.mlp.experts.3.weight" -> "7"; "" if it has none."""
    parts = _NUMBERED.fullmatch(name)
    return "" if parts is None else parts[2]


def renumbered(name: str, number: str) -> str:
    """Return the same name in another layer; a name without a number stays."""
    return _NUMBERED.sub(rf"\g<1>{number}\g<3>", name)


def kinds_of_layers(facts: Iterable[tuple[str, Any]]) -> list[list[str]]:
    """Group layer numbers by kind, in the order of first appearance. facts: (name, what must be equal) of every tensor. Layers are
    of one kind if their facts are equal, in order, but for the number."""
    layers: dict[str, list[tuple[str, str, Any]]] = defaultdict(list)
    for name, fact in facts:
        parts = _NUMBERED.fullmatch(name)
        if parts is not None:
            layers[parts[2]].append((parts[1], parts[3], fact))
    kinds: dict[tuple, list[str]] = defaultdict(list)
    for number, held in layers.items():
        kinds[tuple(held)].append(number)
    return list(kinds.values())


class Samples:
    """Pieces and fills of the first and the last layer of each kind, and of everything outside layers. kinds: see
    `kinds_of_layers`."""

    def __init__(self, kinds: Sequence[Sequence[str]], pieces: Iterable[Piece], fills: Iterable[Fill]) -> None:
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        self._fills: dict[str, list[Fill]] = defaultdict(list)
        for piece in pieces:
            self._pieces[number_of(piece.hf)].append(piece)
        for fill in fills:
            self._fills[number_of(fill.target)].append(fill)
        self._kinds = kinds

    def agree(self) -> bool:
        """True if the last layer of every kind equals the first one renumbered, and no tensor of a layer lands outside it."""
        stay = all(number_of(piece.local) == number for number, pieces in self._pieces.items() for piece in pieces)
        return stay and all(self._in_layer(kind[0], kind[-1]) == self._own(kind[-1]) for kind in self._kinds)

    def expanded(self, names: Iterable[str]) -> tuple[tuple[Piece, ...], tuple[Fill, ...]]:
        """Return pieces and fills of all layers; pieces in the order of `names`, the tensors that they are cut from."""
        layers = {number: self._in_layer(kind[0], number) for kind in self._kinds for number in kind}
        layers[""] = self._own("")
        by_name: dict[str, list[Piece]] = defaultdict(list)
        for pieces, _ in layers.values():
            for piece in pieces:
                by_name[piece.hf].append(piece)
        fills = (fill for _, of_layer in layers.values() for fill in of_layer)
        return tuple(piece for name in names for piece in by_name[name]), tuple(fills)

    def _own(self, number: str) -> tuple[list[Piece], list[Fill]]:
        return self._pieces[number], self._fills[number]

    def _in_layer(self, known: str, number: str) -> tuple[list[Piece], list[Fill]]:
        pieces, fills = self._own(known)
        if number == known:
            return pieces, fills
        names = {name: renumbered(name, number) for piece in pieces for name in (piece.hf, piece.local)}
        return (
            [piece._replace(hf=names[piece.hf], local=names[piece.local]) for piece in pieces],
            [fill._replace(target=renumbered(fill.target, number)) for fill in fills],
        )


def sampled(names: Mapping[str, Any], kinds: Sequence[Sequence[str]]) -> list[str]:
    """Return the names in the first or last layer of a kind, or in no layer."""
    chosen = {"", *(number for kind in kinds for number in (kind[0], kind[-1]))}
    return [name for name in names if number_of(name) in chosen]
