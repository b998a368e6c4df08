"""Everything that is checked before a model is built, in one order, for `megappo plan` and `megappo train` alike.

Cheap checks come first: keys, installed packages, architectures, memory, and the data at last.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megappo.config.batch import step_arithmetic
from megappo.config.checks import Device, check_config
from megappo.config.errors import ConfigError, problem
from megappo.config.loading import explicit_keys
from megappo.config.schema import SftConfig, TrainConfig
from megappo.installed import missing_package
from megappo.models.arch import ModelArch
from megappo.models.families import hf_tensors
from megappo.models.implementation import choose_implementation, implementation_notes
from megappo.parallel.layout import ParallelLayout
from megappo.plan.critic_source import critic_source
from megappo.plan.data import RunData, SftData, load_run_data, load_sft_data
from megappo.plan.estimate import Plan, make_plan
from megappo.plan.kernels import check_kernels
from megappo.plan.layouts import check_layouts, read_archs
from megappo.plan.memory import Counter, count_parameters
from megappo.plan.report import report
from megappo.plan.tables import figures
from megappo.rewards.rules import RULES, make_rule
from megappo.rollout.vllm_limits import check_vllm


@dataclass(frozen=True)
class Prepared:
    """A run that can start: its plan, its data, and remarks on keys that this device does not need.

    data: None where only shapes were looked at, and then nothing is known of whether the run could start.
    """

    plan: Plan
    data: RunData | None
    notes: tuple[str, ...]

    def report(self) -> str:
        return report(self.plan, self.data, self.notes)


def prepare(
    config: TrainConfig,
    world_size: int,
    device: Device,
    device_memory: int | None = None,
    *,
    resume: bool = False,
    shapes_only: bool = False,
    counter: Counter = count_parameters,
) -> Prepared:
    """Check a run completely without building anything. ValueError, one line, with the first thing that cannot work.

    device_memory: bytes of one GPU; None where it is not known, and then nothing is refused for its size. resume: the run goes on
    from its own checkpoint, and what only its start needs may be gone. shapes_only: config.json of the models is enough; weights,
    tokenizer, data and packages need not be there.
    """
    notes = check_config(config, explicit_keys(config), world_size, device)
    if not shapes_only:
        _check_names(config)
    implementation = choose_implementation(config.model.impl, device)  # raises where it cannot work
    check_kernels(config.kernels, device)
    archs = read_archs(config, need_weights=not shapes_only)
    layouts = check_layouts(config, archs, world_size, implementation)
    notes = [*notes, *implementation_notes(config.model.impl, device, {role: getattr(config, role).dtype for role in layouts})]
    if config.rollout.engine == "vllm":
        longest = step_arithmetic(config).max_sequence_tokens
        check_vllm(archs["policy"], config.rollout.tp, world_size, longest, device)  # raises what vLLM cannot serve
    if not resume and not shapes_only:
        critic_source(config.critic, archs["critic"])  # raises where there is no such checkpoint
    plan = make_plan(config, archs, layouts, world_size, device, device_memory, counter)
    if shapes_only:
        return Prepared(plan, None, (*notes, "only shapes were looked at: weights, tokenizer and data may be missing"))
    return Prepared(plan, load_run_data(config, archs["policy"]), tuple(notes))


@dataclass(frozen=True)
class PreparedSft:
    """A fine-tuning that can start."""

    config: SftConfig
    arch: ModelArch
    layout: ParallelLayout
    data: SftData
    notes: tuple[str, ...]

    def report(self) -> str:
        trainer, demonstrations = self.config.trainer, self.data.demonstrations
        parameters = sum(prod(shape) for shape in hf_tensors(self.arch).values())
        epochs = trainer.steps * trainer.batch_size / len(demonstrations)
        lines = [
            f"policy: {self.arch.family} of {parameters:,} parameters, {self.layout} on {self.layout.world_size} ranks",
            f"data: {demonstrations.summary()}",
            f"run: {trainer.steps:,} steps of {trainer.batch_size:,} demonstrations = {figures(epochs)} epochs",
            *(f"note: {note}" for note in self.notes),
        ]
        return "\n".join(lines) + "\n"


def prepare_sft(config: SftConfig, world_size: int, device: Device) -> PreparedSft:
    """As `prepare`, for fine-tuning."""
    notes = check_config(config, explicit_keys(config), world_size, device)
    implementation = choose_implementation(config.model.impl, device)  # raises where it cannot work
    check_kernels(config.kernels, device)
    arch = read_archs(config)["policy"]
    layout = check_layouts(config, {"policy": arch}, world_size, implementation)["policy"]
    notes = [*notes, *implementation_notes(config.model.impl, device, {"policy": config.policy.dtype})]
    return PreparedSft(config, arch, layout, load_sft_data(config, arch), tuple(notes))


def _check_names(config: TrainConfig) -> None:
    """Rewards that do not exist, and packages that this configuration needs and that are absent."""
    for part in config.reward.parts:
        if part.name not in RULES:
            make_rule(part.name)  # raises, with the nearest name
    needed = {"math_verify": "math-verify"} if any(part.name == "math_verify" for part in config.reward.parts) else {}
    for key, package in needed.items():
        if (how := missing_package(package)) is not None:
            raise ConfigError(problem("reward.parts", key, how))
    if config.rollout.engine == "vllm" and (how := missing_package("vllm")) is not None:
        raise ConfigError(problem("rollout.engine", "vllm", f"{how}, or set rollout.engine=megatron"))
