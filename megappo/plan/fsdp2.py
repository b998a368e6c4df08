"""Memory of one rank of a role under FSDP2, from the shapes of its shards.

Weights, gradients and moments are exact; gathered layers are counted by what FSDP2 holds at once, and activations are estimated as
Megatron-core's, with the same recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megappo.config.role_sections import LoraConfig
from megappo.models.arch import ModelArch
from megappo.models.lora import shapes_beside_base
from megappo.models.row_shards import shard_box
from megappo.models.weight_map import hf_cuts, hf_layer, hf_tensors
from megappo.models.weight_rules import Cut, Shape
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
    lora: LoraConfig | None = None,
) -> RoleMemory:
    """The memory of a Megatron rank of the same role, with the shards of the fullest rank of `layout` in place of whole weights.

    itemsize: bytes of a number in computation. offload: parameters, gradients, optimizer. lora: adapters on a frozen base.
    """
    shapes = hf_tensors(arch, value_head)
    beside = shapes if lora is None else shapes_beside_base(shapes, lora)
    cuts = {**dict.fromkeys(beside, Cut(None)), **hf_cuts(arch, value_head)}
    shapes |= beside
    train = beside if trained else {}

    def sizes(of: Mapping[str, Shape], over: ParallelLayout) -> dict[str, int]:
        """Name -> numbers of its shard on the first rank, which is the fullest."""
        return {name: box.area for name, shape in of.items() if (box := shard_box(shape, cuts[name], over, 0)) is not None}

    def in_groups(of: Mapping[str, Shape]) -> tuple[int, int]:
        """Numbers of the root's group and of a layer's on one tp rank, while they are gathered."""
        whole = sizes(of, ParallelLayout(layout.tp, tp=layout.tp))
        layer = sum(size for name, size in whole.items() if name.startswith(hf_layer(0)))
        return sum(whole.values()) - arch.num_layers * layer, layer

    held, moving = sum(sizes(shapes, layout).values()), sum(sizes(train, layout).values())
    root, layer = in_groups(shapes)
    weights = moving * FP32 + (held - moving) * itemsize
    gradients, optimizer = moving * FP32, 2 * moving * FP32
    # The root's group stays gathered, and of the layers the one at work and the next.
    gathered = (root + 2 * layer) * itemsize
    # In the backward also whole gradients: the root's and a layer's, once more in fp32 while they are reduced.
    reducing = sum(in_groups(train)) * (itemsize + FP32)
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
        step_buffers=moving * FP32,  # AdamW's foreach holds the roots of all second moments at once
        written=moving * FP32 + optimizer,
        written_weights=moving * FP32,
    )
