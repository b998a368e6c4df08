"""State of an optimizer for the sharded checkpoint: fp32 main parameters, both moments, the step number.

Hyperparameters are not part of it: after a resume the configuration's apply. Every tensor is described like the model parameter
that it belongs to, so it can be read back in another layout and by the other kind of optimizer; under the distributed optimizer
every rank describes the flat parts that it holds, as boxes (`checkpoint/ranges.py`). The descriptions share memory with the
optimizer: a save copies nothing, a load writes into place. Megatron-core 0.16's own are not used: they gather a parameter's parts
on one rank, fail for fp32 parameters in bf16 models (the value head), and can point to wrong tensors (`_pairs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer
from torch import Tensor

from megappo.checkpoint.ranges import cut, unreplicated_id

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = "fp32_param"


def sharded_optimizer_state(chained: Sequence[MegatronOptimizer], model_state: dict[str, Any]) -> dict[str, Any]:
    """ "0", "1", ... (dense weights, experts) -> "step": plain; "0", "1", ...: ShardedTensors.

    chained: the optimizers of one model. model_state: the sharded_state_dicts of its chunks by number. Moments that do not exist
    before the first step are created as zeros. The description does not depend on the kind of optimizer.
    """
    for optimizer in chained:
        create_moments(optimizer.optimizer)
    # Plain values are written by rank 0, whose stage may hold no expert: the step number is agreed over all optimizers.
    step = _common_step(chained)
    tensors, _ = extract_sharded_tensors_and_factories(model_state)
    described = {id(entry.data): entry for entry in nested_values(tensors)}
    return {
        str(index): {"step": step, **{str(n): tensor for n, tensor in enumerate(_sharded_tensors(optimizer, described))}}
        for index, optimizer in enumerate(chained)
    }


def set_described_step(chained: Sequence[MegatronOptimizer], state: dict[str, Any]) -> None:
    """Set the step number in `state`, a description by `sharded_optimizer_state`, to that of now."""
    step = _common_step(chained)
    for described in state.values():
        described["step"] = step


def _sharded_tensors(
    optimizer: MegatronOptimizer, described: dict[int, ShardedTensor | ShardedTensorFactory]
) -> Iterator[ShardedTensor]:
    """Descriptions of an optimizer's tensors. described: description of a model parameter, by the parameter's id."""
    shards: dict[int, list[tuple[int, ShardedTensor]]] = {}  # of a parameter, once for all its kinds of state
    is_distributed = isinstance(optimizer, DistributedOptimizer)
    for name, parameter, start, values in held_state(optimizer):
        if id(parameter) not in shards:
            shards[id(parameter)] = list(_shards(described[id(parameter)]))
        for at, shard in shards[id(parameter)]:
            assert shard.data is not None  # Megatron has None for shards that are only compared
            first, last = max(at, start), min(at + shard.data.numel(), start + values.numel())
            replica_id = unreplicated_id(shard.replica_id) if is_distributed else shard.replica_id
            own = values[first - start : max(first, last) - start]
            yield from cut(shard, first - at, own, f"optimizer.state.{name}.{shard.key}", replica_id)


def held_state(optimizer: MegatronOptimizer) -> Iterator[tuple[str, torch.nn.Parameter, int, Tensor]]:
    """(kind, model parameter, start in the flattened parameter, values [n]) of the state on this rank.

    The values are all of a parameter's, or a part under the distributed optimizer, and share memory with the optimizer.
    """
    for parameter, main in _pairs(optimizer):
        start = 0
        if isinstance(optimizer, DistributedOptimizer):
            start = optimizer._get_model_param_range_map(parameter)["param"].start
        for name, values in _local_values(optimizer, parameter, main).items():
            yield name, parameter, start, values.detach().view(-1)


def _shards(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[int, ShardedTensor]]:
    """(start in the flattened parameter, shard): one, or two if the checkpoint stores gate and up projection separately."""
    if isinstance(entry, ShardedTensor):
        yield 0, entry
        return
    for shard in nested_values(entry.build()):
        begin = (shard.data.data_ptr() - entry.data.data_ptr()) // entry.data.itemsize
        assert shard.data.is_contiguous() and 0 <= begin < entry.data.numel(), f"{shard.key} is no range of its parameter"
        yield begin, shard


def load_optimizer_state(chained: Sequence[MegatronOptimizer], state: dict[str, Any]) -> None:
    """Set the step numbers from `state`, as described by `sharded_optimizer_state`; its tensors are the optimizers' own, already
    filled by the reader."""
    for index, optimizer in enumerate(chained):
        set_step_number(optimizer.optimizer, state[str(index)]["step"])


def _pairs(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """(model parameter, the tensor that this rank updates for it); the same tensor or memory if the parameter is fp32."""
    # Not by Megatron's own table of the distributed optimizer: it numbers a group's parameters in buffer order, but fp32 ones are
    # updated first, so in a group with both types it points to wrong tensors. Training does not use that table, its checkpoints do.
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
    """(model parameter, the whole fp32 tensor that this rank updates in its place); a sharded optimizer has none."""
    if not isinstance(optimizer, DistributedOptimizer):
        yield from ((parameter, main) for parameter, main in _pairs(optimizer) if main is not parameter)


def gathered_main_parameters(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """(bf16 model parameter, its whole fp32 main parameter), one at a time.

    A sharded optimizer gathers the parts, collectively over the ranks that share it; the tensor then is a copy.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        yield from whole_main_parameters(optimizer)
        return
    if optimizer.is_stub_optimizer:  # nothing of this kind trains on this rank
        return
    parts = {id(parameter): (start, values) for name, parameter, start, values in held_state(optimizer) if name == _MAIN}
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:  # in one order on all ranks, also those without a part of it
            if parameter.dtype != torch.float32:
                whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
                if id(parameter) in parts:
                    start, values = parts[id(parameter)]
                    whole[start : start + values.numel()] = values
                dist.all_reduce(whole, group=optimizer.data_parallel_group)  # exact: each element has one part
                yield parameter, whole.view(parameter.shape)


def _names(parameter: Tensor) -> tuple[str, ...]:
    return _MOMENTS if parameter.dtype == torch.float32 else (*_MOMENTS, _MAIN)


def _local_values(optimizer: MegatronOptimizer, parameter: Tensor, main: Tensor) -> dict[str, Tensor]:
    """State on this rank for a parameter: all of it, or a flat part under the distributed optimizer."""
    state = optimizer.optimizer.state[main]
    return {name: main if name == _MAIN else state[name] for name in _names(parameter)}


def _keeps_step_per_parameter(inner: torch.optim.Optimizer) -> bool:
    """True for torch's Adam; the fused ones of TransformerEngine and Apex keep the step in the parameter group."""
    return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))


def create_moments(inner: torch.optim.Optimizer) -> None:
    """Create missing moments of Adam as zeros, instead of at the first step."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            for name in _MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if _keeps_step_per_parameter(inner) and "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)


def _common_step(chained: Sequence[MegatronOptimizer]) -> int:
    """Number of updates of this rank's parameters; optimizers without parameters here are ignored."""
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
