"""Seconds of generation and of the push of weights (trainer/ppo.py, stages 2 and 7), from the layout of the rollout replicas.

Decoding is bound by memory: every token of a batch reads the weights once and its own KV cache (Pope et al. 2022, "Efficiently
scaling transformer inference", section 2). The step waits for the last response of the replica with the longest (`decoding.py`).
Not counted: sampling. Under `rollout.partial_rollout_tokens` the tokens of earlier steps are read again as a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from megappo.commands.plan.estimate import sequences_of_replica
from megappo.commands.plan.memory import ParameterCount, RolloutMemory
from megappo.commands.plan.tower import tower_trains
from megappo.commands.tune.cost import Workload, role_cost
from megappo.commands.tune.decoding import Decoder, Limit, decoding
from megappo.commands.tune.lengths import Lengths
from megappo.commands.tune.work import Links, Span, ranks_together, tower_pass
from megappo.config.evaluations import evaluation_sets
from megappo.config.reward_sections import EvaluationConfig
from megappo.config.role_sections import PolicyConfig
from megappo.config.schema import RolloutConfig, TrainConfig
from megappo.models.arch import ModelArch
from megappo.parallel.layout import ParallelLayout, Placement
from megappo.telemetry.hardware import Dtype, Hardware

# Since this release vLLM prepares a token's batch while the GPU works on the one before (asynchronous scheduling by default).
OVERLAPS_HOST = (0, 14)
PINNED_VLLM = (0, 32)


@dataclass(frozen=True)
class GenerationCost:
    """Seconds of one step's generation."""

    prefill_s: float
    decode_s: float
    """Until the last response of a step that has the replicas to itself."""
    at_once: int
    """Sequences that a replica decodes together."""
    waves: int
    """Number of such batches."""
    full_s: float
    """Seconds of decoding where the requests of other steps fill every place that is free."""
    longest_s: float
    """Until the end of a response of `rollout.drawn_tokens` that begins with the last batch, with every place filled."""
    limits: Mapping[Limit, float] = field(default_factory=dict)
    """Seconds of decoding by what limits it."""
    filled: int = 1
    """Sequences that a replica decodes together where requests of other steps fill every place."""
    responses_s: tuple[float, ...] = ()
    """Seconds of each response of a replica's step then, in the order in which they take a place."""

    @property
    def work_s(self) -> float:
        """Seconds of a step of a stream of steps."""
        return self.prefill_s + self.full_s

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    def times(self, factor: float) -> GenerationCost:
        """The same with seconds that are so many times as long."""
        if factor == 1.0:
            return self
        seconds = {name: factor * getattr(self, name) for name in ("prefill_s", "decode_s", "full_s", "longest_s")}
        limits = {limit: factor * one for limit, one in self.limits.items()}
        return replace(self, **seconds, limits=limits, responses_s=tuple(factor * one for one in self.responses_s))


