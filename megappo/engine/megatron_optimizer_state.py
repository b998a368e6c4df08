"""What an optimizer has learned, described for the sharded checkpoint: fp32 main parameters, both moments, the step number.

Hyperparameters are not part of it: after a resume the configuration rules. Every tensor is described like the model parameter
that it belongs to, so it can be read back in another layout and by the other kind of optimizer. Megatron-core 0.16's own
descriptions do not serve: they fail for fp32 parameters in bf16 models (the value head), and see `_pairs` and
`_gathered_values`.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = "fp32_param"
# Values of all ranks that are on the device at once while a bucket is gathered: 256 MiB.
GATHERED_VALUES = 1 << 26


def sharded_optimizer_state(
    chained: Sequence[MegatronOptimizer], model_state: dict[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    """"0", "1", ... (dense weights, experts) -> step: plain; parameters: ShardedTensors. chained: the optimizers of one model.
    model_state: the sharded_state_dicts of its chunks by number. Collective over data-parallel ranks.

    Moments that do not exist before the first step are created as zeros. The distributed optimizer's shards are gathered in host
    memory, piece by piece: 12 bytes for each parameter of this rank's model. What is written does not depend on the kind of
    optimizer.
    """
    for optimizer in chained:
        create_moments(optimizer.optimizer)
    # Rank 0's plain values are written, and the stage of rank 0 may hold no expert: the number is that of all together.
    step = _common_step(chained)
    return {
        str(index): {"step": step, "parameters": _sharded_parameters(optimizer, model_state, is_loading=is_loading)}
        for index, optimizer in enumerate(chained)
    }


def _sharded_parameters(optimizer: MegatronOptimizer, model_state: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    tensors, _ = extract_sharded_tensors_and_factories(model_state)
    described = {id(entry.data): entry for entry in nested_values(tensors)}
    values = _whole_values
    if isinstance(optimizer, DistributedOptimizer):
        values = _empty_values if is_loading else _gathered_values
    return {
        str(index): {
            name: make_sharded_optimizer_tensor(described[id(parameter)], value, prefix=f"optimizer.state.{name}")
            for name, value in named.items()
        }
        for index, (parameter, named) in enumerate(values(optimizer))
    }


def load_optimizer_state(chained: Sequence[MegatronOptimizer], state: dict[str, Any]) -> None:
    """state: as described by `sharded_optimizer_state` with is_loading, filled by the checkpoint reader."""
    for index, optimizer in enumerate(chained):
        # The reader drops the empty dict of a stage without experts.
        _load_parameters(optimizer, state[str(index)].get("parameters", {}))
        _set_step_number(optimizer.optimizer, state[str(index)]["step"])


@torch.no_grad()
def _load_parameters(optimizer: MegatronOptimizer, loaded: dict[str, Any]) -> None:
    held = {id(parameter): main for parameter, main in _pairs(optimizer)}
    for index, parameter in enumerate(_parameters(optimizer)):
        if id(parameter) not in held:
            continue  # another data-parallel rank updates it
        part = slice(None)
        if isinstance(optimizer, DistributedOptimizer):
            place = optimizer._get_model_param_range_map(parameter)["param"]
            part = slice(place.start, place.end)
        for name, target in _local_values(optimizer, parameter, held[id(parameter)]).items():
            target.copy_(loaded[str(index)][name].flatten()[part].view_as(target))


def _parameters(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Model parameters in an order that all data-parallel ranks share."""
    if isinstance(optimizer, DistributedOptimizer):
        for buffer in optimizer.buffers:
            yield from buffer.param_index_map
    else:
        yield from (parameter for parameter, _ in _pairs(optimizer))


