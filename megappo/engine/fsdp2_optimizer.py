"""AdamW on this rank's fp32 shards, its schedule, clipping by the norm over all ranks, and the vote on gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from megappo.config.role_sections import OptimizerConfig
from megappo.engine.base import StepResult
from megappo.parallel.groups import ProcessGroups

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedOptimizer:
    """AdamW over the shards of one model.
    shards: name -> rectangle of this rank; may be empty. copied: names of shards that every tp rank has alike. updates: of the
    weights so far. schedule_steps: steps that the schedule counted, skipped ones too."""

    def __init__(
        self,
        shards: Mapping[str, torch.nn.Parameter],
        copied: Collection[str],
        groups: ProcessGroups,
        config: OptimizerConfig,
        total_steps: int,
        device: torch.device,
    ) -> None:
        self._shards, self._groups, self._config, self._total_steps = shards, groups, config, total_steps
        self._copied, self._device = copied, device
        self.updates, self.schedule_steps = 0, 0
        # No weight decay on norms and biases.
        decayed = [shard for shard in shards.values() if shard.dim() > 1]
        others = [shard for shard in shards.values() if shard.dim() == 1]
        kinds = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        held = [kind for kind in kinds if kind["params"]]
        self._optimizer = AdamW(held or [{"params": []}], lr=config.lr, betas=config.betas, eps=config.eps)
        # Allocated now: vLLM starts before the first step and takes all memory that it finds free.
        for shard in shards.values():
            moments = {name: torch.zeros_like(shard, requires_grad=False) for name in MOMENTS}
            self._optimizer.state[shard] = {"step": torch.zeros((), dtype=torch.float32), **moments}

    def position(self) -> dict[str, int]:
        """Return the arguments of `set_position` to go on from here."""
        return {"updates": self.updates, "schedule_steps": self.schedule_steps}

    def set_position(self, updates: int, schedule_steps: int) -> None:
        """Go on from a position, after the moments were loaded."""
        for state in self._optimizer.state.values():
            state["step"] = torch.tensor(float(updates))
        self.updates, self.schedule_steps = updates, schedule_steps
        self._set_lr()

    def advance_schedule(self) -> float:
        """Set the learning rate of the next step and return it."""
        self.schedule_steps += 1
        return self._set_lr()

    def _set_lr(self) -> float:
        lr = scheduled_lr(self._config, self.schedule_steps, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def step(self) -> StepResult:
        """Clip by the global norm and update; all ranks skip the step if the norm is not finite on one. Collective."""
        gradients = [shard.grad for shard in self._shards.values() if shard.grad is not None]
        assert len(gradients) == len(self._shards), "a step comes after a pass"
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, gradient in zip(self._shards, gradients):
            copies = self._groups.layout.tp if name in self._copied else 1
            squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square() / copies
        # Every gradient of every rank is in this sum, copies too: a NaN anywhere reaches all ranks, so the sum is the vote.
        dist.all_reduce(squares, group=self._groups.everyone)
        grad_norm = float(squares.sqrt())
        if not math.isfinite(grad_norm):
            return StepResult(grad_norm, applied=False)
        scale = self._config.clip_grad / (grad_norm + 1e-6)  # Megatron-core's, for equal numbers
        if 0 < scale < 1 and gradients:
            torch._foreach_mul_(gradients, scale)
        self._optimizer.step()
        self.updates += 1
        return StepResult(grad_norm, applied=True)

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, shard in self._shards.items():
            for moment in MOMENTS:
                yield moment, name, self._optimizer.state[shard][moment]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the optimizer's tensors in this rank's device memory, without the shards."""
        yield from (values for *_, values in self.moments())


def scheduled_lr(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 1) of `total_steps`, as in Megatron-core's scheduler.
    Step k of the warm-up uses k / warmup_steps of the peak. linear and cosine reach the smallest rate at the last step, which is at
    least one after the warm-up, and keep it."""
    warmup, last = config.warmup_steps, max(total_steps, config.warmup_steps + 1)
    if step <= warmup and warmup > 0:
        return config.lr * step / warmup
    if config.lr_schedule.type == "constant":
        return config.lr
    done = min(1.0, (step - warmup) / (last - warmup))
    left = 1.0 - done if config.lr_schedule.type == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
    lowest = config.min_lr
    return lowest + left * (config.lr - lowest)
