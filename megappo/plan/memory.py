"""Memory of one rank, role by role, from the shapes of its parameters.

Weights, gradients and optimizer state are exact counts of what Megatron-core allocates. Activations are an estimate in the
manner of Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer models", section 4), redone for
this model: packed tokens, no dropout, SwiGLU, attention that never stores its scores. Temporary buffers of kernels and
allocators are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Optional

from megappo.models.arch import ModelArch
from megappo.models.families import local_shapes
from megappo.parallel.layout import ParallelLayout, stage_layers

GIB = 1 << 30
ITEMSIZE = {"bf16": 2, "fp32": 4}
FP32 = 4
CPU_KV_CACHE_GIB = 0.25
LOGPROB_CHUNK_TOKENS = 4096  # ops/logprob.py holds the logits of this many tokens at once

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one rank of one role. `resident` stays while other roles work, `active` is there only while this role works.

    offloaded: weights and gradients that are in host memory while others work; offloaded_optimizer: state that is on the device
    during the optimizer step only, when there are no activations.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    offloaded: int = 0
    offloaded_optimizer: int = 0

    @property
    def resident(self) -> int:
        return self.weights + self.gradients + self.optimizer - self.offloaded - self.offloaded_optimizer

    @property
    def active(self) -> int:
        return self.offloaded + max(self.activations, self.offloaded_optimizer)


def count_parameters(arch: ModelArch, layout: ParallelLayout, stage: int, value_head: bool = False) -> int:
    """Parameters of one rank of this stage (all tp ranks hold equally many)."""
    return sum(prod(shape) for shape in local_shapes(arch, layout.tp, layout.pp, 0, stage, value_head).values())


def role_memory(
    arch: ModelArch,
    layout: ParallelLayout,
    stage: int,
    *,
    dtype: Literal["bf16", "fp32"],
    trained: bool,
    micro_batch_tokens: int,
    num_micro_batches: int,
    value_head: bool = False,
    distributed_optimizer: bool = True,
    recompute: Recompute = "none",
    offload: tuple[bool, bool, bool] = (False, False, False),
) -> RoleMemory:
    """Memory of a rank of `stage`. offload: parameters, gradients, optimizer. micro_batch_tokens: of a full micro-batch."""
    parameters = count_parameters(arch, layout, stage, value_head)
    head = arch.hidden_size if value_head and stage == layout.pp - 1 else 0  # the value head stays fp32
    itemsize = ITEMSIZE[dtype]
    weights = (parameters - head) * itemsize + head * FP32
    gradients = parameters * FP32 if trained else 0
    optimizer = _optimizer_bytes(parameters, head, itemsize, layout.dp if distributed_optimizer else 1) if trained else 0
    in_flight = min(layout.pp - stage, num_micro_batches) if trained else 1
    activations = activation_bytes(arch, layout, stage, micro_batch_tokens, itemsize, recompute, trained=trained)
    output = output_bytes(arch, layout, micro_batch_tokens, trained) if stage == layout.pp - 1 and not value_head else 0
    parameters_away, gradients_away, optimizer_away = offload
    return RoleMemory(
        parameters,
        weights,
        gradients,
        optimizer,
        activations * in_flight + output,
        offloaded=weights * parameters_away + gradients * gradients_away,
        offloaded_optimizer=optimizer * optimizer_away,
    )


def _optimizer_bytes(parameters: int, fp32_parameters: int, itemsize: int, shards: int) -> int:
    """Two fp32 moments, and an fp32 copy of every weight that is not fp32 itself; cut over the data-parallel ranks by ZeRO-1."""
    copies = 0 if itemsize == FP32 else parameters - fp32_parameters
    return -(-(copies + 2 * parameters) * FP32 // shards)


def activation_bytes(
    arch: ModelArch, layout: ParallelLayout, stage: int, tokens: int, itemsize: int, recompute: Recompute, *, trained: bool = True
) -> int:
    """Bytes that the layers of a stage keep of one micro-batch for its backward pass; without one, what a single layer needs.

    recompute: selective counts like none, because attention stores no scores that it could save.
    """
    layer = layer_elements_per_token(arch, layout, itemsize)
    boundary = arch.hidden_size // _sequence_shards(layout)
    layers = len(stage_layers(arch.num_layers, layout.pp, stage))
    if not trained:
        elements = layer
    elif recompute == "full":  # the input of every layer, and everything of the layer that is being recomputed
        elements = layers * boundary + layer
    else:
        elements = layers * layer
    return tokens * elements * itemsize


def layer_elements_per_token(arch: ModelArch, layout: ParallelLayout, itemsize: int) -> int:
    """Activations that one layer keeps per token, in elements of `itemsize` bytes.

    Each of the two norms: its input (in fp32), the normalised input and the output. Attention: the projected query, key and
    value, the rotated query and key, the output and its copy in the packed order. MLP: gate and up, up again (Megatron adds an
    offset to it), silu(gate), and the product. A test holds this against the tensors that a real model saves.
    """
    norms = 2 * (arch.hidden_size * FP32 // itemsize + 2 * arch.hidden_size)
    attention = 3 * (arch.num_heads + arch.num_kv_heads) * arch.head_dim
    return norms // _sequence_shards(layout) + (attention + 5 * arch.ffn_size) // layout.tp


def _sequence_shards(layout: ParallelLayout) -> int:
    return layout.tp if layout.sequence_parallel else 1


def output_bytes(arch: ModelArch, layout: ParallelLayout, tokens: int, trained: bool) -> int:
    """Log-probs without full logits: fp32 logits of a chunk (twice with their gradient), the projection's fp32 gradient."""
    rows = -(-arch.vocab_size // layout.tp)
    logits = min(tokens, LOGPROB_CHUNK_TOKENS) * rows * FP32
    return 2 * logits + rows * arch.hidden_size * FP32 if trained else logits


# ---------------------------------------------------------------------------------------------------------------- rollout


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes of one vLLM rank. kv_cache: what the cache may take, None where that depends on a GPU that is not known here."""

    weights: int
    kv_bytes_per_token: int
    kv_cache: Optional[int]


def rollout_memory(
    arch: ModelArch, tp: int, itemsize: int, kv_cache_gib: Optional[float], memory_share: float, device_memory: Optional[int]
) -> RolloutMemory:
    """Weights and KV cache of one rank of a vLLM replica; KV heads are repeated where there are fewer of them than ranks."""
    repeated = replace(arch, num_kv_heads=max(arch.num_kv_heads, tp))
    weights = itemsize * count_parameters(repeated, ParallelLayout(tp, tp=tp), stage=0)
    per_token = 2 * arch.num_layers * repeated.num_kv_heads // tp * arch.head_dim * itemsize
    if kv_cache_gib is not None:
        cache: Optional[int] = int(kv_cache_gib * GIB)
    elif device_memory is not None:
        cache = int(memory_share * device_memory) - weights
    else:
        cache = None
    return RolloutMemory(weights, per_token, cache)
