"""A move: one rectangle on its way from a policy rank's parameter into an engine rank's."""

from __future__ import annotations

from typing import NamedTuple


class Move(NamedTuple):
    """A rectangle of `rows` x `cols` elements of HF tensor `hf`, from (s_row, s_col) of rank `src`'s tensor `source` to (d_row,
    d_col) of rank `dst`'s tensor `target`. s_slot, d_slot: leading index of 3-D tensors, else 0."""

    step: int
    """Place in the order of all moves; moves of one step belong to tensors that different ranks hold."""
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


def module_of(target: str) -> str:
    """Return a parameter's module path: "model.norm.weight" -> "model.norm"."""
    return target.rpartition(".")[0]
