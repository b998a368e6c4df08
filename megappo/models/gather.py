"""Assembly of the sharded tensors of a model, one at a time, on one rank of its role, for exports."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megappo.models.lora import Weights, part_of
from megappo.models.pieces import Piece, as_2d
from megappo.parallel.consensus import raised_by_all
from megappo.parallel.groups import ProcessGroups


def on_all_ranks(step: Callable[[], None], groups: ProcessGroups) -> None:
    """Run a step; if it fails on one rank of the role, every rank raises, so none waits. ValueError or OSError. Collective."""

    def named() -> None:
        try:
            step()
        except (OSError, SafetensorError) as error:
            raise OSError(f"export on rank {dist.get_rank()}: {error}") from error

    raised_by_all(named, ValueError, OSError, group=groups.host)


class Gather:
    """Assemble Hugging Face tensors, one after the other, on one rank: position `root`, or the first of this stage.
    parameters: of this rank. pieces: of the positions that hold the tensors: the root's stage or, with a `root`, all."""

    def __init__(
        self,
        parameters: Weights,
        pieces: Mapping[int, Sequence[Piece]],
        shapes: Mapping[str, tuple[int, ...]],
        groups: ProcessGroups,
        root: int | None = None,
    ) -> None:
        self.rank = groups.position
        self.root = groups.layout.rank_of(pp=groups.coordinates.pp) if root is None else root
        self.parameters, self.host, self.shapes = parameters, groups.host, shapes
        self.pieces: dict[int, dict[str, list[Piece]]] = {rank: defaultdict(list) for rank in sorted(pieces)}
        for rank, held in pieces.items():
            for piece in held:
                self.pieces[rank][piece.hf].append(piece)

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    def __call__(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Return the whole tensor on the root's host, None on other ranks. All ranks with pieces call it in the same order."""
        shape, covered = self.shapes[name], 0
        whole = torch.empty(shape, dtype=dtype) if self.is_root else None
        given: set[tuple[int, int, int, int]] = set()
        for rank, by_name in self.pieces.items():
            pieces = [piece for piece in by_name.get(name, []) if piece.box not in given]
            if not pieces:
                continue  # no part of this tensor, or only copies of an earlier rank's
            given.update(piece.box for piece in pieces)
            sizes = [piece.box.area for piece in pieces]
            covered += sum(sizes)
            values = None
            if rank == self.rank:
                values = torch.cat([self._take(piece).to(dtype).flatten() for piece in pieces]).cpu()
                if not self.is_root:
                    # In the host's group, which waits longer than an exchange on the device: the root may be writing a file.
                    dist.send(values, group=self.host, group_dst=self.root)
            elif self.is_root:
                values = torch.empty(sum(sizes), dtype=dtype)
                dist.recv(values, group=self.host, group_src=rank)
            if whole is not None:
                assert values is not None
                for piece, part in zip(pieces, values.split(sizes)):
                    box = piece.box
                    as_2d(whole)[box.r0 : box.r1, box.c0 : box.c1] = part.view(box.rows, box.cols)
        assert covered == math.prod(shape), f"{name}: pieces cover {covered} of {math.prod(shape)} elements"
        return whole

    def _take(self, piece: Piece) -> Tensor:
        box = piece.box
        return part_of(self.parameters[piece.local], piece.slot, piece.row, piece.col, box.rows, box.cols)
