"""The baseline of a small run (one rank, no features), and the same with one feature at a time.

A feature is a setting that must not change the numbers: engine, ranks, kernels, compilation, an axis of a layout, data parallelism,
micro-batch size, recomputation, offload, reduction of gradients, the distributed optimizer."""

from __future__ import annotations

from math import lcm
from typing import Any

from megappo.commands.verify.recording import LONGEST_SEQUENCE
from megappo.commands.verify.shrink import SAMPLES, Run
from megappo.commands.verify.shrink_layouts import ranks_needed
from megappo.config.layout_checks import roles_in_use
from megappo.config.rank_ranges import ALL, ranks_of
from megappo.config.role_sections import (
    ParallelConfig,
    RoleConfig,
    TrainableConfig,
    section_of,
    with_sections,
)
from megappo.config.schema import TrainConfig
from megappo.models.arch import ModelArch
from megappo.models.hf_config import read_arch

_AXES = ("tp", "sequence_parallel", "pp", "vpp", "cp", "ep", "etp")
_SETTINGS = ("engine", "ranks", "compile", "reduce_once", "recompute", "offload", "micro_batch_tokens")
DISTRIBUTED, DP, ENGINE, KERNELS, RANKS = "optimizer.distributed", "dp", "engine", "kernels", "ranks"


def on_one_rank(run: Run) -> Run:
    """The baseline: Megatron's engine with reference kernels, without parallelism, sharding, recomputation or offload."""
    plain = {role: _plain(run.config, role) for role in roles_in_use(run.config)}
    return Run(with_sections(run.config, {**plain, KERNELS: "reference"}), 1)


def features(config: TrainConfig, role: str, world_size: int) -> list[str]:
    """Features of this role that `on_one_rank` removes."""
    section, plain = section_of(config, role), _plain(config, role)
    parallel = section.parallel
    found = [axis for axis in _AXES if getattr(parallel, axis) != getattr(plain.parallel, axis)]
    if len(ranks_of(section.ranks, world_size)) > parallel.tp * parallel.cp * parallel.pp:
        found.append(DP)
    found += [key for key in _SETTINGS if getattr(section, key, None) != getattr(plain, key, None)]
    if isinstance(section, TrainableConfig) and section.engine == "megatron" and section.optimizer.distributed:
        found.append(DISTRIBUTED)
    return found


def one_at_a_time(run: Run) -> dict[str, Run]:
    """Feature of `run` -> the baseline with this feature alone and the settings it requires."""
    used = {role: features(run.config, role, run.world_size) for role in roles_in_use(run.config)}
    alone = on_one_rank(run).config
    runs: dict[str, Run] = {}
    if run.config.kernels != alone.kernels:
        runs[KERNELS] = Run(alone.model_copy(update={KERNELS: run.config.kernels}), 1)
    for feature in dict.fromkeys(feature for found in used.values() for feature in found):
        config = with_sections(
            alone, {role: _with_feature(run.config, role, feature if feature in found else None) for role, found in used.items()}
        )
        world_size = lcm(*(ranks_needed(parallel) for parallel in roles_in_use(config).values()))
        if feature in (DP, DISTRIBUTED, ENGINE):
            world_size = min(2, run.world_size)  # two copies are enough to see a difference
        if feature == RANKS:
            world_size = run.world_size
        runs[feature] = Run(config, world_size)
    return runs


def _plain(config: TrainConfig, role: str) -> RoleConfig:
    section = section_of(config, role)
    changes: dict[str, Any] = {"engine": "megatron", RANKS: ALL, "compile": False, "parallel": ParallelConfig(), "offload": ()}
    changes["micro_batch_tokens"] = SAMPLES * LONGEST_SEQUENCE
    if isinstance(section, TrainableConfig):
        optimizer = section.optimizer.model_copy(update={"distributed": False})
        changes |= {
            "reduce_once": False,
            "recompute": "none",
            "optimizer": optimizer,
        }
    return section.model_copy(update=changes)


def _with_feature(config: TrainConfig, role: str, feature: str | None) -> RoleConfig:
    section, plain = section_of(config, role), _plain(config, role)
    if feature in _AXES:
        return plain.model_copy(update={"parallel": _one_axis(section.parallel, feature, read_arch(section.model))})
    if feature in ("compile", "reduce_once"):  # with the engine that has it
        return plain.model_copy(update={"engine": section.engine, feature: True})
    if feature == "recompute" and isinstance(section, TrainableConfig) and section.recompute == "offload":
        return plain.model_copy(update={"engine": section.engine, feature: "offload"})
    if feature in _SETTINGS:
        return plain.model_copy(update={feature: getattr(section, feature)})
    if feature == DISTRIBUTED:
        return plain.model_copy(update={"optimizer": section.optimizer})
    return plain


def _one_axis(parallel: ParallelConfig, axis: str, arch: ModelArch) -> ParallelConfig:
    keys = {"sequence_parallel": ("tp", "sequence_parallel"), "vpp": ("pp", "vpp")}.get(axis, (axis,))
    if axis in ("pp", "vpp") and parallel.layers_per_stage:
        keys = ("pp", "vpp", "layers_per_stage")  # pp alone may not divide the layers
    if axis == "tp" and arch.moe is not None:
        keys = ("tp", "sequence_parallel")  # tp with experts requires sequence parallel
    return ParallelConfig.model_validate({key: getattr(parallel, key) for key in keys})
