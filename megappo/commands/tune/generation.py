"""Seconds of generation and of the push of weights (trainer/ppo.py, stages 2 and 7), from the layout of the rollout replicas.

Decoding is bound by memory: every token of a batch reads the weights once and its own KV cache (Pope et al. 2022, "Efficiently
scaling transformer inference", section 2). A step waits for a response of the longest length, which others do not hold up. Not
counted: sampling, scheduling beyond a fixed time per token, reuse of prefixes. Under `rollout.partial_rollout_tokens` the
tokens of earlier steps are read again as a prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megappo.commands.plan.activations import ITEMSIZE
from megappo.commands.plan.estimate import sequences_of_replica
from megappo.commands.plan.memory import ParameterCount, RolloutMemory
from megappo.commands.tune.cost import Workload, role_cost
from megappo.commands.tune.work import Links, Span, ranks_together
from megappo.config.role_sections import PolicyConfig
from megappo.config.schema import RolloutConfig
from megappo.models.arch import ModelArch
from megappo.models.flops import MULTIPLY_ADD, SCORES_AND_VALUES, keys_seen, layer_weights
from megappo.parallel.layout import ParallelLayout, Placement
from megappo.telemetry.hardware import Dtype, Hardware


@dataclass(frozen=True)
class GenerationCost:
    """Seconds of one step's generation."""

    prefill_s: float
    decode_s: float
    at_once: int
    """Sequences that a replica decodes together."""
    waves: int
    """Number of such batches."""
    longest_s: float
    """Until the end of a response of `rollout.drawn_tokens` that begins with the last batch."""

    @property
    def work_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def total_s(self) -> float:
        return max(self.work_s, self.longest_s)


