"""Memory of one rank of a role under FSDP2, from the shapes of its shards.

Weights, gradients and moments are exact; gathered layers are counted by what FSDP2 holds at once, and activations are estimated as
Megatron-core's, with the same recomputation.
"""

from __future__ import annotations

from dataclasses import replace

from megappo.models.arch import ModelArch
from megappo.models.row_shards import shard_box
from megappo.models.weight_map import hf_cuts, hf_layer, hf_tensors
from megappo.parallel.layout import ParallelLayout
from megappo.plan.activations import FP32
from megappo.plan.memory import RoleMemory


def sharded_memory(
    megatron: RoleMemory,
    arch: ModelArch,
    layout: ParallelLayout,
    itemsize: int,
    *,
    trained: bool,
    value_head: bool,
    offload: tuple[bool, bool, bool],
) -> RoleMemory:
    """The memory of a Megatron rank of the same role, with the shards of the fullest rank of `layout` in place of whole weights.

    itemsize: bytes of a number in computation. offload: parameters, gradients, optimizer.
    """
    shapes, cuts = hf_tensors(arch, value_head), hf_cuts(arch, value_head)

    def sizes(over: ParallelLayout) -> dict[str, int]:
        """Name -> numbers of its shard on the first rank, which is the fullest."""
        return {name: box.area for name, shape in shapes.items() if (box := shard_box(shape, cuts[name], over, 0)) is not None}

    held = sum(sizes(layout).values())
    whole = sizes(ParallelLayout(layout.tp, tp=layout.tp))  # of one tp rank, while it is gathered
    layer = sum(size for name, size in whole.items() if name.startswith(hf_layer(0)))
    root = sum(whole.values()) - arch.num_layers * layer
    weights = held * (FP32 if trained else itemsize)
    gradients, optimizer = (held * FP32, 2 * held * FP32) if trained else (0, 0)
    # The root's group stays gathered, and of the layers the one at work and the next.
    gathered = (root + 2 * layer) * itemsize
    # In the backward also whole gradients: the root's and a layer's, once more in fp32 while they are reduced.
    reducing = (root + layer) * (itemsize + FP32) if trained else 0
    parameters_away, gradients_away, optimizer_away = offload
    return replace(
        megatron,
        parameters=held,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=megatron.activations + gathered + reducing,
        forward=megatron.forward + gathered,
        offloaded=weights * parameters_away + gradients * gradients_away,
        offloaded_weights=weights * parameters_away,
        offloaded_optimizer=optimizer * optimizer_away,
        step_buffers=held * FP32 if trained else 0,  # AdamW's foreach holds the roots of all second moments at once
        written=weights + optimizer if trained else 0,
        written_weights=weights if trained else 0,
    )
