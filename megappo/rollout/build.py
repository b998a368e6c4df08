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
from megappo.config.role_sections import LoraConfig
from megappo.config.run_sections import TimeoutsConfig
from megappo.config.schema import RolloutConfig
from megappo.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megappo.engine.base import Engine, LogitsDtype
from megappo.models.arch import ModelArch
from megappo.models.lora import shapes_beside_base
from megappo.models.pieces import PieceMap
from megappo.models.row_shards import shard_piece_map
from megappo.models.weight_map import piece_map
from megappo.parallel.device import DTYPES
from megappo.parallel.layout import ParallelLayout
from megappo.parallel.placement import Placement, placement_of
from megappo.rollout.megatron_engine import MegatronRollout
from megappo.rollout.subworld import prepare_rollout_world
from megappo.rollout.types import Replica, Request, Response, RolloutEngine, SamplingParams


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


def build_rollout(
    config: RolloutConfig,
    policy: Engine | None,
    *,
    model: str,
    tokenizer: Tokenizer,
    max_sequence_tokens: int,
    policy_dtype: str,
    logits_dtype: LogitsDtype = "fp32",
    seed: int,
    device: torch.device,
    timeouts: TimeoutsConfig,
    place: PolicyPlace | None = None,
    lora: LoraConfig | None = None,
) -> RolloutEngine:
    """Build the engine of `rollout.engine` on `rollout.ranks` and connect it to the policy. Collective over the world.

    policy: None on ranks that it does not live on. place: of the policy; None if policy and engine live on all ranks.
    max_sequence_tokens: longest prompt plus response. logits_dtype: to which the Megatron rollout rounds logits when it samples;
    vLLM uses its own. timeouts: of vLLM's groups and of meetings. model: directory with the policy's config.json. lora: of the
    policy. ValueError if vLLM is missing.
    """
    if config.engine == "megatron":
        if policy is None:  # it samples where the policy is
            return RolloutElsewhere("megatron", None)
        return MegatronRollout(policy, tokenizer.decode, logits_dtype=logits_dtype, timeouts=timeouts)
    route, subworld, dtype = None, None, DTYPES[policy_dtype if config.dtype == "auto" else config.dtype]
    apart = lora if config.adapter == "separate" else None
    if place is not None:
        ranks = placement_of(config.ranks, place.placement.world_size)
        route = Route(place.arch, place.pieces(), place.placement.ranks, ranks.ranks, config.tp)
        subworld = None if ranks.is_whole else prepare_rollout_world(ranks.ranks, timeouts)
        if dist.get_rank() not in ranks:
            shapes = None if apart is None else shapes_beside_base(place.arch, apart)
            return RolloutElsewhere("vllm", sync_of(policy, None, route, device, dtype, shapes))
    from megappo.rollout.vllm_engine import VllmEngine

    engine = VllmEngine(
        model,
        config,
        dtype=dtype,
        max_model_len=max_sequence_tokens,
        eos_token_ids=tokenizer.eos_ids,
        seed=seed,
        device=device,
        tokenizer=str(tokenizer.path) if config.stop and isinstance(tokenizer, HuggingFaceTokenizer) else None,
        detokenize=tokenizer.decode,
        timeouts=timeouts,
        subworld=subworld,
        lora=apart,
        arch=place.arch if place is not None else policy.arch if policy is not None else None,
    )
    engine.connect(policy, route)
    return engine