def vllm_cost(
    arch: ModelArch,
    rollout: RolloutConfig,
    dtype: Dtype,
    memory: RolloutMemory,
    workload: Workload,
    world_size: int,
    hardware: Hardware,
) -> GenerationCost:
    """Cost of vLLM replicas of `rollout.tp` ranks each. memory: of one rank, from the plan."""
    tp, links = rollout.tp, Links.of(hardware)
    group = Span(tp, min(tp, hardware.gpus_per_node))
    samples = sequences_of_replica(workload.samples, world_size // tp)
    at_once = min(rollout.max_num_seqs, samples)
    if memory.kv_cache is not None:
        at_once = max(1, min(at_once, int(memory.kv_cache // (memory.kv_bytes_per_token * workload.length))))
    waves = -(-samples // at_once)
    at_once = -(-samples // waves)  # even waves, so that the last one is not a handful of sequences
    itemsize, rate = ITEMSIZE[dtype], hardware.flops_per_s(dtype)
    layer_flops = MULTIPLY_ADD * sum(sum(layer_weights(arch, arch.is_sparse(layer))) for layer in range(arch.num_layers)) / tp
    head_flops = MULTIPLY_ADD * arch.hidden_size * arch.vocab_size / tp
    context = workload.prompt_tokens + workload.response_tokens / 2  # mean over the tokens of a response
    read = memory.weights * _share_of_weights(arch, at_once) + at_once * context * memory.kv_bytes_per_token
    # Two per layer: after attention and after the MLP.
    reduce_s = 2 * arch.num_layers * links.all_reduce_s(group, at_once * arch.hidden_size * itemsize)
    # A token takes the larger of memory reads and matrix products, then the all-reduces and a fixed overhead.
    token_s = max(read / hardware.memory_bytes_per_s, at_once * (layer_flops + head_flops) / rate)
    token_s += reduce_s + hardware.decode_overhead_us * 1e-6
    prompt = samples * workload.prompt_tokens
    keys = sum(keys_seen(arch, layer, workload.prompt_tokens) for layer in range(arch.num_layers))
    attention = MULTIPLY_ADD * SCORES_AND_VALUES * arch.num_heads * arch.head_dim * keys / tp
    # Only the last token of a prompt needs logits.
    prefill = (prompt * (layer_flops + attention) + samples * head_flops) / rate
    prefill += 2 * arch.num_layers * links.all_reduce_s(group, prompt * arch.hidden_size * itemsize)
    decode = waves * workload.decoded_tokens * token_s
    longest = (prefill + decode) * (waves - 1) / waves + rollout.drawn_tokens * token_s
    return GenerationCost(prefill, decode, at_once, waves, longest)


class Overlap(NamedTuple):
    """Seconds of the two halves of an asynchronous run in a step: training with the push; sampling; until the end of the longest
    response, if nothing but its step is sampled."""

    training_s: float
    sampling_s: float
    longest_s: float

    @property
    def floor_s(self) -> float:
        """Seconds of a step when neither half waits for a single response."""
        return max(self.training_s, self.sampling_s)

    def step_s(self, max_staleness: int) -> float:
        """Seconds of a step whose requests begin up to `max_staleness` versions early. Steps are trained on in order, so the
        longest response of each has max_staleness + 1 steps for itself and the training on it."""
        return max(self.floor_s, (self.longest_s + self.training_s) / (max_staleness + 1))

    def enough(self) -> int:
        """The smallest max_staleness that reaches the floor."""
        return math.ceil((self.longest_s + self.training_s) / self.floor_s - 1e-9) - 1


def _share_of_weights(arch: ModelArch, batch: int) -> float:
    """Share of the weights that decoding a batch of tokens reads: 1 for a dense model."""
    if arch.moe is None:
        return 1.0
    # Expected share of E experts that a batch of B tokens reaches, with k experts per token: 1 - (1 - k / E) ** B.
    touched = 1 - (1 - arch.moe.top_k / arch.moe.num_experts) ** batch
    total = chosen = 0.0
    for layer in range(arch.num_layers):
        attention, mlp = layer_weights(arch, arch.is_sparse(layer))
        every = mlp * arch.moe.num_experts / arch.moe.top_k if arch.is_sparse(layer) else mlp
        total += attention + every
        chosen += attention + (every * touched if arch.is_sparse(layer) else mlp)
    return chosen / total


def megatron_s(
    arch: ModelArch,
    layout: ParallelLayout,
    policy: PolicyConfig,
    workload: Workload,
    hardware: Hardware,
    counts: Mapping[int, ParameterCount],
) -> float:
    """Seconds of generation by the policy's own model. It has no KV cache: every token is a pass over the whole prefix."""
    # The mean prefix has half of the response.
    prefix = replace(workload, response_tokens=workload.response_tokens / 2)
    one = role_cost("policy", arch, layout, policy, prefix, hardware, counts).phases["forward"]  # weights stay on the device
    return workload.decoded_tokens * one


def push_s(
    policy: ParallelLayout,
    memory: RolloutMemory | None,
    hardware: Hardware,
    offloaded: int = 0,
    ends: tuple[Placement, Placement] | None = None,
) -> float:
    """Seconds to push the policy's weights into the replicas. offloaded: bytes that come from host memory first. ends: ranks of
    policy and rollout; None for all ranks."""
    # Every rank receives its whole part of the model. Layers of stages on other nodes come over the network.
    loading = offloaded / hardware.host_bytes_per_s
    if memory is None:
        return loading
    links = Links.of(hardware)
    per_node = hardware.gpus_per_node
    together = per_node if ends is None else ranks_together(ends[0], per_node)
    stages_here = max(1, together // policy.ranks_per_stage) if policy.pp > 1 else 1
    elsewhere = 0.0 if policy.ranks_per_stage >= policy.world_size else max(0.0, 1 - stages_here / policy.pp)
    times = 1.0
    if ends is not None and ends[0] != ends[1]:
        senders, receivers = ends
        # Nodes without a rank of the policy get everything over the network, and few ranks send to many one after the other.
        times = max(1.0, len(receivers) / len(senders))
        sending, receiving = ({rank // per_node for rank in one.ranks} for one in ends)
        elsewhere = elsewhere if receiving <= sending else 1.0
    return loading + times * memory.weights * (elsewhere / links.network_bytes_per_s + (1 - elsewhere) / links.node_bytes_per_s)
