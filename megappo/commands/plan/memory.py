"""Memory of one rank, role by role, from the shapes of its parameters. Weights, gradients and optimizer state are exact counts of
what Megatron-core allocates; `activations.py` estimates the rest."""

from __future__ import annotations

from collections import Counter as Counted
from dataclasses import dataclass, replace
from functools import cache
from math import lcm, prod
from typing import Literal, Protocol

from megappo.commands.plan.activations import (
    FP32,
    ITEMSIZE,
    RoleWork,
    activation_bytes,
    forward_bytes,
    micro_batch_bytes,
    sequence_shards,
    tower_bytes,
)
from megappo.config.role_sections import LoraConfig
from megappo.models.arch import Kind, ModelArch
from megappo.models.freeze import frozen_on_rank
from megappo.models.int8_linear import SCALE_BYTES
from megappo.models.lora import adapted_modules, expert_of, int8_modules, products_per_token, tensors_to_adapt
from megappo.models.lora_shards import adapter_numel, int8_linears
from megappo.models.row_shards import layer_prefix
from megappo.models.weight_map import LOCAL_VALUE_HEAD, end_shapes, hf_tensors, layer_shapes, local_shapes
from megappo.models.weight_rules import CORRECTION
from megappo.parallel.layout import ParallelLayout
from megappo.telemetry.tables import GIB

VLLM_VOCAB_MULTIPLE = 64  # rows of its embeddings; vLLM's DEFAULT_VOCAB_PADDING_SIZE
EXPERTS = ".mlp.experts."  # in the canonical name of an expert's parameter

