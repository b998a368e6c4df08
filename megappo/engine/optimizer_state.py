"""What an optimizer has learned, described for the sharded checkpoint: fp32 main parameters, both moments, the step number.

Hyperparameters are not part of it: after a resume the configuration rules. Every tensor is described like the model parameter that it
belongs to, so it can be read back in another layout. Megatron-core's own descriptions lose fp32 parameters of bf16 models (the value
head) without the distributed optimizer, and its loading with torch's AdamW misses `step`.
"""

from __future__ import annotations

from typing import Any, Iterator

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


def sharded_optimizer_state(optimizer: MegatronOptimizer, model_state: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    """step: plain. parameters: ShardedTensors. model_state: the model's sharded_state_dict. Collective over data-parallel ranks.

    Moments that do not exist before the first step are created as zeros.
    """
    _create_moments(optimizer.optimizer)
    if isinstance(optimizer, DistributedOptimizer):
        _index_as_updated(optimizer)
        parameters = optimizer.sharded_param_state_fully_reshardable(model_state, is_loading, {})
    else:
        parameters = _whole_parameters(optimizer, model_state)
    return {"step": _step_number(optimizer.optimizer), "parameters": parameters}


@torch.no_grad()
def load_optimizer_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """state: as described by `sharded_optimizer_state` with is_loading, filled by the checkpoint reader."""
    inner = optimizer.optimizer
    if isinstance(optimizer, DistributedOptimizer):
        # Megatron copies every entry of a parameter's state from the checkpoint, and torch's AdamW keeps a step beside the moments.
        for entry in inner.state.values():
            entry.pop("step", None)
        optimizer.load_parameter_state_from_fully_reshardable(state["parameters"])
    else:
        for index, (_, main) in enumerate(_parameter_pairs(optimizer)):
            loaded = state["parameters"][str(index)]
            for name in _MOMENTS:
                inner.state[main][name].copy_(loaded[name])
            if "fp32_param" in loaded:
                main.copy_(loaded["fp32_param"])
    _set_step_number(inner, state["step"])


def _whole_parameters(optimizer: MegatronOptimizer, model_state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    tensors, _ = extract_sharded_tensors_and_factories(model_state)
    described = {id(entry.data): entry for entry in nested_values(tensors)}
    parameters = {}
    for index, (parameter, main) in enumerate(_parameter_pairs(optimizer)):
        values = {name: optimizer.optimizer.state[main][name] for name in _MOMENTS}
        if main is not parameter:
            values["fp32_param"] = main
        parameters[str(index)] = {
            name: make_sharded_optimizer_tensor(described[id(parameter)], value, prefix=f"optimizer.state.{name}")
            for name, value in values.items()
        }
    return parameters


def _parameter_pairs(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """(model parameter, the tensor that the optimizer updates), which are one where the model is fp32."""
    if isinstance(optimizer, FP32Optimizer):
        for group in optimizer.optimizer.param_groups:
            yield from ((parameter, parameter) for parameter in group["params"])
        return
    assert isinstance(optimizer, Float16OptimizerWithFloat16Params)
    for parameters, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups):
        yield from zip(parameters, mains)
    for parameters in optimizer.fp32_from_fp32_groups:
        yield from ((parameter, parameter) for parameter in parameters)


def _index_as_updated(optimizer: DistributedOptimizer) -> None:
    """Megatron numbers a group's parameters as they lie in the buffers but updates the fp32 ones first.

    Where a group has both, its table points to the wrong tensors. Training does not use the table, checkpoints do.
    """
    for group, (full, half) in enumerate(zip(optimizer.model_fp32_groups, optimizer.model_float16_groups)):
        for order, parameter in enumerate([*full, *half]):
            optimizer.model_param_group_index_map[parameter] = (group, order)


def _keeps_step_per_parameter(inner: torch.optim.Optimizer) -> bool:
    """torch's Adam does; the fused ones of TransformerEngine and Apex keep it in the parameter group."""
    return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))


def _create_moments(inner: torch.optim.Optimizer) -> None:
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            for name in _MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if _keeps_step_per_parameter(inner) and "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)


def _step_number(inner: torch.optim.Optimizer) -> int:
    if _keeps_step_per_parameter(inner):
        steps = {int(state["step"]) for state in inner.state.values()}
    else:
        steps = {int(group.get("step", 0)) for group in inner.param_groups if group["params"]}
    assert len(steps) <= 1, f"parameters were updated a different number of times: {sorted(steps)}"
    return steps.pop() if steps else 0


def _set_step_number(inner: torch.optim.Optimizer, step: int) -> None:
    if _keeps_step_per_parameter(inner):
        for state in inner.state.values():
            state["step"] = torch.tensor(float(step))
    else:
        for group in inner.param_groups:
            group["step"] = step
