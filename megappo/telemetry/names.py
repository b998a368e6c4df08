"""Names of all metrics that a PPO run can log, families written out, to check keys that name one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from megappo.config.role_sections import is_critic
from megappo.telemetry.metrics import MODEL_STAGES, MOMENTS, REWARD_MODEL_STAGE, STAGES, Metric, of_critic

_OF_PART = ("", "/std", "/min", "/max", "/share")


def metric_names(parts: Sequence[str], roles: Sequence[str]) -> list[str]:
    """List the names of a run with these parts of the reward and these roles, without those of `open_beginnings`."""
    members = _members(parts, roles)
    names: list[str] = []
    critics = [role for role in roles if is_critic(role)]
    for metric in Metric:
        if metric.value.startswith("sft/") or (metric.value.startswith("critics/") and len(critics) < 2):
            continue
        found = [metric.of(one) for one in members.get(metric, ())] if metric.value.endswith("*") else [metric.value]
        if metric.value.startswith("critic/"):
            found = [of_critic(one, role) for role in critics for one in found]
        names += found
    return names


def open_beginnings(parts: Sequence[str]) -> tuple[str, ...]:
    """Return prefixes of names that are complete only when logged: numbers inside these parts, sets of evaluations, other
    families."""
    families = [metric.of("") for metric in Metric if metric.value.endswith("*") and metric not in _members((), ())]
    return (*families, *(Metric.REWARD_PART.of(f"{part}.") for part in parts))


def _members(parts: Sequence[str], roles: Sequence[str]) -> dict[Metric, Sequence[str]]:
    absent = () if "critic" in roles else ("update_critic",)
    stages = [*(one for one in MODEL_STAGES if one not in absent), *([REWARD_MODEL_STAGE] if "reward_model" in roles else [])]
    timed = [one for one in STAGES if one not in absent]
    return {
        Metric.REWARD_PART: [f"{part}{end}" for part in parts for end in _OF_PART],
        Metric.RULES: MOMENTS,
        Metric.MODELS: MOMENTS,
        Metric.EVAL_PART: parts,
        Metric.SHAPED: MOMENTS,
        Metric.ADVANTAGE: MOMENTS,
        Metric.VALUE: MOMENTS,
        Metric.RETURN: MOMENTS,
        Metric.TOTAL_LENGTH: MOMENTS,
        Metric.PUSH: ("bytes_sent", "bytes_received", "bytes_local", "seconds", "verified", "version"),
        Metric.STAGE_SECONDS: [f"{stage}_s" for stage in timed],
        Metric.STAGE_MEMORY: [f"{stage}_{suffix}" for stage in timed for suffix in ("peak_gib", "end_gib")],
        Metric.TFLOP: [f"{stage}/{role}" for stage in stages for role in roles],
        Metric.TFLOPS: [*stages, "step"],
        Metric.MFU: stages[1:],  # decoding has none
        Metric.HFU: stages[1:],
        Metric.STAGE_TOKENS: stages,
    }


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """Return the known name closest to `name`, as a whole or in the part after the group; None if none is close."""
    if near := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return near[0]
    tails = {known.split("/", 1)[1]: known for known in reversed(names)}
    near = difflib.get_close_matches(name.rsplit("/", 1)[-1], tails, n=1, cutoff=0.6)
    return tails[near[0]] if near else None
