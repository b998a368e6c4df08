"""Memory of one rank of a role under FSDP2, from the shapes of its shards. Weights, gradients and moments are exact. Gathered
layers are what FSDP2 holds at once; activations are an estimate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from megappo.commands.plan.activations import FP32, ITEMSIZE, Recompute, RoleWork, score_bytes_per_token, sequence_shards
from megappo.commands.plan.hf_activations import Gathered, OwnPasses, forward_peak, training_peak
from megappo.commands.plan.memory import ParameterCount, RoleMemory
from megappo.config.role_sections import LoraConfig
from megappo.models.arch import ModelArch
from megappo.models.freeze import frozen_whole
from megappo.models.int8_linear import SCALE_BYTES, most_blocks
from megappo.models.lora import ADAPTER_A, ADAPTER_B, adapted_of, int8_modules, shapes_beside_base
from megappo.models.lora_shards import adapter_cuts
from megappo.models.row_shards import layer_prefix, rows_of_rank, shard_box, shards_of, stacks_of
from megappo.models.weight_map import EMBEDDING, OUTPUT, VALUE_HEAD, hf_cuts
from megappo.models.weight_rules import Cut
from megappo.parallel.layout import ParallelLayout


def count_own_parameters(arch: ModelArch, layout: ParallelLayout, stage: int, value_head: bool = False) -> ParameterCount:
    """Count the parameters of transformers' class on one tp rank, unsharded. It is a `memory.Counter`."""
    return _count_own(arch, layout.tp, value_head)


@cache  # a search of layouts asks thousands of times
def _count_own(arch: ModelArch, tp: int, value_head: bool) -> ParameterCount:
    sizes = _sizes(arch, ParallelLayout(tp, tp=tp), value_head)
    return ParameterCount(sum(sizes.values()), 0, sizes.get(VALUE_HEAD, 0))


def count_own_unfrozen(
    arch: ModelArch, layout: ParallelLayout, stage: int, frozen: frozenset[str], count: ParameterCount, value_head: bool
) -> ParameterCount:
    """Count the parameters of transformers' class that are not frozen, from `count_own_parameters`."""
    sizes = _sizes(arch, ParallelLayout(layout.tp, tp=layout.tp), value_head)
    away = sum(sizes[name] for name in frozen_whole(arch, frozen, value_head=value_head))
    return ParameterCount(count.dense - away, count.experts, count.fp32)


def _sizes(arch: ModelArch, layout: ParallelLayout, value_head: bool) -> dict[str, int]:
    """Parameter -> elements of its shard on the first rank, which is the fullest."""
    return {name: prod(shape) for name, (_, shape) in shards_of(arch, layout, 0, value_head).items()}


def score_bytes(arch: ModelArch, tokens: int, longest: int, itemsize: int, recompute: Recompute) -> tuple[int, int]:
    """Bytes of attention scores in (a pass without gradients, a training pass); (0, 0) for models that do not store them. tokens:
    of a micro-batch, in sequences of `longest` tokens."""
    kept, working = (tokens * one for one in score_bytes_per_token(arch, ParallelLayout(1), longest, itemsize))
    rounded = kept * itemsize // (FP32 + itemsize)
    return working + rounded, working + kept * (arch.num_layers if recompute == "none" else 1)


