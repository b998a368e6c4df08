"""Engines of a run, by their roles' sections, and the build of Megatron's. The one module that names engines."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megappo.config.role_sections import FrozenConfig, ModelConfig, RoleConfig, TrainableConfig
from megappo.config.run_sections import TimeoutsConfig
from megappo.engine.base import Engine
from megappo.engine.factory import EngineSpec
from megappo.engine.megatron import MegatronEngine
from megappo.engine.megatron_optimizer import Optimizer, wrap_with_ddp
from megappo.engine.role_engine import EngineSettings
from megappo.models.build import build_model, freeze_chunks
from megappo.models.freeze import frozen_on_rank
from megappo.models.gpt import PackedModel
from megappo.models.hf_import import load_pretrained
from megappo.models.implementation import Implementation, Requested, choose_implementation, implementation_of_role
from megappo.models.int8_linear import SCALE, fill_randomly
from megappo.models.lora_linear import attach_adapters
from megappo.parallel.device import DTYPES
from megappo.parallel.groups import ProcessGroups, build_groups, destroy_groups, settle
from megappo.parallel.layout import ParallelLayout, Placement, layout_of, placement_of


class RoleEngines:
    """The `EngineFactory` of a run. Roles with the same layout and ranks share their groups, whatever their engines.
    ValueError if the layers that `model.impl` names cannot be built here."""

    def __init__(self, model: ModelConfig, timeouts: TimeoutsConfig, device: torch.device) -> None:
        self._chosen: Implementation = choose_implementation(model.impl, device.type)
        self._requested: Requested = model.impl
        self._timeouts = timeouts
        self._device = device
        # In the order in which they were made, the same on all ranks; None where this rank is left out.
        self._groups: dict[tuple[ParallelLayout, Placement], ProcessGroups | None] = {}

    def describe(self, section: RoleConfig) -> str:
        return "transformers, fsdp2" if section.engine == "fsdp2" else self._implementation(section)

    def connect(self, sections: Iterable[RoleConfig]) -> None:
        for section in sections:
            self._groups_of(section)

    def build(self, spec: EngineSpec) -> Engine | None:
        groups = self.groups_for(spec)
        if groups is None:
            return None
        if spec.section.engine == "fsdp2":
            # Imports transformers, which a run of Megatron models alone does without.
            from megappo.engine.fsdp2 import build_fsdp2

            return build_fsdp2(spec, groups, self._device)
        return build_megatron(spec, groups, device=self._device, implementation=self._implementation(spec.section))

    def groups_for(self, spec: EngineSpec) -> ProcessGroups | None:
        """Return the role's process groups, made at the first call; None on other ranks. Collective over the world."""
        return self._groups_of(spec.section)

    def _groups_of(self, section: RoleConfig) -> ProcessGroups | None:
        placement = placement_of(section.ranks, dist.get_world_size())
        layout = layout_of(section.parallel, len(placement))
        if (layout, placement) not in self._groups:
            self._groups[layout, placement] = build_groups(layout, placement, self._timeouts)
        return self._groups[layout, placement]

    def settle(self) -> None:
        settle(self._own_groups(), self._timeouts)

    def close(self) -> None:
        gc.collect()  # models are reference cycles that hold their groups
        for groups in self._own_groups():
            destroy_groups(groups)
        self._groups.clear()

    def _own_groups(self) -> list[ProcessGroups]:
        return [groups for groups in self._groups.values() if groups is not None]

    def _implementation(self, section: RoleConfig) -> Implementation:
        return implementation_of_role(self._chosen, self._requested, section)


def build_megatron(
    spec: EngineSpec, groups: ProcessGroups, *, device: torch.device, implementation: Implementation = "local"
) -> MegatronEngine:
    """Build a role's model, which trains if `spec.total_updates` is a number; `spec.section` is a `TrainableConfig` then.
    Offload is that of the section, except for a trained role's model that is frozen here."""
    section, trains, value_head = spec.section, spec.total_updates is not None, spec.value_head is not None
    trainable = section if isinstance(section, TrainableConfig) else None
    chunks = build_model(
        spec.arch,
        groups,
        dtype=DTYPES[section.dtype],
        recompute=trainable.recomputed if trainable is not None and trains else "none",
        value_head=value_head,
        implementation=implementation,
        in_8_bits=section.in_8_bits,
    )
    for chunk in chunks:
        chunk.images = spec.images
    _fill(chunks, spec, groups)
    adapters = None
    if trainable is not None and trainable.lora is not None:  # of a frozen role too: a checkpoint's weights may be adapters
        adapters = attach_adapters(chunks, spec.arch, groups, trainable.lora, role=spec.role, seed=spec.seed)
    if spec.total_updates is None:
        for chunk in chunks:
            chunk.requires_grad_(False)
        offload = section.offload if isinstance(section, FrozenConfig) else ()
        settings = EngineSettings(device, section.micro_batch_tokens, offload)
        engine = MegatronEngine(spec.role, chunks, groups, settings, adapters=adapters)
    else:
        assert trainable is not None, f"{spec.role} has no optimizer to train with"
        if frozen := spec.frozen:
            names = frozen_on_rank(spec.arch, groups.layout, groups.position, frozen, value_head=value_head)
            freeze_chunks(chunks, names.__contains__)
        wrapped = wrap_with_ddp(chunks, groups, distributed_optimizer=trainable.optimizer.distributed)
        optimizer = Optimizer(wrapped, groups, trainable.optimizer, spec.total_updates)
        settings = EngineSettings(device, section.micro_batch_tokens, trainable.offload, frozen)
        balance = trainable.router_aux_coef, trainable.router_bias_rate
        engine = MegatronEngine(spec.role, wrapped, groups, settings, optimizer=optimizer, balance=balance, adapters=adapters)
    engine.offload_idle()
    return engine


def _fill(chunks: Sequence[PackedModel], spec: EngineSpec, groups: ProcessGroups) -> None:
    if spec.random_weights:
        _fill_randomly(chunks)
    else:
        load_pretrained(chunks, spec.arch, groups, spec.model, value_head=spec.value_head or "zero", seed=spec.seed)


def _fill_randomly(chunks: Sequence[torch.nn.Module]) -> None:
    # Small matrices: activations and gradients stay finite, and experts are chosen about equally often.
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for module in (module for chunk in chunks for module in chunk.modules()):
            own = {name: parameter for name, parameter in module.named_parameters(recurse=False) if parameter.dim() > 1}
            for name, parameter in own.items():
                source = generators.setdefault(parameter.device, torch.Generator(parameter.device).manual_seed(0))
                if parameter.dtype == torch.int8:
                    fill_randomly(parameter, own[f"{name}_scale"], source)
                elif f".{name}" != SCALE:
                    parameter.normal_(0.0, 0.02, generator=source)
