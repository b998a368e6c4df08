"""Chooses and builds the rollout engine that the configuration names."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from megappo.bridge.adapter_sync import AdapterSync, sync_of
from megappo.bridge.sync import Route, WeightSync
from megappo.config.schema import TrainConfig
from megappo.data.images import ImageStore
from megappo.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megappo.engine.base import Engine
from megappo.models.arch import ModelArch
from megappo.models.lora import shapes_beside_base
from megappo.models.pieces import PieceMap
from megappo.models.row_shards import shard_piece_map
from megappo.models.weight_map import piece_map
from megappo.parallel.device import DTYPES
from megappo.parallel.layout import ParallelLayout, Placement, placement_of
from megappo.rollout.megatron_engine import MegatronRollout
from megappo.rollout.subworld import prepare_rollout_world
from megappo.rollout.types import Replica, Request, Response, RolloutEngine, SamplingParams
from megappo.rollout.vllm_options import VllmModel


class RolloutElsewhere:
    """Stand-in for an engine that lives on other ranks (see `rollout.types.RolloutEngine`). sync: None if no weights are pushed."""

    replica: Replica | None = None

    def __init__(self, name: str, sync: WeightSync | AdapterSync | None) -> None:
        self.name = name
        self._sync = sync

    def push_weights(self, version: int) -> dict[str, float]:
        """Send this rank's part of the policy. Collective over the world."""
        return {} if self._sync is None else self._sync.push(version)

    def sleep(self) -> None:
        """Do nothing: the engine's memory is on other ranks."""

    def close(self) -> None:
        """Do nothing: the engine's resources are on other ranks."""

    def meet(self, before: str) -> NoReturn:
        self._refuse()

    def serving(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @property
    def num_unfinished(self) -> int:
        return 0

    @property
    def num_running(self) -> int:
        return self.num_unfinished

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self._refuse()

    def poll(self) -> list[Response]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError(f"no {self.name} engine lives on this rank")


class PolicyPlace(NamedTuple):
    """Layout of the policy and the world ranks that it lives on."""

    arch: ModelArch
    layout: ParallelLayout
    placement: Placement
    engine: Literal["megatron", "fsdp2"] = "megatron"

    def pieces(self) -> PieceMap:
        """Return what `Engine.pieces` returns, also on ranks without the policy."""
        if self.engine == "fsdp2":
            return shard_piece_map(self.arch, self.layout)
        return piece_map(self.arch, self.layout)


class Again(NamedTuple):
    """A replica that was lost, and whose ranks are a world of their own since. replicas, world_size: of the run."""

    replica: int
    replicas: int
    world_size: int


def build_rollout(
    config: TrainConfig,
    policy: Engine | None,
    *,
    tokenizer: Tokenizer,
    max_sequence_tokens: int,
    device: torch.device,
    place: PolicyPlace | None = None,
    images: ImageStore | None = None,
    again: Again | None = None,
) -> RolloutEngine:
    """Build the engine of `rollout.engine` on `rollout.ranks` and connect it to the policy. Collective over the world.

    config: its sections `rollout`, `policy` and `run` are read. policy: None on ranks that it does not live on.
    max_sequence_tokens: longest prompt plus response. place: of the policy; None if policy and engine live on all ranks. images:
    that prompts name. again: if this replica alone is the world; the first `VllmEngine.reroute` connects it. ValueError if vLLM is
    missing.
    """
    settings, run, rollout = config.policy, config.run, config.rollout
    if rollout.engine == "megatron":
        if policy is None:  # it samples where the policy is
            return RolloutElsewhere("megatron", None)
        return MegatronRollout(policy, tokenizer.decode, logits_dtype=settings.logits_dtype, timeouts=run.timeouts)
    route, subworld, dtype = None, None, DTYPES[settings.dtype if rollout.dtype == "auto" else rollout.dtype]
    lora = settings.lora if rollout.adapter == "separate" else None
    if place is not None:
        ranks = placement_of(rollout.ranks, place.placement.world_size)
        route = Route(place.arch, place.pieces(), place.placement.ranks, ranks.ranks, rollout.tp)
        if again is None and not ranks.is_whole:
            subworld = prepare_rollout_world(ranks.ranks, run.timeouts)
        if again is None and dist.get_rank() not in ranks:
            shapes = None if lora is None else shapes_beside_base(place.arch, lora)
            return RolloutElsewhere("vllm", sync_of(policy, None, route, device, dtype, shapes))
    from megappo.rollout.vllm_engine import VllmEngine

    where = policy if place is None else place
    assert where is not None, "a policy without a place lives on all ranks"
    of_stop = str(tokenizer.path) if rollout.stop and isinstance(tokenizer, HuggingFaceTokenizer) else None
    engine = VllmEngine(
        VllmModel(settings.model, where.arch, dtype, max_sequence_tokens, run.seed, of_stop, lora, images),
        rollout,
        device=device,
        eos_token_ids=tokenizer.eos_ids,
        detokenize=tokenizer.decode,
        timeouts=run.timeouts,
        subworld=subworld,
        cache_after_push=None if rollout.max_staleness is None else rollout.cache_after_push,
    )
    if again is None:
        engine.connect(policy, route)
    else:
        assert route is not None, "an asynchronous run has a half of its own to sample"
        engine.connect_later(route, again.replica, again.replicas)
    return engine
