"""The least that a step can take: the arithmetic of its models and the weights that decoding reads, at the rates of a profile.

No layout, no communication, no pipeline's bubble: a real step is longer. `megappo tune` predicts how long; a plan needs something
that host work is held against.
"""

from __future__ import annotations

from typing import Literal

import torch

from megappo.commands.plan.estimate import Plan
from megappo.config.batch import text_arithmetic, update_schedule
from megappo.config.layout_checks import trained_sections, value_head_of
from megappo.config.role_sections import TrainableConfig, section_of
from megappo.models.flops import forward_flops, generation_flops
from megappo.telemetry.hardware import PROFILES, Hardware, profiles


def hardware_of_plan(plan: Plan) -> Hardware:
    """The profile that fits the plan's devices: of GPUs the fastest among those nearest in memory, of all if that is unknown."""
    known = [one for one in profiles(PROFILES).values() if one.is_gpu() == (plan.device == "cuda")]
    memory = plan.device_memory

    def distance(one: Hardware) -> tuple[int, float]:
        return 0 if memory is None else abs(one.memory_bytes - memory), -one.bf16_tflops

    return min(known, key=distance)


def least_step_s(plan: Plan, hardware: Hardware) -> float:
    """Seconds of the busiest rank, every sequence at its longest."""
    work = {role: _role_s(plan, role, hardware) for role in plan.layouts}
    generation = _generation_s(plan, hardware) if plan.samples else 0.0

    def of_rank(rank: int) -> float:
        generates = plan.generates(rank) or (plan.rollout is None and "policy" in plan.roles_on(rank))
        return sum(work[role] for role in plan.roles_on(rank)) + (generation if generates else 0.0)

    return max(map(of_rank, plan.distinct_ranks()))


def _role_s(plan: Plan, role: str, hardware: Hardware) -> float:
    """Of a pass without gradients over all samples and of a role's updates, shared by its ranks."""
    config, section = plan.config, section_of(plan.config, role)
    recompute: Literal["none", "selective", "full"] = section.recompute if isinstance(section, TrainableConfig) else "none"

    def passes(tokens: int) -> tuple[int, int]:
        """FLOPs of one sequence, without and with gradients."""
        one = forward_flops(plan.archs[role], torch.tensor([tokens]), value_head=value_head_of(section) is not None)
        return one.total, one.training + one.recomputed(recompute)

    forward, training = passes(plan.step.max_sequence_tokens)
    flops: float = plan.step.samples * forward
    if role in trained_sections(config):
        schedule, texts = update_schedule(config, role), text_arithmetic(config, role)
        # Responses of their longest length end once in so many steps, and critics learn from those that end.
        often = 1 if role == "policy" else config.rollout.windows
        flops += plan.step.samples * schedule.epochs * training / schedule.part.count / often
        if texts.count:
            flops += schedule.optimizer_steps(plan.step.samples) * texts.count * passes(texts.max_tokens)[1]
    return flops / hardware.flops_per_s(section.dtype) / len(plan.placements[role])


def _generation_s(plan: Plan, hardware: Hardware) -> float:
    """Of generation: its arithmetic, or the weights that each token of the longest response, or window, reads if that takes
    longer."""
    config, arch = plan.config, plan.archs["policy"]
    # Of a response that takes several steps the mean one: half of the other windows are before it, read as a prompt.
    drawn = config.rollout.drawn_tokens
    before = config.data.max_prompt_tokens + drawn * (config.rollout.windows - 1) // 2
    prompt, response = (torch.tensor([one]) for one in (before, drawn))
    ranks = plan.placements["policy" if plan.rollout is None else "rollout"]
    flops = plan.step.samples * generation_flops(arch, prompt, response).total
    arithmetic = flops / hardware.flops_per_s(config.policy.dtype) / len(ranks)
    if plan.rollout is None or arch.moe is not None:  # of experts only those are read that tokens are sent to
        return arithmetic
    reads = drawn * plan.rollout.weights
    return max(arithmetic, reads / hardware.memory_bytes_per_s)
