"""Refuse keys that a role's engine does not have. Rules about its models are in `trainer/prepare/layouts.py`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megappo.config.errors import problem
from megappo.config.layout_checks import role_sections, roles_in_use
from megappo.config.role_sections import ParallelConfig, RoleConfig, TrainableConfig, key_of_role
from megappo.config.supervised import AnyConfig

_REFUSED_AXES = dict.fromkeys(("pp", "vpp"), "has no pipeline") | dict.fromkeys(("ep", "etp"), "does not distribute experts")
_KEPT = ("tp", "cp", "sequence_parallel")


def engine_problems(config: AnyConfig) -> Iterator[str]:
    """Yield the problems of every role, one line each."""
    sections = role_sections(config)
    for role in roles_in_use(config):
        yield from problems_of_role(key_of_role(role), sections[role])


def problems_of_role(role: str, section: RoleConfig) -> Iterator[str]:
    """Yield one line for each key that the role's engine does not have. role: key of its section."""
    if section.engine == "fsdp2":
        yield from _without_fsdp2(role, section)
    else:
        yield from _without_megatron(role, section)


def _without_megatron(role: str, section: RoleConfig) -> Iterator[str]:
    elsewhere = f"remove it, or set {role}.engine to fsdp2"

    def refused(key: str, value: Any, why: str, fix: str = elsewhere) -> str:
        return problem(f"{role}.{key}", value, f"{role}.engine is {section.engine}, {why}; {fix}")

    if section.compile:
        yield refused("compile", True, "whose layers are not compiled")
    if not isinstance(section, TrainableConfig):
        return
    if section.recompute == "offload":
        fix = f"use full, or set {role}.engine to fsdp2"
        yield refused("recompute", "offload", "which keeps activations on the device", fix)
    if section.reduce_once:
        yield refused("reduce_once", True, "which always reduces gradients once a pass", "remove it")


def _without_fsdp2(role: str, section: RoleConfig) -> Iterator[str]:
    def refused(key: str, value: Any, why: str, fix: str) -> str:
        return problem(f"{role}.{key}", value, f"{why}; {fix}, or set {role}.engine to megatron")

    for axis, why in _REFUSED_AXES.items():
        if (size := getattr(section.parallel, axis)) > 1:
            yield refused(f"parallel.{axis}", size, f"{role}.engine is fsdp2, which {why}", f"set {axis} to 1")
    others = section.parallel.model_dump(exclude={*_REFUSED_AXES, *_KEPT})
    for name, value in others.items():
        if value != ParallelConfig.model_fields[name].default:
            yield refused(f"parallel.{name}", value, f"{role}.engine is fsdp2, which has no such layout", "leave it out")
    if section.compile and (tp := section.parallel.tp) > 1:
        why = "torch.compile does not take DTensors whose number of tokens changes"
        yield problem(f"{role}.compile", True, f"{why}, as under {role}.parallel.tp {tp}; remove it, or set tp to 1")
    if not isinstance(section, TrainableConfig):
        return
    for key in ("router_aux_coef", "router_bias_rate"):
        if (value := getattr(section, key)) > 0:
            yield refused(key, value, f"{role}.engine is fsdp2, which does not balance experts", "leave it out")
    if not section.optimizer.distributed:
        yield refused("optimizer.distributed", False, f"{role}.engine is fsdp2, which always shards the optimizer", "leave it out")