def inputs_away(arch: ModelArch, layout: ParallelLayout, tokens: int, itemsize: int) -> int:
    """Bytes of layer inputs in a rank's host memory, for a micro-batch of `tokens` over its cp ranks: of all layers but one."""
    return -(-tokens // layout.cp) * (arch.num_layers - 1) * (arch.hidden_size // sequence_shards(layout)) * itemsize


@dataclass(frozen=True)
class _Shards:
    """Shards of the fullest rank, and what it gathers for its tp rank. Names are those of Hugging Face tensors and adapters."""

    held: int  # elements of all parameters
    moving: int  # elements of those that train
    weights: int  # bytes of the shards
    read: int  # bytes of the largest weight that a product rebuilds from 8 bits
    whole: int  # elements of those that train when gathered
    gathered: Gathered


def _shards_of(arch: ModelArch, layout: ParallelLayout, work: RoleWork) -> _Shards:
    value_head, lora, itemsize = work.value_head, work.lora, ITEMSIZE[work.dtype]
    still = frozen_whole(arch, work.frozen, value_head=value_head)
    of_adapters = {} if lora is None else shapes_beside_base(arch, lora, value_head)
    stacks = stacks_of(arch, set(adapted_of(of_adapters)))
    stacked = {
        stack.name + part: (len(stack.modules), prod(of_adapters[stack.modules[0] + part]))
        for stack in stacks
        for part in (ADAPTER_A, ADAPTER_B)
    }
    for stack in stacks:
        for module in stack.modules:
            del of_adapters[module + ADAPTER_A], of_adapters[module + ADAPTER_B]
    cuts = adapter_cuts(arch, adapted_of(of_adapters))

    def sizes(over: ParallelLayout) -> tuple[dict[str, int], dict[str, int]]:
        """Elements of the shards on the first rank, which is the fullest: (all parameters, those that train)."""
        base = _sizes(arch, over, value_head)
        boxes = {name: shard_box(shape, cuts.get(name, Cut(None)), over, 0) for name, shape in of_adapters.items()}
        beside = {name: box.area for name, box in boxes.items() if box is not None}
        for name, (experts, each) in stacked.items():
            beside[name] = rows_of_rank(experts, over.dp * over.cp, 0)[1] * each
        everything = {**base, **beside}
        trains = beside if lora is not None else {name: size for name, size in everything.items() if name not in still}
        return everything, trains if work.trained else {}

    int8 = _rows_in_8_bits(arch, layout, lora)

    def in_bytes(numbers: Mapping[str, int]) -> dict[str, int]:
        """Bytes of tensors in the type of computation, and of those in 8 bits with their two-byte scales."""
        return {
            name: size * itemsize if name not in int8 else size + SCALE_BYTES * (size // int8[name][0]) * int8[name][1]
            for name, size in numbers.items()
        }

    # What FSDP2 gathers: in a world of only the tp ranks, weights are whole apart from tp.
    (of_rank, moving_of_rank), (gathered, moving_gathered) = sizes(layout), sizes(ParallelLayout(layout.tp, tp=layout.tp))
    moving = sum(moving_of_rank.values())
    still_in_bytes = in_bytes({name: size for name, size in of_rank.items() if name not in moving_of_rank})
    root, layer = _in_groups(in_bytes(gathered))
    moving_root, moving_layer = _in_groups(moving_gathered)
    in_layers = [size for name, size in moving_gathered.items() if layer_prefix(name)]
    projection = EMBEDDING if arch.tied_embeddings else OUTPUT
    return _Shards(
        held=sum(of_rank.values()),
        moving=moving,
        weights=moving * FP32 + sum(still_in_bytes.values()),  # what trains is fp32, and rounded as it is gathered
        read=max((gathered[name] for name in int8), default=0) * itemsize,
        whole=sum(moving_gathered.values()),
        gathered=Gathered(
            root,
            layer,
            root_gradient=moving_root * itemsize,
            projection_gradient=0 if value_head else moving_gathered.get(projection, 0) * itemsize,
            matrix=max(in_layers, default=0) * itemsize,
            layer_gradient=moving_layer * itemsize,
            root_reduced=moving_root * FP32,
            layer_reduced=moving_layer * FP32,
            shards=layout.dp * layout.cp,
        ),
    )


def _rows_in_8_bits(arch: ModelArch, layout: ParallelLayout, lora: LoraConfig | None) -> dict[str, tuple[int, int]]:
    """Weight in 8 bits -> (columns on one tp rank, most scales of such a row)."""
    columns = {f"{name}.weight": width for name, (_, width) in int8_modules(arch, lora).items()}
    over_tp = hf_cuts(arch) if columns else {}
    parts = {name: layout.tp if over_tp[name].dim == 1 else 1 for name in columns}
    return {name: (width // parts[name], most_blocks(width, parts[name])) for name, width in columns.items()}


def _in_groups(whole: Mapping[str, int]) -> tuple[int, int]:
    """Totals on one tp rank while gathered: (the root's group, the largest layer's)."""
    by_layer: Counter[str] = Counter()
    for name, size in whole.items():
        by_layer[layer_prefix(name)] += size
    root = by_layer.pop("", 0)
    return root, max(by_layer.values(), default=0)


def sharded_memory(
    unsharded: RoleMemory,
    arch: ModelArch,
    layout: ParallelLayout,
    work: RoleWork,
    *,
    scores: tuple[int, int] = (0, 0),
    accumulates: bool = False,
    inputs_on_host: int = 0,
    passes: OwnPasses | None = None,
) -> RoleMemory:
    """Replace the whole weights in a rank's memory (`role_memory`) by the shards of the fullest rank of `layout`.

    scores: from `score_bytes`. accumulates: whole gradients wait for the last micro-batch (`reduce_once`, with more than one).
    inputs_on_host: from `inputs_away`. passes: for a model of a family, whose activations `hf_activations.py` counts; None keeps
    the estimate for Megatron in `unsharded`."""
    shards = _shards_of(arch, layout, work)
    whole, itemsize = shards.gathered, ITEMSIZE[work.dtype]
    if passes is None:
        # The root's group stays gathered, and the layer at work with the next one.
        forward, activations = (peak + whole.root + 2 * whole.layer for peak in (unsharded.forward, unsharded.activations))
        # The backward pass adds whole gradients of the root and a layer, and a copy in fp32 while they are reduced.
        activations += whole.root_gradient + whole.layer_gradient + whole.root_reduced + whole.layer_reduced
    else:
        forward = forward_peak(arch, layout, itemsize, passes, whole)
        activations = training_peak(arch, layout, itemsize, passes, whole)
    forward, activations = forward + scores[0], activations + scores[1]
    if passes is not None and not work.trained:
        activations = forward
    waiting = shards.whole * FP32 if accumulates else 0
    weights, moving = shards.weights, shards.moving
    gradients, optimizer = moving * FP32, 2 * moving * FP32
    saved = weights if work.frozen else moving * FP32  # adapters are saved without their base
    parameters_away, gradients_away, optimizer_away = work.offload
    return replace(
        unsharded,
        parameters=shards.held,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations - inputs_on_host + shards.read + waiting,
        inputs_on_host=inputs_on_host,
        forward=forward + shards.read,
        offloaded=weights * parameters_away + gradients * gradients_away,
        offloaded_weights=weights * parameters_away,
        offloaded_optimizer=optimizer * optimizer_away,
        step_buffers=moving * FP32,  # AdamW's foreach holds the roots of all second moments at once
        written=saved + optimizer,
        written_weights=saved,
    )
