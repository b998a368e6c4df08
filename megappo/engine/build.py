"""Build of a Megatron engine from a role's configuration: groups, model, weights, gradient buffers, optimizer.

The one module that names the engine of a run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megappo.config.schema import (
    FrozenOffloadConfig,
    ModelConfig,
    OffloadConfig,
    ParallelConfig,
    ReferenceConfig,
    RoleConfig,
    TimeoutsConfig,
    TrainableConfig,
)
from megappo.engine.factory import EngineSpec, ValueHead
from megappo.engine.megatron import MegatronEngine
from megappo.engine.megatron_optimizer import Optimizer, wrap_with_ddp
from megappo.models.arch import ModelArch
from megappo.models.build import build_model
from megappo.models.hf_import import load_pretrained
from megappo.models.implementation import Implementation, Requested, choose_implementation, implementation_of_role
from megappo.parallel.groups import ProcessGroups, build_groups, destroy_groups, settle
from megappo.parallel.layout import ParallelLayout, layout_of
from megappo.platform.device import DTYPES


class MegatronEngines:
    """The `EngineFactory` of Megatron-core. Roles with the same layout share their groups.

    ValueError if the layers that `model.impl` names cannot be built here.
    """

    def __init__(self, model: ModelConfig, timeouts: TimeoutsConfig, device: torch.device) -> None:
        self._chosen: Implementation = choose_implementation(model.impl, device.type)
        self._requested: Requested = model.impl
        self._timeouts = timeouts
        self._device = device
        self._groups: dict[ParallelLayout, ProcessGroups] = {}

    def describe(self, section: RoleConfig) -> str:
        return self._implementation(section)

    def connect(self, parallels: Iterable[ParallelConfig]) -> None:
        for parallel in parallels:
            self._groups_of(layout_of(parallel, dist.get_world_size()))

    def build(self, spec: EngineSpec) -> MegatronEngine:
        section, groups = spec.section, self.groups_for(spec)
        implementation = self._implementation(section)
        if spec.total_updates is None:
            return build_frozen(
                spec.role,
                spec.model,
                spec.arch,
                section,
                groups,
                device=self._device,
                offload=section.offload if isinstance(section, ReferenceConfig) else FrozenOffloadConfig(),
                value_head=spec.value_head is not None,
                implementation=implementation,
                random_weights=spec.random_weights,
            )
        assert isinstance(section, TrainableConfig), f"{spec.role} has no optimizer to train with"
        return build_trainable(
            spec.role,
            spec.model,
            spec.arch,
            section,
            groups,
            device=self._device,
            total_updates=spec.total_updates,
            seed=spec.seed,
            implementation=implementation,
            value_head=spec.value_head,
            random_weights=spec.random_weights,
        )

    def groups_for(self, spec: EngineSpec) -> ProcessGroups:
        """Process groups of the role's layout on this world, made at the first call. Collective."""
        return self._groups_of(layout_of(spec.section.parallel, dist.get_world_size()))

    def settle(self) -> None:
        settle(self._groups.values(), self._timeouts)

    def close(self) -> None:
        gc.collect()  # models are reference cycles that hold their groups
        for groups in self._groups.values():
            destroy_groups(groups)
        self._groups.clear()

    def _groups_of(self, layout: ParallelLayout) -> ProcessGroups:
        if layout not in self._groups:
            self._groups[layout] = build_groups(layout, self._timeouts)
        return self._groups[layout]

    def _implementation(self, section: RoleConfig) -> Implementation:
        return implementation_of_role(self._chosen, self._requested, section.dtype)


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
    value_head: ValueHead | None = None,
    random_weights: bool = False,
) -> MegatronEngine:
    """Build a model that trains, loaded from the checkpoint at `path`.

    total_updates: optimizer steps of the whole run, for the schedule. value_head: initial weights of a critic's head; None builds
    a policy. random_weights: see `EngineSpec`.
    """
    chunks = build_model(
        arch,
        groups,
        dtype=DTYPES[config.dtype],
        recompute=config.recompute,
        value_head=value_head is not None,
        implementation=implementation,
    )
    if random_weights:
        _fill_randomly(chunks)
    else:
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
    engine.offload_idle()
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
    random_weights: bool = False,
) -> MegatronEngine:
    """Build a model that does not train: log-probs, or values with `value_head`."""
    chunks = build_model(arch, groups, dtype=DTYPES[config.dtype], value_head=value_head, implementation=implementation)
    if random_weights:
        _fill_randomly(chunks)
    else:
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
    engine.offload_idle()
    return engine


def _fill_randomly(chunks: Sequence[torch.nn.Module]) -> None:
    """Fill matrices with small random values: activations and gradients stay finite, experts are chosen about equally often."""
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                if parameter.dim() > 1:
                    source = generators.setdefault(parameter.device, torch.Generator(parameter.device).manual_seed(0))
                    parameter.normal_(0.0, 0.02, generator=source)
