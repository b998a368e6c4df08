"""Checks of a run before a model is built, cheap ones first: keys, packages, architectures, layouts. Memory is checked in
`megappo/commands/plan` and data in `data.py`, as a plan for another machine needs no data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megappo.checkpoint.remote import require_protocol
from megappo.config.checks import Device, check_config
from megappo.config.errors import ConfigError, problem
from megappo.config.evaluations import longest_sequence_tokens
from megappo.config.loading import explicit_keys
from megappo.config.role_sections import section_of
from megappo.config.schema import SftConfig, TrainConfig
from megappo.models.arch import ModelArch
from megappo.models.implementation import choose_implementation, implementation_notes
from megappo.ops.implementations import Kernels, missing
from megappo.parallel.layout import ParallelLayout
from megappo.rollout.vllm_limits import check_vllm
from megappo.trainer.prepare.checkpoint_source import check_critic_sources
from megappo.trainer.prepare.inputs import check_names
from megappo.trainer.prepare.layouts import check_layouts, read_archs


@dataclass(frozen=True)
class CheckedRun:
    """A configuration that this world can run, if memory and data suffice. archs, layouts: by role. notes: for the plan."""

    config: TrainConfig
    archs: Mapping[str, ModelArch]
    layouts: Mapping[str, ParallelLayout]
    notes: tuple[str, ...]


def check_run(
    config: TrainConfig, world_size: int, device: Device, *, resume: bool = False, shapes_only: bool = False
) -> CheckedRun:
    """Check the configuration of a PPO run. ValueError, one line, for the first mistake.
    resume: the run continues from its own checkpoint, so inputs only needed at the start may be missing. shapes_only: weights and
    packages may be missing; config.json of the models is enough."""
    notes = check_config(config, explicit_keys(config), world_size, device)
    check_names(config, need_packages=not shapes_only)
    implementation = choose_implementation(config.model.impl, device)  # raises if it cannot work
    check_kernels(config.kernels, device)
    archs = read_archs(config, need_weights=not shapes_only)
    layouts = check_layouts(config, archs, world_size, implementation)
    sections = {role: section_of(config, role) for role in layouts}
    notes = (*notes, *implementation_notes(config.model.impl, device, sections))
    if config.rollout.engine == "vllm" and "policy" in archs:
        check_vllm(archs["policy"], longest_sequence_tokens(config), device)  # raises if vLLM cannot serve it
    if not resume and not shapes_only:  # a resumed run takes the critics from its own checkpoint
        check_critic_sources(config, archs)
    if config.checkpoint.remote is not None and not shapes_only:
        _check_remote(config.checkpoint.remote)
    return CheckedRun(config, archs, layouts, notes)


@dataclass(frozen=True)
class CheckedSft:
    """A fine-tuning that this world can run, if the data suffices."""

    config: SftConfig
    arch: ModelArch
    layout: ParallelLayout
    notes: tuple[str, ...]


def check_sft(config: SftConfig, world_size: int, device: Device) -> CheckedSft:
    """Check the configuration of a fine-tuning; errors as `check_run`."""
    notes = check_config(config, explicit_keys(config), world_size, device)
    implementation = choose_implementation(config.model.impl, device)  # raises if it cannot work
    check_kernels(config.kernels, device)
    arch = read_archs(config)["policy"]
    layout = check_layouts(config, {"policy": arch}, world_size, implementation)["policy"]
    notes = (*notes, *implementation_notes(config.model.impl, device, {"policy": config.policy}))
    return CheckedSft(config, arch, layout, notes)


def _check_remote(url: str) -> None:
    """ConfigError if the URL has no known storage, or its package is missing; `preflight.py` contacts the storage."""
    try:
        require_protocol(url)
    except ValueError as error:
        raise ConfigError(problem("checkpoint.remote", url, f"{error}; correct the URL, or set it to null")) from error


def check_kernels(kernels: Kernels, device: Device) -> None:
    """ConfigError if the implementation that `kernels` names is missing on this kind of device."""
    if (reason := missing(kernels, device)) is not None:
        raise ConfigError(problem("kernels", kernels, f"{reason}; set kernels=auto, or reference"))