Moment = Literal["generate", "train", "pushed"]
"""Parts of a step as vLLM sees it: stage 2 and evaluations in stage 8; stages 3 to 6; from the push to the next generation."""
Targets = tuple[str, ...] | str
"""Modules with adapters, see `config.role_sections.LoraConfig.targets`."""
Sleep = Literal["none", "cache", "all"]
"""`rollout.sleep`: what of vLLM leaves the device while the models train."""


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one rank of one role. `resident` stays while other roles work; `active` exists only while this role works."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    forward: int
    """Activations of a pass without gradients."""
    offloaded: int = 0
    offloaded_weights: int = 0
    """`offloaded`: weights (`offloaded_weights`) and gradients that are off the device while other roles work."""
    offloaded_optimizer: int = 0
    """State that is on the device only from the first optimizer step of a phase to its end."""
    step_buffers: int = 0
    """Temporaries of an optimizer step, when there are no activations."""
    steps: int = 1
    """Optimizer steps of a phase."""
    written: int = 0
    written_weights: int = 0
    """`written`, `written_weights`: this rank's share of a checkpoint with and without optimizer; 0 for a frozen role."""
    average: int = 0
    average_on_host: int = 0
    """`average`, `average_on_host`: of the policy's weights, on the device or on the host."""
    inputs_on_host: int = 0
    """Inputs of recomputed layers that wait in host memory."""
    patches: int = 0
    """Of images in a micro-batch, at most, on a rank with a vision tower."""
    tower: int = 0
    """Part of `activations` that the tower of one micro-batch has, at most."""

    @property
    def held(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.average

    @property
    def resident(self) -> int:
        return self.held - self.offloaded - self.offloaded_optimizer

    @property
    def inferring(self) -> int:
        """Bytes that a pass without gradients adds on the device."""
        return self.offloaded_weights + self.forward

    @property
    def updating(self) -> int:
        """Bytes that forward and backward passes add on the device."""
        # From the second pass on, the optimizer's state is on the device too.
        return self.offloaded + self.activations + (self.offloaded_optimizer if self.steps > 1 else 0)

    @property
    def stepping(self) -> int:
        """Bytes that the optimizer step adds on the device."""
        return self.offloaded + self.offloaded_optimizer + self.step_buffers

    @property
    def saving(self) -> int:
        """Bytes that writing a checkpoint adds on the device. It is written from these tensors, without a second copy."""
        return self.offloaded_weights + self.offloaded_optimizer

    @property
    def active(self) -> int:
        return max(self.inferring, self.updating, self.stepping)

    @property
    def host_memory(self) -> int:
        """Bytes of host memory while others work."""
        # Gradients are freed, not copied. Pinned blocks that held inputs are kept for the next pass.
        return self.offloaded_weights + self.offloaded_optimizer + self.inputs_on_host


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of one rank."""

    dense: int
    experts: int
    fp32: int
    """Those of the value head, which are fp32 for any dtype; `dense` includes them."""
    constant: int = 0
    """Corrections of experts' scores, which are fp32 and do not train; `dense` includes them."""

    @property
    def total(self) -> int:
        return self.dense + self.experts


class Counter(Protocol):
    """Count the parameters on a rank of a stage, of a policy or (value_head) a critic."""

    def __call__(self, arch: ModelArch, layout: ParallelLayout, stage: int, value_head: bool = False) -> ParameterCount: ...


@cache  # a search of layouts asks thousands of times
def count_parameters(arch: ModelArch, layout: ParallelLayout, stage: int, value_head: bool = False) -> ParameterCount:
    """Count the parameters of one rank from the weight maps (`weight_map.py`). All ranks of a stage hold equally many."""
    before, behind = end_shapes(arch, layout, stage, value_head)
    dense, experts, constant = sum(map(prod, before.values())) + sum(map(prod, behind.values())), 0, 0
    chunks = [layout.chunk_layers(arch.num_layers, stage, chunk) for chunk in range(layout.vpp)]
    for kind, layers in ((kind, count) for chunk in chunks for kind, count in arch.count_kinds(chunk).items()):
        own = _count_layer(arch, layout.tp, layout.ep, layout.etp, kind)
        dense, experts, constant = dense + layers * own.dense, experts + layers * own.experts, constant + layers * own.constant
    return ParameterCount(dense, experts, prod(behind.get(LOCAL_VALUE_HEAD, (0,))), constant)


@cache
def _count_layer(arch: ModelArch, tp: int, ep: int, etp: int, kind: Kind) -> ParameterCount:
    """Count the parameters of a layer of this kind on one rank."""
    layout = ParallelLayout(lcm(tp, ep * etp), tp=tp, ep=ep, etp=etp)
    layer = next(layer for layer in range(arch.num_layers) if arch.kind(layer) == kind)
    sizes = [(name, prod(shape)) for name, shape in layer_shapes(arch, layout, layout.coordinates(0), layer)]
    experts = sum(size for name, size in sizes if EXPERTS in f".{name}")
    constant = sum(size for name, size in sizes if name.endswith(CORRECTION.local))
    return ParameterCount(sum(size for _, size in sizes) - experts, experts, 0, constant)


def role_memory(
    arch: ModelArch, layout: ParallelLayout, stage: int, work: RoleWork, counter: Counter = count_parameters
) -> RoleMemory:
    lora, frozen = work.lora, work.frozen
    count = counter(arch, layout, stage, work.value_head)
    trains = replace(count, dense=count.dense - count.constant, constant=0)
    read = 0
    itemsize = ITEMSIZE[work.dtype]
    weights = saved = _weight_bytes(count, itemsize)
    if lora is not None:
        trains = count_trained(arch, layout, stage, lora, count)
        saved = _weight_bytes(trains, itemsize)
        weights += saved - count.fp32 * FP32  # the value head is in both
        in_8_bits = () if arch.own else int8_linears(arch, layout, stage, int8_modules(arch, lora))
        weights -= sum(numbers * (itemsize - 1) - scales * SCALE_BYTES for numbers, scales in in_8_bits)
        read = max((numbers for numbers, _ in in_8_bits), default=0) * itemsize  # the weight that a product makes
    elif frozen:
        trains = count_unfrozen(arch, layout, stage, frozen, count, work.value_head)
    gradients = trains.total * FP32 if work.trained else 0
    optimizer = 0
    if work.trained:  # two fp32 moments, and an fp32 copy of every weight that is not fp32
        optimizer = sharded_bytes(trains, 2 if itemsize == FP32 else 3, 2, layout, work.distributed_optimizer)
    tokens = -(-work.micro_batch_tokens // layout.cp)
    pass_tokens = tokens if work.forward_tokens is None else -(-work.forward_tokens // layout.cp)
    forward = forward_bytes(arch, layout, stage, pass_tokens, work)
    if work.values is not None:
        forward += micro_batch_bytes(layout, work.forward_tokens or work.micro_batch_tokens, work.values[0])
    forward += read
    activations = forward
    if work.trained:
        width = 0 if lora is None else lora.rank * _adapters_in_layer(arch, layout, lora.targets)
        activations = activation_bytes(arch, layout, stage, work, width)
        activations += read + (0 if work.values is None else micro_batch_bytes(layout, work.micro_batch_tokens, work.values[1]))
    parameters_away, gradients_away, optimizer_away = work.offload
    written = count if frozen else trains  # a checkpoint holds frozen weights too, but not the base of adapters
    return RoleMemory(
        count.total + trains.total - count.fp32 if lora is not None else count.total,
        weights,
        gradients,
        optimizer,
        activations,
        forward,
        offloaded=weights * parameters_away + gradients * gradients_away,
        offloaded_weights=weights * parameters_away,
        offloaded_optimizer=optimizer * optimizer_away,
        # Its foreach updates all parameters at once, so the roots of all second moments exist together.
        step_buffers=sharded_bytes(trains, 1, 1, layout, work.distributed_optimizer) if work.trained and work.adam_buffers else 0,
        steps=work.steps,
        written=_each_writes(written, saved + optimizer * (not work.distributed_optimizer), layout)
        + optimizer * work.distributed_optimizer
        if work.trained
        else 0,
        written_weights=_each_writes(written, saved, layout) if work.trained else 0,
        patches=work.patches[not work.trained] if stage == 0 else 0,
        tower=max(tower_bytes(arch, layout, stage, work)),
    )


def with_average(
    memory: RoleMemory, count: ParameterCount | None, layout: ParallelLayout, *, on_device: bool, swaps: bool
) -> RoleMemory:
    """Add an fp32 average of the policy's weights. count: its parameters; None if every rank has a shard of them. on_device: the
    average stays there; with `swaps` also the policy's weights, while the average is sampled."""
    average = memory.parameters * FP32
    saved = average if count is None else _each_writes(count, average, layout)
    return replace(
        memory,
        average=(average + memory.weights * swaps) * on_device,
        average_on_host=(average + memory.weights * swaps) * (not on_device),
        written=memory.written + saved,
        written_weights=memory.written_weights + saved,
    )


def _weight_bytes(count: ParameterCount, itemsize: int) -> int:
    fp32 = count.fp32 + count.constant
    return (count.total - fp32) * itemsize + fp32 * FP32


def count_trained(arch: ModelArch, layout: ParallelLayout, stage: int, lora: LoraConfig, count: ParameterCount) -> ParameterCount:
    """Count what trains on one rank of a stage beside a frozen base: adapters and a value head. count: of the base and head."""
    beside, of_experts = _count_adapters(arch, layout, stage, lora.targets, lora.rank)
    return ParameterCount(beside + count.fp32, of_experts, count.fp32)


def count_unfrozen(
    arch: ModelArch, layout: ParallelLayout, stage: int, frozen: frozenset[str], count: ParameterCount, value_head: bool
) -> ParameterCount:
    """Count the parameters on one Megatron rank of a stage that are not frozen. count: of all of them."""
    rank = layout.rank_of(pp=stage)
    shapes, still = local_shapes(arch, layout, rank, value_head), frozen_on_rank(arch, layout, rank, frozen, value_head=value_head)
    away = {name: prod(shapes[name]) for name in still if not name.endswith(CORRECTION.local)}
    experts = sum(size for name, size in away.items() if EXPERTS in name)
    dense = count.dense - count.constant - (sum(away.values()) - experts)
    return ParameterCount(dense, count.experts - experts, count.fp32)


@cache
def _count_adapters(arch: ModelArch, layout: ParallelLayout, stage: int, targets: Targets, rank: int) -> tuple[int, int]:
    modules = adapted_modules(tensors_to_adapt(arch), targets)
    if arch.own:  # without a family, and so without tp, ep and stages
        return sum(rank * (rows + columns) for rows, columns in modules.values()), 0
    return adapter_numel(arch, layout, stage, modules, rank)


@cache
def _adapters_in_layer(arch: ModelArch, layout: ParallelLayout, targets: Targets) -> int:
    """Most adapters of a layer that a token passes, those of experts as often as it is in their rows on one rank."""
    in_layers: Counted[str] = Counted()
    for module, products in products_per_token(adapted_modules(tensors_to_adapt(arch), targets), arch.moe).items():
        rows = -(-products * layout.etp // sequence_shards(layout)) if expert_of(module) is not None else 1
        in_layers[layer_prefix(module)] += rows
    return max(in_layers.values())


def _each_writes(count: ParameterCount, held: int, layout: ParallelLayout) -> int:
    """Bytes that each rank writes if dp x cp ranks share the dense layers of `held` bytes, and edp ranks the experts."""
    experts = held * count.experts // count.total
    return -(-(held - experts) // (layout.dp * layout.cp)) + -(-experts // layout.edp)


def sharded_bytes(count: ParameterCount, each: int, fp32_each: int, layout: ParallelLayout, distributed: bool) -> int:
    """Bytes on one rank of `each` fp32 values per parameter, `fp32_each` for those that are fp32 under any dtype."""
    dense = each * (count.dense - count.fp32) + fp32_each * count.fp32
    experts = each * count.experts
    if not distributed:
        return (dense + experts) * FP32
    # ZeRO-1 shards over the ranks with the same weights: dp x cp for the dense layers, edp for the experts.
    return -(-dense * FP32 // (layout.dp * layout.cp)) + -(-experts * FP32 // layout.edp)


# ---------------------------------------------------------------------------------------------------------------- rollout


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes of one vLLM rank."""

    weights: int
    kv_bytes_per_token: int
    kv_cache: int | None
    """Size of the cache; None if it depends on an unknown GPU."""

    def held(self, moment: Moment, sleep: Sleep) -> int:
        """Bytes on the device: everything while vLLM generates, otherwise what does not sleep."""
        weights = self.weights if moment != "train" or sleep != "all" else 0
        # The cache is negative if the weights exceed their share, which `check_kv_cache` reports.
        return weights + (max(0, self.kv_cache or 0) if moment == "generate" or sleep == "none" else 0)

    def holds_sequence(self, tokens: int) -> bool:
        """True if the cache has room for one sequence, which vLLM needs to start, or if its size is unknown."""
        return self.kv_cache is None or self.kv_cache >= tokens * self.kv_bytes_per_token


def fullest_moment(at_rest: int, training: int, pushed: int, rollout: RolloutMemory | None, sleep: Sleep) -> int:
    """Bytes of one rank in its fullest moment of a step. at_rest: bytes of the trainer while no role works. training, pushed: bytes
    that the largest role adds in stages 3 to 6, and after a push while a checkpoint is written or an evaluation scored. rollout:
    None if the policy's own model generates."""
    # The policy's own model needs no more to generate than for its log-probs.
    moments: tuple[tuple[Moment, int], ...] = (("generate", 0), ("train", training), ("pushed", pushed))
    return at_rest + max(work + (rollout.held(moment, sleep) if rollout is not None else 0) for moment, work in moments)


def rollout_memory(
    arch: ModelArch, tp: int, itemsize: int, kv_cache_gib: float | None, memory_share: float, device_memory: int | None
) -> RolloutMemory:
    if arch.own:  # no family says what is cut: assume that everything is, with no padded vocabulary
        kv_heads, parameters = arch.num_kv_heads, -(-sum(map(prod, hf_tensors(arch).values())) // tp)
    else:
        kv_heads = arch.as_held(tp).num_kv_heads  # vLLM repeats KV heads too
        vocab_size = -(-arch.vocab_size // VLLM_VOCAB_MULTIPLE) * VLLM_VOCAB_MULTIPLE
        # vLLM cuts experts like any other matrix; Megatron's etp does the same.
        layout = ParallelLayout(tp, tp=tp, etp=tp if arch.moe is not None else 1)
        parameters = count_parameters(replace(arch, num_kv_heads=kv_heads, vocab_size=vocab_size), layout, stage=0).total
    weights = itemsize * parameters
    # 2: keys and values.
    with_attention = sum(not arch.kind(layer).delta for layer in range(arch.num_layers))  # states of delta nets do not grow
    per_token = 2 * with_attention * kv_heads // tp * arch.head_dim * itemsize
    if arch.latent is not None:  # every rank keeps the latents, of which keys and values are made
        per_token = arch.num_layers * (arch.latent.kv_rank + arch.latent.rope) * itemsize
    if kv_cache_gib is not None:
        cache: int | None = int(kv_cache_gib * GIB)
    else:
        cache = None if device_memory is None else int(memory_share * device_memory) - weights
    return RolloutMemory(weights, per_token, cache)
