"""Brings the policy's weights into the rollout engine, version by version: pieces and targets -> plan of this rank (once) ->
transfer -> verification -> engine. Every method is collective over the group."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.bridge.destination import Destination, Inspect, Land, Move, Shape, WeightReceiver
from megappo.bridge.plan import Ends, RankPlan, plan_rank
from megappo.bridge.target import Target, exchange_targets
from megappo.bridge.transfer import agree_rounds, disagreements, transfer
from megappo.bridge.verify import Checksums
from megappo.bridge.wire import Wire
from megappo.models.arch import ModelArch
from megappo.models.lora import Weights
from megappo.models.pieces import PieceMap
from megappo.models.weight_map import hf_tensors

# Per rank, round and direction. Two rounds are in memory, each packed and received: at most 1 GiB beside the model.
BUCKET_BYTES = 256 << 20
DIFFERENT = "the ranks computed different weight transfer plans: "


class WeightSource(Protocol):
    """Policy as the bridge sees it; every `engine.base.Engine` has it."""

    @property
    def arch(self) -> ModelArch: ...

    def merged_parameters(self) -> Weights:
        """Return this rank's parameters by the names of `pieces`, with adapters (`models.lora.Adapted`). Collective over the
        policy."""
        ...

    def pieces(self) -> PieceMap:
        """Return the Hugging Face rectangles in the parameters of every position of the policy, equal on every rank."""
        ...


@dataclass(frozen=True)
class OtherWeights:
    """A policy as the source of other weights than its own: its frozen base alone, or its average."""

    policy: WeightSource
    merged_parameters: Callable[[], Weights]

    @property
    def arch(self) -> ModelArch:
        return self.policy.arch

    def pieces(self) -> PieceMap:
        return self.policy.pieces()


class BridgedEngine(Protocol):
    """Rollout engine as the bridge sees it."""

    @property
    def receiver(self) -> WeightReceiver: ...

    def weights_changing(self) -> None:
        """Note that the weights are undefined from here on."""

    def weights_changed(self, version: int) -> None:
        """Note that the weights are those of `version`, and forget everything computed with older ones."""


@dataclass(frozen=True)
class Route:
    """The ranks at both ends of a transfer, the same value on every rank. A rank may be at both ends, at one or at none. arch,
    pieces: of the policy. sources: world rank of each of its positions. destinations: world ranks of the engine, replica after
    replica of engine_tp ranks."""

    arch: ModelArch
    pieces: PieceMap
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    engine_tp: int

    def digest(self) -> int:
        """Hash everything that the plans depend on to 62 bits; equal on ranks that were given the same ends."""
        facts = repr((self.pieces, self.sources, self.destinations, self.engine_tp))
        return int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=8).digest(), "little") >> 2

    def __post_init__(self) -> None:
        assert len(self.pieces) == len(self.sources), f"a policy of {len(self.pieces)} ranks on {len(self.sources)}"
        assert len(self.destinations) % self.engine_tp == 0, f"{len(self.destinations)} ranks for engines of tp {self.engine_tp}"

    @classmethod
    def colocated(cls, policy: WeightSource, engine_tp: int) -> Route:
        """Put all ranks of the world at both ends."""
        world = tuple(range(dist.get_world_size()))
        return cls(policy.arch, policy.pieces(), world, world, engine_tp)


class WeightSync:
    """Pushes the weights of `policy` into `engine`; plans once, at construction. policy, engine: None on a rank that is not among
    the sources or the destinations. device: of the buffers. group: holds the ranks of both ends, in any order (default: the world).
    ValueError if no plan exists and RuntimeError if the ranks disagree on it, both on every rank."""

    def __init__(
        self,
        policy: WeightSource | None,
        engine: BridgedEngine | None,
        route: Route,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._policy, self._engine, self._route, self._bucket_bytes = policy, engine, route, bucket_bytes
        self._wire = Wire(device, group)
        assert (policy is not None) == (self._wire.rank in route.sources), "a rank has a policy if and only if it is a source"
        assert (engine is not None) == (self._wire.rank in route.destinations), "an engine belongs to every destination"
        with collections_paused():
            self._check_route(route)
            destination = self._describe(route)
            ends = self._agreed_ends(route, destination)
            plan = self._agreed_plan(ends)
            self._rounds = agree_rounds(plan, bucket_bytes, self._wire)
            self._incoming = plan.incoming
            self._extents = _extents([*plan.outgoing, *(move for move in plan.incoming if move.src == self._wire.rank)])
            self._checksums = Checksums(ends, plan, destination, self._wire)

    def rerouted(self, destinations: tuple[int, ...]) -> WeightSync:
        """Return a transfer to these ranks instead, in the world of now. Collective over it."""
        route = replace(self._route, destinations=destinations)
        return WeightSync(self._policy, self._engine, route, self._wire.device, bucket_bytes=self._bucket_bytes)

    def _check_route(self, route: Route) -> None:
        rank, first = self._wire.rank, self._wire.peers[0]
        mine = route.digest()
        (theirs,) = self._wire.reduce([mine if rank == first else 0], dist.ReduceOp.SUM)
        lines = [] if mine == theirs else [f"rank {rank} was given another policy layout or other ranks than rank {first}"]
        self._raise_together(lines, DIFFERENT)

    def _describe(self, route: Route) -> Destination | None:
        """Describe this rank's end of the engine. ValueError on every rank if one engine cannot be described."""
        destination, problems = None, []
        if self._engine is not None:
            try:
                destination = self._engine.receiver.describe(hf_tensors(route.arch))
            except ValueError as error:  # raised below, when the ranks without an engine know
                problems.append(str(error))
        self._raise_together(problems, error=ValueError)
        return destination

    def _agreed_ends(self, route: Route, destination: Destination | None) -> Ends:
        replica, tp_rank = (0, 0) if destination is None else divmod(route.destinations.index(self._wire.rank), route.engine_tp)
        mine = None if destination is None else Target.of(destination, route.pieces)
        targets, problem = exchange_targets(mine, tp_rank, replica == 0, route.engine_tp, self._wire)
        lines = [f"rank {self._wire.rank}: {problem}"] if problem else []
        self._raise_together(lines, DIFFERENT)
        ends = Ends(route.pieces, route.sources, route.destinations, targets, self._ranks_per_node())
        unused = ends.unused()  # a pure function of what all ranks know: they raise together
        if unused:
            raise ValueError(f"the engine's model has no place for {unused[0]} of the policy ({len(unused)} such tensors)")
        return ends

    def _agreed_plan(self, ends: Ends) -> RankPlan:
        plan, problems = None, []
        try:
            plan = plan_rank(ends, self._wire.rank)
        except ValueError as error:
            problems.append(str(error))
        self._raise_together(problems, error=ValueError)
        assert plan is not None
        self._raise_together(disagreements(plan, self._wire), DIFFERENT)
        return plan

    def _ranks_per_node(self) -> int:
        # The smallest over all ranks, so that every rank plans alike
        mine = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        return self._wire.reduce([mine], dist.ReduceOp.MIN)[0]

    def push(self, version: int, verify: bool = True) -> dict[str, float]:
        """Bring the present weights into the engine as `version`. verify: False only to measure what the checksums cost. Returns
        bytes_sent, bytes_received and bytes_local of this rank, seconds, verified (0 or 1) and version. RuntimeError on all ranks,
        naming rank and tensor, if a parameter is missing or arrived different; the engine then refuses to work."""
        started = time.perf_counter()
        tensors: Weights = {}
        if self._policy is not None:
            tensors = self._policy.merged_parameters()  # asked anew: offloaded, reallocated or re-cast since the last push
        # Before the engine's weights become undefined: after a refused push it still has the old ones.
        self._raise_together(self._source_problems(tensors), f"push of weights {version}: ")
        if self._engine is not None:
            self._engine.weights_changing()
        sums = self._checksums.read_sources(tensors) if verify else None
        with self._session(self._checksums.inspect if verify else None) as land:
            traffic = transfer(self._rounds, tensors, land, self._wire)
        if sums is not None:
            self._raise_together(self._checksums.mismatches(sums), f"push of weights {version}: ")
        if self._engine is not None:
            self._engine.weights_changed(version)
        return {
            "bytes_sent": float(traffic.sent),
            "bytes_received": float(traffic.received),
            "bytes_local": float(traffic.local),
            "seconds": time.perf_counter() - started,
            "verified": float(verify),
            "version": float(version),
        }

    def _session(self, inspect: Inspect | None) -> AbstractContextManager[Land]:
        if self._engine is None:
            return contextlib.nullcontext(_no_engine)
        return self._engine.receiver.session(self._incoming, inspect)

    def _raise_together(self, lines: Sequence[str], what: str = "", error: type[Exception] = RuntimeError) -> None:
        """Raise on every rank, with the first line, if any rank has lines; behind `what` also their number. Collective."""
        everywhere = self._wire.gather_lines(lines)
        if everywhere:
            more = f" (and {len(everywhere) - 1} more)" if what and len(everywhere) > 1 else ""
            raise error(f"{what}{everywhere[0]}{more}")

    def _source_problems(self, tensors: Weights) -> list[str]:
        rank, problems = self._wire.rank, []
        for source, (rows, cols, hf) in self._extents.items():
            tensor = tensors.get(source)
            if tensor is None:
                problems.append(f"rank {rank} has no parameter {source} (for {hf})")
                continue
            _, have_rows, have_cols = Shape.of(tensor.shape)
            if rows > have_rows or cols > have_cols:
                problems.append(f"rank {rank}: {source} of shape {tuple(tensor.shape)} is too small for its part of {hf}")
        return problems


def _extents(moves: Sequence[Move]) -> dict[str, tuple[int, int, str]]:
    """Map each parameter of this rank to the rows and columns needed of it and the tensor that needs the last one."""
    extents: dict[str, tuple[int, int, str]] = {}
    for move in moves:
        rows, cols, hf = extents.get(move.source, (0, 0, move.hf))
        last_row, last_col = move.s_row + move.source_size[0], move.s_col + move.source_size[1]
        if last_row > rows or last_col > cols:
            extents[move.source] = max(rows, last_row), max(cols, last_col), move.hf
    return extents


def _no_engine(move: Move, values: Tensor) -> None:
    raise AssertionError(f"{move.target} arrived on a rank without an engine")


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """Context without garbage collection of cycles; reference counting goes on."""
    # A plan is some 100,000 lasting tuples without cycles: else half its time goes into visiting them and all of vLLM's objects.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:  # not where the caller, or an outer context, has paused it
            gc.enable()
