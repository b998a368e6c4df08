"""State of an optimizer for checkpoints: fp32 main parameters, both moments, the step number.

Hyperparameters are not in it: after a resume the configuration's apply. Every tensor comes with its model parameter, so another
layout and the other kind of optimizer can read it back. Tensors share memory with the optimizer: a save copies nothing, a load
writes into place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer
from torch import Tensor

from megappo.engine.state_boxes import MAIN, MOMENTS
from megappo.models.kv_copies import counted_elements


class OptimizerState(NamedTuple):
    """One kind of state of a model parameter on this rank, sharing memory with the optimizer."""

    kind: str
    parameter: torch.nn.Parameter
    start: int  # of the values in the flattened parameter
    values: Tensor  # [n]
    is_alone: bool  # no other data-parallel rank has them


def held_state(optimizer: MegatronOptimizer) -> Iterator[OptimizerState]:
    """Yield the state on this rank: all of a parameter's, or flat parts under the distributed optimizer."""
    is_distributed = isinstance(optimizer, DistributedOptimizer)
    for parameter, main in _pairs(optimizer):
        start = _start(optimizer, parameter)
        for kind, values in _local_values(optimizer, parameter, main).items():
            yield OptimizerState(kind, parameter, start, values.detach().view(-1), is_distributed)


def counted_parts(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, int | None]]:
    """Yield (tensor that this rank updates, number of its first elements that its gradient norm counts, None for all)."""
    for parameter, main in _pairs(optimizer):
        count = counted_elements(parameter)
        yield main, None if count is None else min(max(0, count - _start(optimizer, parameter)), main.numel())


def _start(optimizer: MegatronOptimizer, parameter: torch.nn.Parameter) -> int:
    """First element of a flattened parameter that this rank updates."""
    is_distributed = isinstance(optimizer, DistributedOptimizer)
    return optimizer._get_model_param_range_map(parameter)["param"].start if is_distributed else 0


def _pairs(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Yield (model parameter, the tensor that this rank updates for it): the same tensor or memory if the parameter is fp32."""
    # Megatron's own table of the distributed optimizer numbers a group's parameters in buffer order, but fp32 ones are updated
    # first: in a group with both types it points to wrong tensors. Its checkpoints use that table, training does not. They also
    # gather a parameter's parts on one rank, and fail for fp32 parameters in bf16 models (the value head).
    groups = optimizer.optimizer.param_groups
    if isinstance(optimizer, DistributedOptimizer):
        for full, half, group in zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, groups):
            yield from zip([*full, *half], group["params"])
    elif isinstance(optimizer, FP32Optimizer):
        for group in groups:
            yield from ((parameter, parameter) for parameter in group["params"])
    else:
        assert isinstance(optimizer, Float16OptimizerWithFloat16Params)
        for parameters, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups):
            yield from zip(parameters, mains)
        for parameters in optimizer.fp32_from_fp32_groups:
            yield from ((parameter, parameter) for parameter in parameters)


def whole_main_parameters(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (model parameter, the whole fp32 tensor updated in its place); nothing of a sharded optimizer."""
    if not isinstance(optimizer, DistributedOptimizer):
        yield from ((parameter, main) for parameter, main in _pairs(optimizer) if main is not parameter)


def gathered_main_parameters(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (bf16 model parameter, its whole fp32 main parameter), one at a time.
    A sharded optimizer gathers copies of them. Collective over the ranks that share it."""
    if not isinstance(optimizer, DistributedOptimizer):
        yield from whole_main_parameters(optimizer)
        return
    if optimizer.is_stub_optimizer:  # nothing of this kind trains on this rank
        return
    parts = {id(one.parameter): (one.start, one.values) for one in held_state(optimizer) if one.kind == MAIN}
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:  # in one order on all ranks, also those without a part of it
            if parameter.dtype != torch.float32:
                whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
                if id(parameter) in parts:
                    start, values = parts[id(parameter)]
                    whole[start : start + values.numel()] = values
                dist.all_reduce(whole, group=optimizer.data_parallel_group)  # exact: each element has one part
                yield parameter, whole.view(parameter.shape)


def _local_values(optimizer: MegatronOptimizer, parameter: Tensor, main: Tensor) -> dict[str, Tensor]:
    state = optimizer.optimizer.state[main]
    found = {name: state[name] for name in MOMENTS}
    return found if parameter.dtype == torch.float32 else {**found, MAIN: main}


def _keeps_step_per_parameter(inner: torch.optim.Optimizer) -> bool:
    # The fused optimizers of TransformerEngine and Apex keep the step in the parameter group.
    return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))


def create_moments(inner: torch.optim.Optimizer) -> None:
    """Create missing moments of Adam as zeros, instead of at the first step."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            for name in MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if _keeps_step_per_parameter(inner) and "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)


def common_step(chained: Sequence[MegatronOptimizer]) -> int:
    """Return the number of updates of this rank's parameters; optimizers without parameters here are ignored."""
    steps = {step for optimizer in chained for step in _step_numbers(optimizer.optimizer)}
    assert len(steps) <= 1, f"parameters were updated a different number of times: {sorted(steps)}"
    return steps.pop() if steps else 0


def _step_numbers(inner: torch.optim.Optimizer) -> set[int]:
    if _keeps_step_per_parameter(inner):
        return {int(state["step"]) for state in inner.state.values()}
    return {int(group.get("step", 0)) for group in inner.param_groups if group["params"]}


def set_step_number(inner: torch.optim.Optimizer, step: int) -> None:
    if _keeps_step_per_parameter(inner):
        for state in inner.state.values():
            state["step"] = torch.tensor(float(step))
    else:
        for group in inner.param_groups:
            group["step"] = step
