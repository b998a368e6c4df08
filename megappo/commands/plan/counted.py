"""Parameter counts of Megatron-core's own modules: the model of a rank, built on the meta device in the run's world.

Independent of the weight maps' shapes, and slower (it imports Megatron-core). `megappo plan` uses it.
"""

from __future__ import annotations

import torch

from megappo.commands.plan.memory import EXPERTS, Counter, ParameterCount
from megappo.models.arch import ModelArch
from megappo.models.weight_map import LOCAL_VALUE_HEAD
from megappo.parallel.layout import ParallelLayout


def counter_of_built_models() -> Counter:
    """Make a counter that builds each kind of stage once and caches the count."""
    known: dict[tuple[object, ...], ParameterCount] = {}

    def count(arch: ModelArch, layout: ParallelLayout, stage: int, value_head: bool = False) -> ParameterCount:
        key = (arch, layout, value_head, _kind(arch, layout, stage))
        if key not in known:
            known[key] = _count_built(arch, layout, stage, value_head)
        return known[key]

    return count


def _kind(arch: ModelArch, layout: ParallelLayout, stage: int) -> tuple[object, ...]:
    """Key of stages whose modules have the same sizes: the same ends of the model, and as many layers with and without experts."""
    sparse = [arch.is_sparse(layer) for layer in layout.stage_layers(arch.num_layers, stage)]
    return stage == 0, stage == layout.pp - 1, len(sparse), sum(sparse)


def _count_built(arch: ModelArch, layout: ParallelLayout, stage: int, value_head: bool) -> ParameterCount:
    # Megatron-core takes seconds to import: only after the configuration has passed its checks.
    from megappo.models.meta import parameters_of_rank

    parameters = parameters_of_rank(arch, layout, layout.rank_of(pp=stage), dtype=torch.bfloat16, value_head=value_head)
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    full_precision = {name for name, parameter in parameters.items() if parameter.dtype == torch.float32}
    assert full_precision <= {LOCAL_VALUE_HEAD}, f"fp32 parameters in a bf16 model: {sorted(full_precision)}"
    experts = sum(size for name, size in sizes.items() if EXPERTS in name)
    return ParameterCount(sum(sizes.values()) - experts, experts, sum(sizes[name] for name in full_precision))
