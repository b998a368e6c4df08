"""Brings the policy's weights into the rollout engine, version by version.

Ties the parts together: pieces -> plan (once) -> transfer -> verification -> engine. Every method is collective over the group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.bridge.destination import Destination, WeightReceiver
from megappo.bridge.plan import Move, digest, make_buckets, make_plan
from megappo.bridge.transfer import Round, transfer
from megappo.bridge.verify import ChecksumRound, agree
from megappo.models.arch import ModelArch
from megappo.models.pieces import RankPieces
from megappo.models.weight_map import hf_tensors

# Of one rank, round and direction. Two rounds are in memory, each packed and received: at most 1 GiB beside the model.
BUCKET_BYTES = 256 << 20


class WeightSource(Protocol):
    """The policy, as far as the bridge needs it: every `engine.base.Engine` is one."""

    @property
    def arch(self) -> ModelArch: ...

    def named_parameters(self) -> Mapping[str, Tensor]:
        """This rank's parameters."""
        ...

    def pieces(self) -> RankPieces:
        """Rank -> the Hugging Face rectangles in its parameters, the same on every rank."""
        ...


class BridgedEngine(Protocol):
    """The rollout engine, as far as the bridge needs it."""

    receiver: WeightReceiver
    device: torch.device

    def weights_changing(self) -> None:
        """The weights are undefined from here on."""

    def weights_changed(self, version: int) -> None:
        """The weights are those of `version`: forget everything computed with older ones."""


class WeightSync:
    """Pushes the weights of `policy` into `engine`.

    group: the ranks that `policy.pieces()` counts, in order (default: the world). The plan is built here; raises ValueError when
    it cannot be and RuntimeError when the ranks disagree on it.
    """

    def __init__(
        self,
        policy: WeightSource,
        engine: BridgedEngine,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._group = group
        self._rank = dist.get_rank(group)
        self._world = dist.get_world_size(group)
        pieces, tensors = policy.pieces(), hf_tensors(policy.arch)
        assert len(pieces) == self._world, f"a policy of {len(pieces)} ranks on a group of {self._world}"
        self._destinations = self._gather(engine.receiver.describe(tensors))
        self._check_all_used(tensors)
        plan = self._agreed_plan(pieces)
        destination = self._destinations[self._rank]
        buckets = make_buckets(plan, destination.modules, destination.dtype.itemsize, bucket_bytes)
        self._rounds = [Round.of(bucket, self._rank, self._world) for bucket in buckets]
        self._incoming = [move for move in plan if move.dst == self._rank]
        self._outgoing = [move for move in plan if move.src == self._rank]

    def _gather(self, mine: Destination) -> dict[int, Destination]:
        gathered: list[Destination | None] = [None] * self._world
        dist.all_gather_object(gathered, mine, group=self._group)
        destinations = {rank: destination for rank, destination in enumerate(gathered) if destination is not None}
        first = destinations[0]
        for rank, destination in destinations.items():
            if (destination.modules, destination.dtype) != (first.modules, first.dtype):
                raise RuntimeError(f"rank {rank}'s engine holds other modules or another dtype than rank 0's")
        return destinations

    def _check_all_used(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        used = {piece.hf for destination in self._destinations.values() for piece in destination.pieces}
        unused = [name for name in tensors if name not in used]
        if unused:
            raise ValueError(f"the engine's model has no place for {unused[0]} of the policy ({len(unused)} such tensors)")

    def _agreed_plan(self, sources: RankPieces) -> list[Move]:
        destinations = {rank: destination.pieces for rank, destination in self._destinations.items()}
        itemsize = self._destinations[self._rank].dtype.itemsize
        plan = make_plan(sources, destinations, itemsize, self._ranks_per_node())
        fingerprints: list[str | None] = [None] * self._world
        dist.all_gather_object(fingerprints, digest(plan), group=self._group)
        if len(set(fingerprints)) > 1:
            raise RuntimeError(f"the ranks computed different weight transfer plans: {dict(enumerate(fingerprints))}")
        return plan

    def _ranks_per_node(self) -> int:
        """Of the launcher; the smallest over all ranks, so that every rank plans alike."""
        mine = torch.tensor(int(os.environ.get("LOCAL_WORLD_SIZE", self._world)), device=self._engine.device)
        dist.all_reduce(mine, op=dist.ReduceOp.MIN, group=self._group)
        return int(mine)

    def push(self, version: int, verify: bool = True) -> dict[str, float]:
        """Bring the present weights into the engine as `version`. verify: compare checksums of every engine parameter.

        Returns bytes_sent, bytes_received and bytes_local of this rank, seconds, verified (0 or 1) and version. Raises
        RuntimeError on all ranks, naming rank and tensor, when a parameter is missing here or arrived different; the engine
        then refuses to work.
        """
        started = time.perf_counter()
        tensors = self._policy.named_parameters()  # asked anew: offloaded, reallocated or re-cast since the last push
        # Before the engine's weights become undefined: after a refused push it still has the old ones.
        self._raise_together(version, self._source_problems(tensors))
        destination = self._destinations[self._rank]
        self._engine.weights_changing()
        checksums = ChecksumRound(self._destinations, self._rank) if verify else None
        if checksums is not None:
            checksums.add_moves(self._outgoing, tensors, destination.dtype)
        with self._engine.receiver.session(self._incoming, checksums.inspect if checksums else None) as land:
            traffic = transfer(self._rounds, tensors, land, destination.dtype, self._engine.device, self._group)
        if checksums is not None:
            self._raise_together(version, checksums.mismatches(self._engine.device, self._group))
        self._engine.weights_changed(version)
        return {
            "bytes_sent": float(traffic.sent),
            "bytes_received": float(traffic.received),
            "bytes_local": float(traffic.local),
            "seconds": time.perf_counter() - started,
            "verified": float(verify),
            "version": float(version),
        }

    def _raise_together(self, version: int, problems: Sequence[str]) -> None:
        """Collective: every rank raises when one has a problem."""
        everywhere = agree(problems, self._group)
        if everywhere:
            more = f" (and {len(everywhere) - 1} more)" if len(everywhere) > 1 else ""
            raise RuntimeError(f"push of weights {version}: {everywhere[0]}{more}")

    def _source_problems(self, tensors: Mapping[str, Tensor]) -> list[str]:
        problems = []
        for move in self._outgoing:
            tensor = tensors.get(move.source)
            if tensor is None:
                problems.append(f"rank {self._rank} has no parameter {move.source} (for {move.hf})")
                continue
            rows, cols = (*tensor.shape[-2:], 1)[:2] if tensor.dim() > 1 else (tensor.shape[0], 1)
            if move.s_row + move.rows > rows or move.s_col + move.cols > cols:
                shape = tuple(tensor.shape)
                problems.append(f"rank {self._rank}: {move.source} of shape {shape} is too small for its part of {move.hf}")
        return problems