def _pairs(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """(model parameter, the tensor that this rank updates for it). They are one, or share memory, where the parameter is fp32.

    Megatron's own table of the distributed optimizer numbers a group's parameters as they lie in the buffers, but fp32 ones are
    updated first: where a group has both, it points to wrong tensors. Training does not use that table, its checkpoints do.
    """
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


def _names(parameter: Tensor) -> tuple[str, ...]:
    return _MOMENTS if parameter.dtype == torch.float32 else (*_MOMENTS, _MAIN)


def _local_values(optimizer: MegatronOptimizer, parameter: Tensor, main: Tensor) -> dict[str, Tensor]:
    """What this rank holds for a parameter: the whole of it, or a flat part under the distributed optimizer."""
    state = optimizer.optimizer.state[main]
    return {name: main if name == _MAIN else state[name] for name in _names(parameter)}


def _whole_values(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    for parameter, main in _pairs(optimizer):
        yield parameter, _local_values(optimizer, parameter, main)


def _empty_values(optimizer: DistributedOptimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    for parameter in _parameters(optimizer):
        yield parameter, {name: torch.empty(parameter.shape, dtype=torch.float32) for name in _names(parameter)}


def _gathered_values(optimizer: DistributedOptimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Whole state of every parameter from the parts of the data-parallel ranks.

    Megatron's own gathering drops the padding between buckets but keeps counting it, which shifts everything behind it; a tied
    embedding has a bucket of its own.
    """
    held = {id(parameter): main for parameter, main in _pairs(optimizer)}
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges):
        (bucket_ranges,) = ranges.values()
        flat: dict[str, Tensor] = {}
        for bucket, bucket_range in zip(buffer.buckets, bucket_ranges):
            local = {
                id(parameter): (place["gbuf_local"], _local_values(optimizer, parameter, held[id(parameter)]))
                for parameter, place in bucket_range["param_map"].items()
            }
            for name in _names(buffer.params[0]):
                parts = [(at, named[name]) for at, named in local.values()]
                gathered = _gather_bucket(bucket.grad_data, parts, optimizer.data_parallel_group)
                flat.setdefault(name, torch.empty(buffer.numel))[bucket.offset : bucket.offset + gathered.numel()] = gathered
        for parameter, (start, end, _) in buffer.param_index_map.items():
            yield parameter, {name: whole[start:end].view(parameter.shape) for name, whole in flat.items()}


def _gather_bucket(like: Tensor, parts: list[tuple[Any, Tensor]], group: dist.ProcessGroup) -> Tensor:
    """[like.numel()] fp32 in host memory; every rank contributes an equal slice, in which it holds `parts` at their ranges.

    In pieces: a bucket holds all gradients of the model, and on the device there may be no room for as much again.
    """
    size, device = like.numel() // group.size(), like.device
    whole = torch.empty(group.size(), size)
    step = max(1, GATHERED_VALUES // group.size())
    for start in range(0, size, step):
        end = min(start + step, size)
        mine = torch.zeros(end - start, dtype=torch.float32, device=device)
        for place, values in parts:
            first, last = max(place.start, start), min(place.end, end)
            if first < last:
                mine[first - start : last - start] = values[first - place.start : last - place.start]
        gathered = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(gathered, mine, group=group)
        for rank, piece in enumerate(gathered):
            whole[rank, start:end] = piece
    return whole.flatten()


def _keeps_step_per_parameter(inner: torch.optim.Optimizer) -> bool:
    """torch's Adam does; the fused ones of TransformerEngine and Apex keep it in the parameter group."""
    return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))


def create_moments(inner: torch.optim.Optimizer) -> None:
    """Create Adam's moments, which otherwise come with the first step, as zeros where they do not exist: they take memory from now on."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            for name in _MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if _keeps_step_per_parameter(inner) and "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)


def _common_step(chained: Sequence[MegatronOptimizer]) -> int:
    """How often the parameters of this rank were updated. An optimizer without parameters here says nothing."""
    steps = {step for optimizer in chained for step in _step_numbers(optimizer.optimizer)}
    assert len(steps) <= 1, f"parameters were updated a different number of times: {sorted(steps)}"
    return steps.pop() if steps else 0


def _step_numbers(inner: torch.optim.Optimizer) -> set[int]:
    if _keeps_step_per_parameter(inner):
        return {int(state["step"]) for state in inner.state.values()}
    return {int(group.get("step", 0)) for group in inner.param_groups if group["params"]}


def _set_step_number(inner: torch.optim.Optimizer, step: int) -> None:
    if _keeps_step_per_parameter(inner):
        for state in inner.state.values():
            state["step"] = torch.tensor(float(step))
    else:
        for group in inner.param_groups:
            group["step"] = step
