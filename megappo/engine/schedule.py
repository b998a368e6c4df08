"""Learning rate by the number of optimizer steps, as Megatron-core's scheduler has it."""

from __future__ import annotations

import math

from megappo.config.role_sections import OptimizerConfig


def scheduled_lr(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step` (from 1) of `total_steps`: step k of the warm-up uses k / warmup_steps of the peak.

    linear and cosine reach the smallest rate at the last step, which is at least one behind the warm-up, and keep it.
    """
    warmup, last = config.warmup_steps, max(total_steps, config.warmup_steps + 1)
    if step <= warmup and warmup > 0:
        return config.lr * step / warmup
    if config.lr_schedule == "constant":
        return config.lr
    done = min(1.0, (step - warmup) / (last - warmup))
    left = 1.0 - done if config.lr_schedule == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
    lowest = config.lr * config.min_lr_ratio
    return lowest + left * (config.lr - lowest)
