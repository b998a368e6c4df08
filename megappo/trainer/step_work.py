"""Model FLOPs and tokens of a step by stage and role, and the shares of the hardware's peak that they make: MFU and HFU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.config.layout_checks import reference_is_base
from megappo.config.role_sections import RoleConfig, TrainableConfig, section_of
from megappo.config.run_sections import TelemetryConfig
from megappo.config.schema import TrainConfig
from megappo.models.arch import ModelArch
from megappo.models.flops import Recompute, forward_flops, generation_flops
from megappo.parallel.placement import Placement
from megappo.telemetry.hardware import Dtype, hardware_of_gpu
from megappo.telemetry.metrics import REWARD_MODEL_STAGE, Metric
from megappo.trainer.build_roles import spec_of_role
from megappo.trainer.updates import UpdateSummary

TERA = 1e12
REWARD_MODEL = "reward_model"
"""It reads texts of its own; the other roles pass over the step's samples as they were generated."""
DECODING = "generate"
"""The stage without MFU: it reads weights and cache for every token, and arithmetic does not bound it."""


@dataclass(frozen=True)
class RoleModel:
    """Facts of a role's model that its FLOPs depend on. peak_tflops: of one rank in the role's dtype, None if unknown. ranks: of
    the world, that share its work. frozen: adapters alone train."""

    arch: ModelArch
    value_head: bool
    recompute: Recompute
    peak_tflops: float | None
    ranks: Sequence[int]
    frozen: bool = False

    def forward(self, lengths: Tensor) -> Work:
        return Work(forward_flops(self.arch, lengths, value_head=self.value_head).total, 0, int(lengths.sum()))

    def training(self, lengths: Tensor) -> Work:
        flops = forward_flops(self.arch, lengths, value_head=self.value_head)
        of_model = flops.training_frozen if self.frozen else flops.training
        return Work(of_model, flops.recomputed(self.recompute), int(lengths.sum()))

    def generation(self, prompts: Tensor, responses: Tensor) -> Work:
        return Work(generation_flops(self.arch, prompts, responses).total, 0, int((prompts + responses).sum()))


@dataclass(frozen=True)
class Work:
    """Work of a role in a stage, over all ranks. flops: of the model; recomputed: FLOPs on top, for activations not kept; tokens:
    those of its passes."""

    flops: int
    recomputed: int
    tokens: int


