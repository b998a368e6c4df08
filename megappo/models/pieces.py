"""Places of the rectangles of Hugging Face tensors in the parameters of a rank; import, export, bridge and engines share them.

A Piece is a 2-D box of an HF tensor and its place in a local tensor. 1-D tensors count as [n, 1]; those of three dimensions are
matrices, one below the other. Pure values, no Megatron, no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a configuration is refused without loading torch
    from torch import Tensor


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
    """`box` of HF tensor `hf` at (row, col) of local tensor `local`; `slot` is the leading index of a 3-D local tensor. turned: the
    local tensor holds the box transposed."""

    hf: str
    box: Box
    local: str
    row: int
    col: int
    slot: int = 0
    turned: bool = False

    def place_of(self, box: Box) -> Box:
        """Return where a part of this piece's box lies in its slot of the local tensor."""
        r0, c0, rows, cols = box.r0 - self.box.r0, box.c0 - self.box.c0, box.rows, box.cols
        if self.turned:
            r0, c0, rows, cols = c0, r0, cols, rows
        return Box(self.row + r0, self.row + r0 + rows, self.col + c0, self.col + c0 + cols)


def check_tiling(whole: Box, parts: Sequence[Box], what: str) -> None:
    """Raise ValueError unless the parts, all inside `whole`, cover it without overlap."""
    # Parts inside `whole` cover it if they have its area and do not overlap.
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


class Held(NamedTuple):
    """A piece and the positions that hold it, in ascending order."""

    piece: Piece
    positions: tuple[int, ...]


class Section(NamedTuple):
    """A layer, or all tensors outside the layers, as an instance of a template."""

    hf: str  # prefix of the Hugging Face names in the template; empty outside the layers
    local: str  # prefix of the local names
    template: int
    first: int  # the template's positions count from here, so a layer looks alike on every pipeline stage


@dataclass(frozen=True)
class PieceMap(Mapping[int, Sequence[Piece]]):
    """Pieces of every position of a role. As a mapping: position -> its pieces, with whole names.
    Each kind of layer is described once, so the size does not grow with the number of layers. sections[0] is outside the layers;
    the layers follow by number."""

    num_positions: int
    templates: tuple[tuple[Held, ...], ...]
    sections: tuple[Section, ...]

    @classmethod
    def of(cls, pieces: Mapping[int, Iterable[Piece]]) -> PieceMap:
        """Make the map of pieces listed position by position, as one template."""
        positions: dict[Piece, list[int]] = {}
        for position in sorted(pieces):
            for piece in pieces[position]:
                positions.setdefault(piece, []).append(position)
        template = tuple(Held(piece, tuple(at)) for piece, at in positions.items())
        return cls(len(pieces), (template,), (Section("", "", 0, 0),))

    def __len__(self) -> int:
        return self.num_positions

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_positions))

    def __getitem__(self, position: int) -> list[Piece]:
        if position not in range(self.num_positions):
            raise KeyError(position)
        return [
            piece._replace(hf=section.hf + piece.hf, local=section.local + piece.local)
            for section in self.sections
            for piece, positions in self.templates[section.template]
            if position - section.first in positions
        ]

    def held(self) -> Iterator[tuple[str, Box, int]]:
        """Yield (Hugging Face name, box, number of positions that hold it) of every piece; a box appears once for each place."""
        for section in self.sections:
            for piece, positions in self.templates[section.template]:
                yield section.hf + piece.hf, piece.box, len(positions)


def sizes_of(pieces: PieceMap) -> dict[str, tuple[int, int]]:
    """Hugging Face name -> (rows, columns) of the 2-D tensors that these pieces cover."""
    sizes: dict[str, tuple[int, int]] = {}
    for name, box, _ in pieces.held():
        rows, cols = sizes.get(name, (0, 0))
        sizes[name] = max(rows, box.r1), max(cols, box.c1)
    return sizes


def rectangle(tensor: Tensor, slot: int, row: int, col: int, rows: int, cols: int) -> Tensor:
    """View [rows, cols] of a 1-D, 2-D or 3-D tensor; [n, 1, k], the kernels of a depthwise convolution, is one matrix."""
    matrix = tensor[slot] if tensor.dim() == 3 and tensor.size(1) > 1 else as_2d(tensor)
    return matrix[row : row + rows, col : col + cols]


def as_2d(tensor: Tensor) -> Tensor:
    """View [n] as [n, 1] and [..., m, n] as [... * m, n]; 2-D tensors stay."""
    return tensor if tensor.dim() == 2 else tensor.view(-1, 1 if tensor.dim() == 1 else tensor.size(-1))


def shape_as_2d(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[0], 1) if len(shape) == 1 else (prod(shape[:-1]), shape[-1])
