"""Places of the rectangles of Hugging Face tensors in the parameters of a rank.

Import, export, the bridge and every engine share this description. A Piece is a 2-D box of an HF tensor and its place in a local
tensor; 1-D tensors are [n, 1]. `megatron_pieces` in `weight_map.py` makes those of a Megatron rank. Pure values, no Megatron, no
vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch


class Box(NamedTuple):
    """Rows r0..r1 and columns c0..c1 (half open) of a tensor viewed as 2-D."""

    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def rows(self) -> int:
        return self.r1 - self.r0

    @property
    def cols(self) -> int:
        return self.c1 - self.c0

    @property
    def area(self) -> int:
        return self.rows * self.cols

    def intersect(self, other: Box) -> Box | None:
        box = Box(max(self.r0, other.r0), min(self.r1, other.r1), max(self.c0, other.c0), min(self.c1, other.c1))
        return box if box.rows > 0 and box.cols > 0 else None


class Piece(NamedTuple):
    """`box` of HF tensor `hf` at (row, col) of local tensor `local`; `slot` is the leading index of a 3-D local tensor."""

    hf: str
    box: Box
    local: str
    row: int
    col: int
    slot: int = 0


RankPieces = Mapping[int, Sequence[Piece]]
"""Rank -> its pieces. Ranks that hold copies have equal pieces."""


def as_2d(tensor: torch.Tensor) -> torch.Tensor:
    """View [n] as [n, 1]; 2-D tensors stay."""
    return tensor.view(-1, 1) if tensor.dim() == 1 else tensor