def vllm_cost(
    arch: ModelArch,
    rollout: RolloutConfig,
    dtype: Dtype,
    memory: RolloutMemory,
    workload: Workload,
    world_size: int,
    hardware: Hardware,
    release: tuple[int, int] = PINNED_VLLM,
) -> GenerationCost:
    """Cost of vLLM replicas of `rollout.tp` ranks each. memory: of one rank, from the plan. release: of vLLM."""
    tp, replicas = rollout.tp, max(1, world_size // rollout.tp)
    decoder = Decoder(arch, memory, Span(tp, min(tp, hardware.gpus_per_node)), dtype, hardware, release >= OVERLAPS_HOST)
    samples = sequences_of_replica(workload.samples, world_size // tp)
    most = min(rollout.max_num_seqs, _held_at_once(memory, workload))
    at_once = min(most, samples)
    drawn = workload.lengths or Lengths(workload.decoded_tokens, workload.decoded_tokens)
    # Windows have prompts of their own: what was drawn before.
    prompts = samples if workload.windows > 1 else -(-samples // rollout.samples_per_prompt)
    shared = 1 - prompts / samples
    places = min(rollout.max_num_seqs, samples)
    order = drawn.of_replica(samples, replicas)
    limits = decoding(order, places, workload.prompt_tokens, decoder, shared, workload.turns)
    waves = -(-samples // at_once)
    prefill = decoder.prefill_s(prompts, samples, workload.prompt_tokens)
    if (pictures := workload.pictures) is not None and arch.vision is not None:  # of a prompt once, cut over tp
        prefill += prompts * tower_pass(arch.vision, min(pictures.tokens, workload.prompt_tokens), dtype, hardware).forward_s / tp
    context = workload.prompt_tokens + workload.response_tokens / 2  # mean over the tokens of a response
    # Under rollout.max_staleness requests of later steps fill the places that this one leaves.
    filled = min(most, samples * (1 + (rollout.max_staleness or 0)))
    token_s = decoder.token(filled, filled * context).seconds
    full, answers = samples * workload.decoded_tokens / filled * token_s, 0.0
    if (turns := workload.turns) is not None:
        full += samples * decoder.prefill_s(1, 1, turns.observed)
        answers = (turns.count - 1) * turns.seconds
    longest = (prefill + full) * (waves - 1) / waves + rollout.drawn_tokens * token_s + answers
    decode, each = sum(limits.values()), -(-samples // waves)
    responses = tuple(one * token_s + answers for one in order)
    return GenerationCost(prefill, decode, each, waves, full, longest, limits, filled, responses)


def _held_at_once(memory: RolloutMemory, workload: Workload) -> int:
    """Sequences of the mean length that the cache holds."""
    if memory.kv_cache is None:
        return workload.samples
    return max(1, int(memory.kv_cache // (memory.kv_bytes_per_token * workload.length)))


def evaluated(config: TrainConfig) -> list[EvaluationConfig]:
    """Sets that are evaluated while a run trains."""
    return [one for one in evaluation_sets(config).values() if one.every]


def evaluations_s(
    config: TrainConfig, workload: Workload, cost_of: Callable[[RolloutConfig, Workload], GenerationCost]
) -> float | None:
    """Seconds of a step's share of the responses that are evaluated, whose lengths are those of the training up to the set's own
    limit; None if a set has as many prompts as its data. cost_of: cost of a generation."""
    total, (prompt, response) = 0.0, workload.whole or (workload.prompt_tokens, workload.response_tokens)
    for one in evaluated(config):
        if one.prompts is None:
            return None
        limit = float(one.max_response_tokens or config.rollout.max_response_tokens)
        lengths = None if workload.lengths is None else workload.lengths.cut(limit)
        drawn = min(limit, response if lengths is None else lengths.mean)
        work = Workload(
            one.prompts * one.n,
            workload.schedules,
            prompt,
            drawn,
            decoded=drawn,
            lengths=lengths,
            turns=workload.turns,
            pictures=workload.pictures,
        )
        rollout = config.rollout.model_copy(update={"samples_per_prompt": one.n, "max_staleness": None})
        total += cost_of(rollout, work).total_s / (one.every or 1)
    return total


class Overlap(NamedTuple):
    """Seconds of the two halves of an asynchronous run in a step: training with the push; sampling; until the end of the longest
    response, if nothing but its step is sampled."""

    training_s: float
    sampling_s: float
    longest_s: float
    places: int = 1
    """Sequences that a replica decodes together."""
    responses_s: tuple[float, ...] = ()
    """Seconds of each response of a replica's step; empty if they are unknown."""

    @property
    def floor_s(self) -> float:
        """Seconds of a step when neither half waits for a single response."""
        return max(self.training_s, self.sampling_s)

    def least_s(self, max_staleness: int) -> float:
        """Seconds of a step, if no response waits for a place that one of another step has: steps are trained on in order, so
        the longest response of each has max_staleness + 1 steps for itself and the training on it."""
        return max(self.floor_s, (self.longest_s + self.training_s) / (max_staleness + 1))

    def step_s(self, max_staleness: int) -> float:
        """Seconds of a step whose requests begin up to `max_staleness` versions early."""
        if not self.responses_s:
            return self.least_s(max_staleness)
        seconds, _ = simulated(max_staleness, self.training_s, self.places, self.responses_s)
        return max(self.least_s(max_staleness), seconds)

    def enough(self) -> int:
        """The smallest max_staleness that reaches the floor."""
        least = math.ceil((self.longest_s + self.training_s) / self.floor_s - 1e-9) - 1
        waits = (count for count in range(least, least + MOST_WAITS) if self.step_s(count) <= REACHED * self.floor_s)
        return next(waits, least + MOST_WAITS)


STEPS = 12  # times (max_staleness + 1), of a simulation
MOST_WAITS, REACHED = 8, 1.02


@lru_cache(maxsize=1 << 10)  # a search asks for the seconds of the same choice again and again
def simulated(max_staleness: int, training_s: float, places: int, responses_s: tuple[float, ...]) -> tuple[float, float]:
    """(seconds of a step, versions by which the weights that a response begins with are older than those that are trained on it,
    on average) of a simulated run of one replica. responses_s: seconds of the responses of a step."""
    free, trained = [0.0] * places, [0.0]  # when each place is free; when the update after each step has ended
    ages: list[int] = []
    steps = STEPS * (max_staleness + 1)
    for step in range(1, steps + 1):
        # Requests of a step begin max_staleness versions early, and steps are trained on in order.
        admitted, last, version = trained[max(0, step - 1 - max_staleness)], 0.0, max(0, step - 1 - max_staleness)
        for place in range(len(responses_s)):
            begin = max(admitted, heappop(free))
            while version + 1 < step and trained[version + 1] <= begin:
                version += 1
            end = begin + responses_s[(place + 7 * step) % len(responses_s)]
            heappush(free, end)
            last = max(last, end)
            ages += [step - 1 - version] if 2 * step > steps else []
        trained.append(max(trained[-1], last) + training_s)
    half = steps // 2  # steps come in bursts of max_staleness + 1, and this is a multiple of them
    return (trained[-1] - trained[-1 - half]) / half, sum(ages) / len(ages)


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
    if not tower_trains(policy, arch):  # whose features are kept: the log-probs count them
        prefix = replace(prefix, pictures=None)
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
    wire = elsewhere / links.network_bytes_per_s + (1 - elsewhere) / links.node_bytes_per_s
    # Every rank of vLLM converts and loads its own part, however many there are.
    return loading + memory.weights * (times * wire + 1e-9 / hardware.push_gb_s)
