"""Compares bit for bit the weights that several ranks hold copies of. Nothing else in training does: a flipped bit on one
data-parallel rank, or a norm that one tp rank updates differently, would make every later gradient wrong without an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.bridge.checksum import block_bytes, rectangle_sum
from megappo.engine.base import Engine
from megappo.models.pieces import Box, Piece, rectangle
from megappo.parallel.consensus import gathered, raised_by_all
from megappo.runtime.ending import ReplicaDrift
from megappo.runtime.messages import name_ranks, ranks_by_value

# Tensors named in the message.
MAX_NAMED = 4
_MIN = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Copies:
    """A rectangle of a Hugging Face tensor that is held more than once. mine: its places on this rank."""

    hf: str
    box: Box
    mine: tuple[Piece, ...]

    def __str__(self) -> str:
        return f"{self.hf} [{self.box.r0}:{self.box.r1}, {self.box.c0}:{self.box.c1}]"


class Replicas:
    """Copies of one engine's weights on its ranks, found once from `Engine.pieces`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        position = engine.placement.position_of(dist.get_rank())
        holders: dict[tuple[str, Box], int] = defaultdict(int)
        own: dict[tuple[str, Box], list[Piece]] = defaultdict(list)
        for pieces in (engine.pieces(), *(() if engine.adapters is None else (engine.adapters.pieces(),))):
            for hf, box, ranks in pieces.held():
                holders[hf, box] += ranks
            for piece in pieces.get(position, ()):
                own[piece.hf, piece.box].append(piece)
        self._copies = [Copies(*key, tuple(own.get(key, ()))) for key, count in holders.items() if count > 1]

    def differences(self) -> list[str]:
        """Return one line per rectangle whose copies differ, equal on all ranks of the engine. Collective over these, on the
        host."""
        with self._engine.eval_mode():
            kinds = {"": self._engine.named_parameters(), " (fp32 main parameter)": dict(self._engine.main_parameters())}
            return [line for kind, tensors in kinds.items() for line in self._compare(tensors, kind)]

    def _compare(self, tensors: Mapping[str, Tensor], kind: str) -> list[str]:
        digests = [[_digest(one, tensors[one.local].detach()) for one in c.mine if one.local in tensors] for c in self._copies]
        # Ranks without a copy do not count: the smallest number changes no maximum.
        extremes = torch.full((2, len(self._copies)), _MIN, dtype=torch.int64)
        for index, found in enumerate(digests):
            if found:
                extremes[0, index], extremes[1, index] = max(found), max(~digest for digest in found)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._engine.host_group)
        largest, smallest = extremes[0].tolist(), (~extremes[1]).tolist()
        # Nobody holds the main parameters of a frozen or a sharded model: both extremes are the initial value.
        differ = [index for index, (a, b) in enumerate(zip(largest, smallest)) if a != b and a != _MIN]
        if not differ:
            return []
        found = gathered({index: digests[index] for index in differ}, self._engine.host_group)
        by_rank = dict(zip(self._engine.placement.ranks, found))
        return [f"{self._copies[index]}{kind} {_odd_ones(index, by_rank)}" for index in differ]


def _digest(piece: Piece, tensor: Tensor) -> int:
    values = rectangle(tensor, piece.slot, piece.row, piece.col, piece.box.rows, piece.box.cols)
    return int(rectangle_sum(values, block_bytes(values.element_size(), [piece.box.cols])))


def _odd_ones(index: int, by_rank: Mapping[int, Mapping[int, list[int]]]) -> str:
    """Name the ranks whose copies differ from the most common one, or all ranks if two values are equally common."""
    values = {rank: tuple(found[index]) for rank, found in by_rank.items() if found[index]}
    groups = list(ranks_by_value(values).values())
    if len(groups) == 1:
        return f"differs between two places of {name_ranks(groups[0])}"
    if len(groups[-1]) == len(groups[-2]):
        return f"differs between {' and '.join(name_ranks(group) for group in groups)}"
    odd = sorted(rank for group in groups[:-1] for rank in group)
    return f"differs on {name_ranks(odd)} from {name_ranks(groups[-1])}"


class ReplicaCheck:
    """Compares the copies of the weights of all roles. engines: role -> engine on this rank, in the run's order."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._replicas = {role: Replicas(engine) for role, engine in engines.items()}

    def __call__(self) -> None:
        """ReplicaDrift on every rank if copies differ. Collective over the world. Roles are made resident one after the other;
        roles on different ranks run at the same time."""
        raised_by_all(self._compare_own, ReplicaDrift)

    def _compare_own(self) -> None:
        # Compare all roles before raising: a later role may include ranks that know of no difference and would wait.
        drifts = {role: found for role, replicas in self._replicas.items() if (found := replicas.differences())}
        for role, found in drifts.items():
            more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
            raise ReplicaDrift(f"copies of the {role}'s weights differ: {'; '.join(found[:MAX_NAMED])}{more}")