@dataclass(frozen=True)
class StepWork:
    """Stage -> role -> work of one step. models: of the roles; generating: ranks that share the work of generation."""

    by_stage: Mapping[str, Mapping[str, Work]]
    models: Mapping[str, RoleModel]
    generating: Sequence[int]

    @classmethod
    def of_step(
        cls,
        models: Mapping[str, RoleModel],
        lengths: Tensor,
        generated: tuple[Tensor, Tensor],
        critics: Mapping[str, UpdateSummary],
        policy: UpdateSummary,
        generating: Sequence[int],
        scoring: Work | None = None,
    ) -> StepWork:
        """Work of a step from the lengths [N] of all its samples; an update that `target_kl` ended early has done what it has done.
        generated: [M] each, tokens of the prompts and of the responses that were generated, which may be more than those N.
        scoring: work of the reward model, None without one."""
        by_critic = {role: models[role].training(torch.cat(one.lengths)) for role, one in critics.items() if one.lengths}
        by_policy = {"policy": models["policy"].training(torch.cat(policy.lengths))} if policy.lengths else {}
        by_stage = {
            "generate": {"policy": models["policy"].generation(*generated)},
            **({} if scoring is None else {REWARD_MODEL_STAGE: {REWARD_MODEL: scoring}}),
            "logprobs": {role: model.forward(lengths) for role, model in models.items() if role != REWARD_MODEL},
            **{stage: works for stage, works in (("update_critic", by_critic), ("update_policy", by_policy)) if works},
        }
        return cls(by_stage, models, generating)

    def metrics(self, seconds: Mapping[str, float], step_s: float) -> dict[str, float]:
        """Figures by stage. seconds: stage -> wall time; step_s: of the whole step."""
        found: dict[str, float] = {}
        for stage, roles in self.by_stage.items():
            rank_s = max(seconds[stage], 1e-9) * len(self._ranks(stage, roles))
            found |= {Metric.TFLOP.of(f"{stage}/{role}"): work.flops / TERA for role, work in roles.items()}
            found[Metric.TFLOPS.of(stage)] = sum(work.flops for work in roles.values()) / TERA / rank_s
            # Roles of one stage pass the same tokens, but for updates of critics, each of which has its own.
            together = sum if stage == "update_critic" else max
            found[Metric.STAGE_TOKENS.of(stage)] = together(work.tokens for work in roles.values()) / rank_s
            found |= dict(self._shares_of_peak(stage, roles, rank_s))
        whole = sum(work.flops for roles in self.by_stage.values() for work in roles.values())
        ranks = {rank for stage, roles in self.by_stage.items() for rank in self._ranks(stage, roles)}
        return found | {Metric.TFLOPS.of("step"): whole / TERA / (step_s * len(ranks))}

    def _ranks(self, stage: str, roles: Mapping[str, Work]) -> set[int]:
        """Ranks that share the work of a stage."""
        return set(self.generating) if stage == DECODING else {rank for role in roles for rank in self.models[role].ranks}

    def _shares_of_peak(self, stage: str, roles: Mapping[str, Work], rank_s: float) -> Iterator[tuple[str, float]]:
        """MFU, and HFU where work is repeated: seconds that the work takes at the peak over those that it took."""
        if stage == DECODING:
            return
        model_s = hardware_s = 0.0
        for role, work in roles.items():
            peak = self.models[role].peak_tflops
            if peak is None:
                return
            model_s += work.flops / (peak * TERA)
            hardware_s += (work.flops + work.recomputed) / (peak * TERA)
        yield Metric.MFU.of(stage), model_s / rank_s
        if hardware_s > model_s:
            yield Metric.HFU.of(stage), hardware_s / rank_s


def role_models(config: TrainConfig, placements: Mapping[str, Placement], device: torch.device) -> dict[str, RoleModel]:
    """Role -> model."""
    models: dict[str, RoleModel] = {}
    for role, placement in placements.items():
        section: RoleConfig = section_of(config, role)
        recompute = section.recompute if isinstance(section, TrainableConfig) else "none"
        peak = peak_tflops(config.telemetry, device, section.dtype)
        spec = spec_of_role(config, role, None)
        frozen = isinstance(section, TrainableConfig) and section.lora is not None
        models[role] = RoleModel(spec.arch, spec.value_head is not None, recompute, peak, placement.ranks, frozen)
    if reference_is_base(config):
        models["reference"] = models["policy"]  # its pass is one more of the same model
    return models


def peak_tflops(telemetry: TelemetryConfig, device: torch.device, dtype: Dtype) -> float | None:
    """Peak TFLOP/s of one rank: `telemetry.peak_tflops`, or that of the GPU's profile; None on a CPU or an unknown GPU."""
    if telemetry.peak_tflops is not None or device.type != "cuda":
        return telemetry.peak_tflops
    profile = hardware_of_gpu(torch.cuda.get_device_name(device))
    return None if profile is None else profile.peak_tflops(dtype)


def peak_note(telemetry: TelemetryConfig, device: torch.device, models: Mapping[str, RoleModel]) -> str:
    """A line on the peak that MFU is measured against, or on why there is none."""
    peaks = sorted({model.peak_tflops for model in models.values() if model.peak_tflops is not None})
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if peaks:
        source = "telemetry.peak_tflops" if telemetry.peak_tflops is not None else f"the profile of {gpu}"
        return f"MFU is against {' and '.join(f'{peak:g}' for peak in peaks)} TFLOP/s of a rank ({source})"
    if not gpu:
        return "no MFU on a CPU without telemetry.peak_tflops"
    return f"no MFU: no profile has the peak of {gpu}; telemetry.peak_tflops sets it"
