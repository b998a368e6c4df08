"""Checks of a run before a model is built, in one order, cheap ones first: keys, packages, architectures, layouts.

Memory is checked in `megappo/plan`, data in `prepare/data.py`: a plan for another machine can do without its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megappo.checkpoint.remote import require_protocol
from megappo.config import evaluations
from megappo.config.checks import Device, check_config
from megappo.config.errors import ConfigError, problem
from megappo.config.evaluations import longest_sequence_tokens
from megappo.config.layout_checks import roles_in_use
from megappo.config.loading import explicit_keys
from megappo.config.reward_sections import RewardConfig
from megappo.config.schema import SftConfig, TrainConfig
from megappo.installed import missing_package
from megappo.models.arch import ModelArch
from megappo.models.implementation import choose_implementation, implementation_notes
from megappo.ops.implementations import Kernels, missing
from megappo.parallel.layout import ParallelLayout
from megappo.parallel.placement import placement_of
from megappo.prepare.critic_source import critic_source
from megappo.prepare.layouts import check_layouts, read_archs
from megappo.rewards.rules import RULES, make_rule
from megappo.rollout.vllm_limits import check_vllm
from megappo.telemetry.names import metric_names, nearest_name, open_beginnings
from megappo.telemetry.trackers.available import tracker_problem


@dataclass(frozen=True)
class CheckedRun:
    """Configuration that this world can run, if memory and data suffice.

    archs, layouts: by role. notes: on keys that this device does not need.
    """

    config: TrainConfig
    archs: Mapping[str, ModelArch]
    layouts: Mapping[str, ParallelLayout]
    notes: tuple[str, ...]


def check_run(
    config: TrainConfig, world_size: int, device: Device, *, resume: bool = False, shapes_only: bool = False
) -> CheckedRun:
    """Check the configuration of a PPO run. ValueError, one line, for the first mistake.

    resume: the run continues from its own checkpoint; inputs that only its start needs may be gone. shapes_only: config.json of
    the models is enough; weights and packages may be missing.
    """
    notes = check_config(config, explicit_keys(config), world_size, device)
    _check_progress(config)
    if not shapes_only:
        _check_names(config)
    implementation = choose_implementation(config.model.impl, device)  # raises if it cannot work
    check_kernels(config.kernels, device)
    archs = read_archs(config, need_weights=not shapes_only)
    layouts = check_layouts(config, archs, world_size, implementation)
    dtypes = {role: getattr(config, role).dtype for role in layouts}
    notes = (*notes, *implementation_notes(config.model.impl, device, dtypes))
    if config.rollout.engine == "vllm":
        longest = longest_sequence_tokens(config)
        num_ranks = len(placement_of(config.rollout.ranks, world_size))
        check_vllm(archs["policy"], config.rollout.tp, num_ranks, longest, device)  # raises if vLLM cannot serve it
    if not resume and not shapes_only:  # a resumed run takes the critic from its own checkpoint
        critic_source(config.critic, archs["critic"])  # raises if there is no such checkpoint
    if config.checkpoint.remote is not None and not shapes_only:
        _check_remote(config.checkpoint.remote)
    return CheckedRun(config, archs, layouts, notes)


@dataclass(frozen=True)
class CheckedSft:
    """Fine-tuning that this world can run, if the data suffices."""

    config: SftConfig
    arch: ModelArch
    layout: ParallelLayout
    notes: tuple[str, ...]


def check_sft(config: SftConfig, world_size: int, device: Device) -> CheckedSft:
    """Check the configuration of a fine-tuning, as `check_run`."""
    notes = check_config(config, explicit_keys(config), world_size, device)
    implementation = choose_implementation(config.model.impl, device)  # raises if it cannot work
    check_kernels(config.kernels, device)
    arch = read_archs(config)["policy"]
    layout = check_layouts(config, {"policy": arch}, world_size, implementation)["policy"]
    notes = (*notes, *implementation_notes(config.model.impl, device, {"policy": config.policy.dtype}))
    return CheckedSft(config, arch, layout, notes)


def _check_remote(url: str) -> None:
    """ConfigError if no storage has such URLs, or its package is missing. `surroundings.py` asks the storage itself."""
    try:
        require_protocol(url)
    except ValueError as error:
        raise ConfigError(problem("checkpoint.remote", url, f"{error}; correct the URL, or set it to null")) from error


def check_kernels(kernels: Kernels, device: Device) -> None:
    """ConfigError if the implementation that `kernels` names is missing on this kind of device."""
    if (reason := missing(kernels, device)) is not None:
        raise ConfigError(problem("kernels", kernels, f"{reason}; set kernels=auto, or reference"))


def _check_progress(config: TrainConfig) -> None:
    """ConfigError, with the nearest name, for a column of the progress line that no metric has."""
    labels = {part.label: part.kind for part in config.reward.parts}
    names = [*metric_names(list(labels), list(roles_in_use(config))), *evaluations.metric_names(config)]
    unknown_ends = open_beginnings([label for label, kind in labels.items() if kind != "name"])  # a built-in rule is one number
    for name in config.telemetry.progress:
        if name not in names and not name.startswith(unknown_ends):
            nearest = nearest_name(name, names)
            hint = f"did you mean {nearest}? " if nearest else ""
            fix = f"this run logs no such metric; {hint}docs/statistics.md lists them"
            raise ConfigError(problem("telemetry.progress", name, fix))


def _check_names(config: TrainConfig) -> None:
    """ConfigError for an unknown reward, and for a missing package that this configuration needs."""
    _check_reward(config.reward)
    for name, one in config.evaluations.items():
        if one.reward is not None:
            try:
                _check_reward(one.reward)
            except ValueError as error:
                raise ConfigError(f"evaluations.{name}.{error}") from None
    if config.rollout.engine == "vllm" and (how := missing_package("vllm")) is not None:
        raise ConfigError(problem("rollout.engine", "vllm", f"{how}, or set rollout.engine=megatron"))
    if (message := tracker_problem(config.telemetry)) is not None:
        raise ConfigError(message)


def _check_reward(reward: RewardConfig) -> None:
    for label, (_, part) in reward.all_parts.items():
        if part.kind == "name" and label not in RULES:
            make_rule(label)  # raises, with the nearest name
    needed = {"math_verify": "math-verify"} if "math_verify" in reward.all_parts else {}
    for key, package in needed.items():
        if (how := missing_package(package)) is not None:
            raise ConfigError(problem("reward.parts", key, how))
