"""AdamW and its learning-rate schedule around a sharded model, by Megatron-core's optimizer and scheduler."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megappo.config.role_sections import OptimizerConfig
from megappo.engine.base import StepResult
from megappo.engine.megatron_optimizer_state import (
    OptimizerState,
    common_step,
    counted_parts,
    create_moments,
    gathered_main_parameters,
    held_state,
    set_step_number,
    whole_main_parameters,
)
from megappo.models.build import accumulate_into_main_grad
from megappo.parallel.consensus import any_rank
from megappo.parallel.device import as_world
from megappo.parallel.groups import ProcessGroups


def wrap_with_ddp(
    chunks: Sequence[torch.nn.Module], groups: ProcessGroups, *, distributed_optimizer: bool
) -> list[DistributedDataParallel]:
    """Give every model chunk fp32 gradient buffers and their reduction over data-parallel ranks."""
    for chunk in chunks:
        accumulate_into_main_grad(chunk)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    # Casts: to the type checker a chunk is any module, whose attributes have no type.
    return [
        DistributedDataParallel(cast(TransformerConfig, chunk.config), config, chunk, pg_collection=groups.collection)
        for chunk in chunks
    ]


def schedule_of(optimizer: Any, config: OptimizerConfig, total_steps: int) -> OptimizerParamScheduler:
    """Make the learning-rate schedule of an optimizer with torch's `param_groups`; a group's `wd_mult` scales its weight decay.
    Step k of the warm-up uses k / warmup_steps of the peak. linear and cosine reach the smallest rate at the last step, which is at
    least one after the warm-up, and keep it."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(total_steps, config.warmup_steps + 1),
        lr_decay_style=config.lr_schedule.type,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


class Optimizer:
    """Megatron-core's optimizer with its schedule; a step whose gradient is not finite is skipped on every rank of the role."""

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], groups: ProcessGroups, config: OptimizerConfig, total_steps: int
    ) -> None:
        params_dtype = chunks[0].config.params_dtype
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=params_dtype == torch.bfloat16,
            params_dtype=params_dtype,
            use_distributed_optimizer=config.distributed,
        )
        with as_world(groups.host):  # Megatron agrees on the parameter groups over the default group
            self._optimizer: MegatronOptimizer = get_megatron_optimizer(
                settings, list(chunks), pg_collection=groups.collection, use_gloo_process_groups=False
            )
        self._everyone = groups.host
        # Allocated now: vLLM starts before the first step and takes all memory that it finds free.
        for inner in self._chained():
            create_moments(inner.optimizer)
            _count_copies_once(inner)
        self._clip_grad = config.clip_grad
        self._scheduler = schedule_of(self._optimizer, config, total_steps)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def advance_schedule(self) -> float:
        self._scheduler.step(increment=1)
        return max(group["lr"] for group in self._optimizer.param_groups)

    @property
    def schedule_steps(self) -> int:
        return self._scheduler.num_steps  # skipped steps count too

    def step(self) -> StepResult:
        """Clip by the global norm and update; all ranks skip the step if the norm is not finite. Collective over the role."""
        found_inf = self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        # A vote, although the norm is a sum over ranks: copies on dp ranks are assumed equal there, and counted once.
        if any_rank(bool(found_inf) or not math.isfinite(grad_norm), self._everyone):
            # This rank's norm may be finite where another rank found an infinity: report NaN then.
            return StepResult(math.nan if math.isfinite(grad_norm) else grad_norm, applied=False)
        if self._clip_grad > 0:
            for optimizer in self._chained():
                parameters: list[Tensor] = [*optimizer.get_parameters()]
                if parameters:
                    clip_grad_by_total_norm_fp32(parameters, max_norm=self._clip_grad, total_norm=grad_norm)
        self._optimizer.step_with_ready_grads()
        return StepResult(grad_norm, applied=True)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the main parameters and moments that this rank holds."""
        for optimizer in self._chained():
            for group in optimizer.optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)

    def main_parameters(self, *, gather: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (bf16 model parameter, its whole fp32 copy); see `Engine.main_parameters`."""
        for optimizer in self._chained():
            yield from gathered_main_parameters(optimizer) if gather else whole_main_parameters(optimizer)

    def reload_main_parameters(self) -> None:
        """Copy the model's weights into the fp32 main parameters, after weights were loaded from elsewhere."""
        self._optimizer.reload_model_params()

    def held_state(self) -> Iterator[OptimizerState]:
        for optimizer in self._chained():
            yield from held_state(optimizer)

    def position(self) -> dict[str, int]:
        """Return the arguments of `set_position` to go on from here."""
        return {"updates": common_step(self._chained()), "schedule_steps": self.schedule_steps}

    def set_position(self, updates: int, schedule_steps: int) -> None:
        """Go on after so many updates of the weights and steps of the schedule, with the current state."""
        for optimizer in self._chained():
            set_step_number(optimizer.optimizer, updates)
        self._scheduler.num_steps = 0  # the scheduler only goes forward
        self._scheduler.step(increment=schedule_steps)

    def _chained(self) -> list[MegatronOptimizer]:
        return list(getattr(self._optimizer, "chained_optimizers", [self._optimizer]))


def _count_copies_once(optimizer: MegatronOptimizer) -> None:
    """Leave out of the gradient norm the copies that another tp rank counts."""
    # Megatron counts a parameter that tp cuts as a whole.
    partly = [(main, found) for main, found in counted_parts(optimizer) if found is not None]
    # Its name in 0.19, where it takes a group of parameters with a norm of its own, and before.
    names = ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm")
    name = next(name for name in names if hasattr(optimizer, name))
    every = getattr(optimizer, name)

    def counted(*group: str | None) -> list[Tensor]:
        grads = [(main.grad, count) for main, count in partly]
        parts = {id(grad): count for grad, count in grads}
        return [grad.view(-1)[: parts.get(id(grad), grad.numel())] for grad in every(*group) if parts.get(id(grad)) != 0]

    if partly:
        setattr(optimizer, name, counted)
