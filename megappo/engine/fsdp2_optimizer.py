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
from megappo.engine.megatron_optimizer import schedule_of
from megappo.parallel.groups import ProcessGroups

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedOptimizer:
    """AdamW over the shards of one model.
    shards: name -> rectangle of this rank; may be empty. copied: names of shards that every tp rank has alike. updates: of the
    weights so far."""

    def __init__(
        self,
        shards: Mapping[str, torch.nn.Parameter],
        copied: Collection[str],
        groups: ProcessGroups,
        config: OptimizerConfig,
        total_steps: int,
        device: torch.device,
    ) -> None:
        self._shards, self._groups, self._clip_grad = shards, groups, config.clip_grad
        self._copied, self._device, self.updates = copied, device, 0
        # No weight decay on norms and biases.
        of_vectors = {name for name, shard in shards.items() if shard.dim() == 1 or name.endswith("_bias")}  # biases of experts
        decayed = [shard for name, shard in shards.items() if name not in of_vectors]
        others = [shard for name, shard in shards.items() if name in of_vectors]
        kinds = [{"params": decayed, "wd_mult": 1.0}, {"params": others, "wd_mult": 0.0}]
        held = [kind for kind in kinds if kind["params"]]
        self._optimizer = AdamW(held or [{"params": []}], lr=config.lr, betas=config.betas, eps=config.eps)
        self._scheduler = schedule_of(self._optimizer, config, total_steps)
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
        self.updates = updates
        self._scheduler.num_steps = 0  # the scheduler only goes forward
        self._scheduler.step(increment=schedule_steps)

    @property
    def schedule_steps(self) -> int:
        return self._scheduler.num_steps  # skipped steps count too

    def advance_schedule(self) -> float:
        self._scheduler.step(increment=1)
        return self._optimizer.param_groups[0]["lr"]

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
        scale = self._clip_grad / (grad_norm + 1e-6)  # Megatron-core's, for equal numbers
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
