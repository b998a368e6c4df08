"""From a role's configuration to a running Megatron engine: model, weights, gradient buffers, optimizer."""

from __future__ import annotations

from typing import Literal

import torch

from megappo.config.schema import FrozenOffloadConfig, OffloadConfig, RoleConfig, TrainableConfig
from megappo.engine.megatron import MegatronEngine
from megappo.engine.megatron_optimizer import Optimizer, wrap_with_ddp
from megappo.models.arch import ModelArch
from megappo.models.build import build_model
from megappo.models.hf_import import load_pretrained
from megappo.models.implementation import Implementation
from megappo.parallel.groups import ProcessGroups
from megappo.platform.device import DTYPES


def build_trainable(
    name: str,
    path: str,
    arch: ModelArch,
    config: TrainableConfig,
    groups: ProcessGroups,
    *,
    device: torch.device,
    total_updates: int,
    seed: int,
    implementation: Implementation = "local",
    value_head: Literal["zero", "normal", "checkpoint"] | None = None,
) -> MegatronEngine:
    """A model that trains, loaded from the checkpoint at `path`.

    total_updates: optimizer steps of the whole run (for the schedule).
    value_head: how a critic's head starts; None builds a policy.
    """
    chunks = build_model(
        arch,
        groups,
        dtype=DTYPES[config.dtype],
        recompute=config.recompute,
        value_head=value_head is not None,
        implementation=implementation,
    )
    load_pretrained(chunks, arch, groups, path, value_head=value_head or "zero", seed=seed)
    wrapped = wrap_with_ddp(chunks, groups, distributed_optimizer=config.optimizer.distributed)
    optimizer = Optimizer(wrapped, groups, config.optimizer, total_updates)
    engine = MegatronEngine(
        name,
        wrapped,
        groups,
        device=device,
        micro_batch_tokens=config.micro_batch_tokens,
        optimizer=optimizer,
        offload=config.offload,
        router_aux_coef=config.router_aux_coef,
    )
    engine.park()
    return engine


def build_frozen(
    name: str,
    path: str,
    arch: ModelArch,
    config: RoleConfig,
    groups: ProcessGroups,
    *,
    device: torch.device,
    offload: FrozenOffloadConfig = FrozenOffloadConfig(),
    value_head: bool = False,
    implementation: Implementation = "local",
) -> MegatronEngine:
    """A model that does not train: log-probs, or values with `value_head`."""
    chunks = build_model(arch, groups, dtype=DTYPES[config.dtype], value_head=value_head, implementation=implementation)
    load_pretrained(chunks, arch, groups, path)
    for chunk in chunks:
        chunk.requires_grad_(False)
    engine = MegatronEngine(
        name,
        chunks,
        groups,
        device=device,
        micro_batch_tokens=config.micro_batch_tokens,
        offload=OffloadConfig(parameters=offload.parameters),
    )
    engine.park()
    return engine
