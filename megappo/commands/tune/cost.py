"""Predicted seconds of one role in a PPO step (trainer/ppo.py, stages 3, 4 and 6), from its layout, its model and the hardware.
`candidates.py` adds roles, generation and the push of weights up to a step.

Not counted: imbalance of sequence lengths, slow kernels of small shards, overlap of communication with computation (megappo does
not overlap the reduction of gradients), checkpoints, scoring, data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import NamedTuple

from megappo.commands.plan.activations import ITEMSIZE
from megappo.commands.plan.fsdp2 import count_own_unfrozen
from megappo.commands.plan.memory import FP32, ParameterCount, RoleMemory, count_trained, count_unfrozen, sharded_bytes
from megappo.commands.plan.timeline import padded_micro_batches
from megappo.commands.plan.tower import Shown, shown_by_keys, tower_trains
from megappo.commands.tune.lengths import Lengths, Turns
from megappo.commands.tune.work import Axis, Links, Pass, span, stage_pass, tower_pass
from megappo.config.batch import (
    TextArithmetic,
    UpdateSchedule,
    micro_batches_bound,
    step_arithmetic,
    text_arithmetic,
    update_schedule,
)
from megappo.config.layout_checks import trained_sections, value_head_of
from megappo.config.role_sections import AnyCriticConfig, FrozenConfig, PolicyConfig, is_critic
from megappo.config.schema import TrainConfig
from megappo.models.arch import ModelArch
from megappo.models.freeze import frozen_of
from megappo.parallel.layout import ParallelLayout
from megappo.telemetry.hardware import Hardware

# Products are slower while collectives run beside them, by 18.9 % on average (Lee et al. 2025, arXiv 2507.03114, H100 and A100).
SLOWER = 0.189
Trained = PolicyConfig | AnyCriticConfig
Settings = Trained | FrozenConfig


class Shape(NamedTuple):
    """Sequences of a pass: their number, and the mean tokens of each."""

    samples: int
    prompt_tokens: float
    response_tokens: float


class Pictures(NamedTuple):
    """Images of a step, which shows other ones in every prompt. tokens: of a prompt's images together, at most."""

    tokens: float
    prompts: int

    def on_replica(self, samples: float) -> float:
        """Prompts of which one of `samples` drawn samples is, on average."""
        return self.prompts * (1 - (1 - 1 / self.prompts) ** samples)


def pictures_of(config: TrainConfig, archs: Mapping[str, ModelArch], shown: Shown | None = None) -> Pictures | None:
    """Return the images of a step; None without, or if an environment shows some. shown: from the data; None: as far as keys
    say."""
    if config.rollout.shown_images:
        return None
    found = shown or next((one for arch in archs.values() if (one := shown_by_keys(config, arch)) is not None), None)
    samples = step_arithmetic(config).samples
    return None if found is None else Pictures(found.tokens, max(1, samples // config.rollout.samples_per_prompt))


@dataclass(frozen=True)
class Workload:
    """Size of a PPO step. Tokens are means of a sequence, or the longest allowed if unknown. Under `rollout.partial_rollout_tokens`
    a response takes `windows` steps, and a step holds responses in all of their windows alike. `response_tokens` is then what a
    step draws, and `prompt_tokens` what stands before it."""

    samples: int
    schedules: Mapping[str, UpdateSchedule]
    """Updates of the roles that train."""
    prompt_tokens: float
    response_tokens: float
    texts: TextArithmetic = TextArithmetic()
    """Texts in each update of the policy, all of the longest length."""
    windows: int = 1
    whole: tuple[float, float] | None = None
    """(prompt, response) tokens of the responses that end in a step, from which critics learn."""
    decoded: float | None = None
    """Tokens that the sampler draws one after the other, if not `response_tokens`. Nearly all windows draw the same number."""

    lengths: Lengths | None = None
    """Of the responses; None if all have `decoded_tokens`."""
    turns: Turns | None = None
    """Of the environment; None without one, or if it is unknown."""
    given: bool = False
    """The step is that of a supervised run (`plan/supervised.py`): nothing is generated and no weights are pushed."""
    unpassed: frozenset[str] = frozenset()
    """Roles without a pass before the updates of a step."""
    pictures: Pictures | None = None

    @property
    def length(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def attended(self) -> float:
        """Length of the sequence in which a token is, on average over all tokens: long ones have more of them."""
        if self.lengths is None:
            return self.length
        return self.length + (self.lengths.square - self.lengths.mean**2) / self.length

    def mini_batch(self, role: str) -> int:
        """Samples of one update. For a frozen role: of one pass of a trial, as many as the first role that trains."""
        return self.schedules.get(role, next(iter(self.schedules.values()))).mini_batch_size

    @property
    def decoded_tokens(self) -> float:
        return self.response_tokens if self.decoded is None else self.decoded

    def update(self, role: str) -> Shape:
        """Samples of one update, without texts. A critic has only those that end in the step."""
        size = min(self.samples, self.mini_batch(role))
        if self.whole is None or not is_critic(role):
            return Shape(size, self.prompt_tokens, self.response_tokens)
        return Shape(max(1, round(size / self.windows)), *self.whole)

    def sequences_of_update(self, role: str) -> int:
        """Number of sequences of the mean length with as many tokens as one update and its texts."""
        texts, own = self.texts if role == "policy" else TextArithmetic(), self.update(role)
        tokens = own.samples * (own.prompt_tokens + own.response_tokens) + texts.count * texts.max_tokens
        return ceil(tokens / self.length - 1e-9)

    def passes(self, role: str) -> float:
        """Number of passes over `update` with as many tokens as one pass over all samples; at least 1."""
        own = self.update(role)
        return max(1.0, self.samples * self.length / (own.samples * (own.prompt_tokens + own.response_tokens)))

    def updates(self, role: str) -> int:
        return self.schedules[role].optimizer_steps(self.samples)


def workload_of(
    config: TrainConfig,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    lengths: Lengths | None = None,
    turns: Turns | None = None,
) -> Workload:
    """Workload of a configuration, with these means or the longest lengths. lengths: of what the policy draws of the responses,
    with the mean `response_tokens`. turns: of the environment, whose observations come on top."""
    step, window = step_arithmetic(config), config.rollout.partial_rollout_tokens
    prompt = float(config.data.max_prompt_tokens if prompt_tokens is None else prompt_tokens)
    response = float(config.rollout.max_response_tokens if response_tokens is None else response_tokens)
    plain = Workload(
        step.samples,
        {role: update_schedule(config, role) for role in trained_sections(config)},
        prompt,
        response + (0.0 if turns is None else turns.observed),
        text_arithmetic(config, "policy"),
        decoded=None if turns is None else response,
        lengths=lengths,
        turns=turns,
    )
    if window is None or response <= window:
        return plain
    windows = ceil(response / window)
    # Window j has j - 1 full windows before it, and every j from 1 to `windows` is equally frequent.
    before, drawn = prompt + window * (windows - 1) / 2, response / windows
    return replace(
        plain,
        prompt_tokens=before,
        response_tokens=drawn,
        windows=windows,
        whole=(prompt, response),
        decoded=float(window),
        lengths=None,  # nearly all draw a whole window
    )


@dataclass(frozen=True)
class RoleCost:
    """Seconds of one role in a step."""

    phases: Mapping[str, float]
    """`forward` (log-probs, values, scores) and `update`."""
    parts: Mapping[str, float]
    """Seconds by cause (matrix products, communication, ...), summed over both phases."""
    forward_parts: Mapping[str, float]
    """Those of `forward`."""
    num_micro_batches: int
    """Micro-batches of a data-parallel rank in one update; in the forward pass for a frozen role."""

    @property
    def total_s(self) -> float:
        return sum(self.phases.values())

    @property
    def is_trained(self) -> bool:
        return "update" in self.phases

    def causes(self, phase: str) -> dict[str, float]:
        """Seconds of a phase by cause."""
        if phase == "forward":
            return dict(self.forward_parts)
        return {part: seconds - self.forward_parts.get(part, 0.0) for part, seconds in self.parts.items()}

    def times(self, forward: float, update: float) -> RoleCost:
        """The same with other seconds: factors of the two phases."""
        if forward == update == 1.0:
            return self
        phases = {phase: seconds * (forward if phase == "forward" else update) for phase, seconds in self.phases.items()}
        passes = {part: seconds * forward for part, seconds in self.forward_parts.items()}
        parts = {part: passes.get(part, 0.0) + seconds * update for part, seconds in self.causes("update").items()}
        return replace(self, phases=phases, parts=parts, forward_parts=passes)

    def share(self, part: str) -> float:
        return self.parts.get(part, 0.0) / self.total_s if self.total_s else 0.0


def stage_of(role: str, phase: str) -> str:
    """Name the stage of a run's `timing/` that holds a pass or the updates of a role."""
    if phase == "forward":
        return "score" if role == "reward_model" else "logprobs"
    return "update_policy" if role == "policy" else "update_critic"


def role_cost(
    role: str,
    arch: ModelArch,
    layout: ParallelLayout,
    settings: Settings,
    workload: Workload,
    hardware: Hardware,
    counts: Mapping[int, ParameterCount],
    memory: Mapping[int, RoleMemory] | None = None,
) -> RoleCost:
    """Predict the seconds of `role`. settings: its dtype, micro-batch budget, recomputation. counts: stage -> parameters of a rank.
    memory: stage -> memory of a rank, for the time to move offloaded parts; None if nothing is offloaded."""
    trained = isinstance(settings, (PolicyConfig, AnyCriticConfig))
    lora = settings.lora if isinstance(settings, (PolicyConfig, AnyCriticConfig)) else None
    is_sharded = settings.engine == "fsdp2"  # one stage, since it has no pipeline
    trains = counts
    if lora is not None:
        trains = {stage: count_trained(arch, layout, stage, lora, count) for stage, count in counts.items()}
    elif frozen := frozen_of(settings, arch, value_head=value_head_of(settings) is not None):
        unfrozen, head = count_own_unfrozen if is_sharded else count_unfrozen, value_head_of(settings) is not None
        trains = {stage: unfrozen(arch, layout, stage, frozen, count, head) for stage, count in counts.items()}
    parts: dict[str, float] = defaultdict(float)

    each, once = _tower_passes(arch, layout, settings, workload, hardware)
    kinds = stage_kinds(arch, layout)
    passes: dict[float, list[Pass]] = {}  # tokens of a micro-batch -> pass of a stage of each kind

    def one_pass(samples: int, trained: bool) -> int:
        """Add a pass over `samples` to `parts`; returns its number of micro-batches."""
        sequences = -(-samples // layout.dp)
        count = num_micro_batches(settings.micro_batch_tokens, sequences, workload, layout)
        # Context parallel pads to a multiple of 2 cp: on average by (2 cp - 1) / 2 tokens.
        padded = workload.length if layout.cp == 1 else workload.length + layout.cp - 0.5
        tokens = sequences * padded / count
        if tokens not in passes:
            passes[tokens] = [stage_pass(arch, layout, stage, settings, tokens, workload.attended, hardware) for stage in kinds]
        stages = passes[tokens] if trained else [Pass(one.forward) for one in passes[tokens]]
        if each is not None:
            # The first stage passes the images of its micro-batch, on each of its ranks.
            first, images = stages[0], sequences / count
            seeing = Pass({**first.forward, "tower": images * each.forward_s})
            if trained:
                seeing = Pass(seeing.forward, {**first.backward, "tower": images * each.backward["tower"]})
            stages = [seeing, *stages[1:]]
        for part, seconds in pipeline_parts(list(zip(stages, kinds.values())), layout, count).items():
            parts[part] += seconds
        if is_sharded:
            [work], [own], [reduced] = stages, counts.values(), trains.values()
            weights, gradients = own.total * ITEMSIZE[settings.dtype], reduced.total * FP32
            unreduced = count - 1 if trained and getattr(settings, "reduce_once", False) else 0
            parts["dp"] += (count - unreduced) * exchange_s(weights, gradients, layout, arch.num_layers, work, hardware)
            if unreduced:
                parts["dp"] += unreduced * exchange_s(weights, 0, layout, arch.num_layers, work, hardware)
            parts["memory"] += count * copies_s(weights, gradients, layout, hardware, backward=trained)
        return count

    num = one_pass(workload.samples, trained=False)
    weights_s, optimizer_s = _host_trip_s(memory, hardware)
    parts["offload"] += weights_s  # one way: unchanged weights are freed, not copied back
    parts["tower"] += once
    if role in workload.unpassed:
        parts.clear()
    forward_s = sum(parts.values())
    if not trained:
        return RoleCost({"forward": forward_s}, dict(parts), dict(parts), num)
    before = dict(parts)
    parts.clear()
    num = one_pass(workload.sequences_of_update(role), trained=True)
    away = 0 if memory is None else max(one.inputs_on_host for one in memory.values())
    parts["offload"] += 2 * num * away / hardware.host_bytes_per_s  # inputs of every micro-batch, both ways
    if not is_sharded:
        _reduce_gradients(parts, layout, settings, trains, hardware)
    _optimizer(parts, layout, settings, trains, hardware)
    for part in parts:
        parts[part] *= workload.updates(role)
    if role in workload.unpassed:
        parts["tower"] += once
    parts["offload"] += 2 * (weights_s + optimizer_s)  # both ways, once for all updates of the step
    update_s = sum(parts.values())
    for part, seconds in before.items():
        parts[part] += seconds
    return RoleCost({"forward": forward_s, "update": update_s}, dict(parts), before, num)


def _tower_passes(
    arch: ModelArch, layout: ParallelLayout, settings: Settings, workload: Workload, hardware: Hardware
) -> tuple[Pass | None, float]:
    """Return (pass of the tower for a sample, in each of a role's passes; seconds of those of a step together, with features that
    are kept): the first for a tower that trains, the second for one that is frozen."""
    pictures, vision = workload.pictures, arch.vision
    if pictures is None or vision is None:
        return None, 0.0
    one = tower_pass(vision, min(pictures.tokens, workload.prompt_tokens), settings.dtype, hardware)
    if tower_trains(settings, arch):
        return one, 0.0
    return None, pictures.on_replica(workload.samples / layout.dp) * one.forward_s


def num_micro_batches(budget: int, sequences: int, workload: Workload, layout: ParallelLayout) -> int:
    """Micro-batches that the balancer makes of sequences of the mean length; a multiple of pp if interleaved."""
    return padded_micro_batches(layout, micro_batches_bound(sequences, max(1, round(workload.length)), budget))


def stage_kinds(arch: ModelArch, layout: ParallelLayout) -> dict[int, int]:
    """First stage of every kind -> number of stages of this kind. Stages differ by embedding, head and layers."""
    found: dict[tuple[object, ...], list[int]] = {}
    for stage, chunks in enumerate(chunks_of_stages(arch, layout.pp, layout.vpp, layout.layers_per_stage)):
        kind = stage == 0, stage == layout.pp - 1, *(sum(one) for one in zip(*chunks))
        found.setdefault(kind, []).append(stage)
    return {stages[0]: len(stages) for stages in found.values()}


@cache  # of a search's layouts hundreds are cut alike
def chunks_of_stages(
    arch: ModelArch, pp: int, vpp: int, layers_per_stage: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """[stage][chunk] layers of every kind of the model, those with a window apart, in one order."""
    layout = ParallelLayout(pp, pp=pp, vpp=vpp, layers_per_stage=layers_per_stage)
    slides = arch.sliding_layers or (False,) * arch.num_layers
    kinds = [(arch.kind(layer), bool(slides[layer])) for layer in range(arch.num_layers)]
    order = sorted(set(kinds))

    def counts(stage: int, chunk: int) -> tuple[int, ...]:
        own = Counter(kinds[layer] for layer in layout.chunk_layers(arch.num_layers, stage, chunk))
        return tuple(own[kind] for kind in order)

    return tuple(tuple(counts(stage, chunk) for chunk in range(vpp)) for stage in range(pp))


def pipeline_parts(stages: Sequence[tuple[Pass, int]], layout: ParallelLayout, count: int) -> dict[str, float]:
    """Seconds of a pass of `count` micro-batches, by part. `bubble` is the idle time of the slowest stage. stages: one of each
    kind, with the number of that kind.

    The total is count * s + (sum of the others) / vpp for the slowest stage s. With equal stages this is (count + (pp - 1) / vpp) *
    s, the length of 1F1B and of its interleaved form (Narayanan et al. 2021, section 2.2)."""
    slowest = max((one for one, _ in stages), key=lambda one: one.total_s)
    parts: dict[str, float] = defaultdict(float)
    for direction in (slowest.forward, slowest.backward):
        for part, seconds in direction.items():
            parts[part] += count * seconds
    # A test compares this with `commands/plan/timeline.py`.
    every = sum(number * one.total_s for one, number in stages)
    # The slowest stage never pauses once the pipeline is full; before and after, it waits while one micro-batch passes the other
    # stages, a chunk of each.
    parts["bubble"] = (every - slowest.total_s) / layout.vpp
    return dict(parts)


def _reduce_gradients(
    parts: dict[str, float], layout: ParallelLayout, settings: Trained, counts: Mapping[int, ParameterCount], hardware: Hardware
) -> None:
    """Add the reduction of fp32 gradients over the ranks with the same weights, after the backward pass."""
    links, itemsize = Links.of(hardware), ITEMSIZE[settings.dtype]
    slowest = 0.0
    for count in counts.values():
        seconds = 0.0
        sizes: dict[Axis, int] = {"gradients": count.dense, "expert gradients": count.experts}
        for axis, size in sizes.items():
            group = span(layout, axis, hardware.gpus_per_node)
            if not size:
                continue
            if settings.optimizer.distributed:  # ZeRO-1 (Rajbhandari et al. 2020): scatter gradients, gather new weights
                seconds += links.gather_s(group, size * FP32) + links.gather_s(group, size * itemsize)
            else:
                seconds += links.all_reduce_s(group, size * FP32)
        slowest = max(slowest, seconds)  # stages reduce at the same time
    parts["dp"] += slowest


def _optimizer(
    parts: dict[str, float], layout: ParallelLayout, settings: Trained, counts: Mapping[int, ParameterCount], hardware: Hardware
) -> None:
    """Add the optimizer step, which is bound by memory bandwidth."""
    itemsize = ITEMSIZE[settings.dtype]
    largest = 0.0
    for count in counts.values():
        shard = sharded_bytes(count, 1, 1, layout, settings.optimizer.distributed) / FP32  # parameters that one rank updates
        # Per parameter 10 fp32 accesses: gradient, weight and two moments read, the last three written; the norm and its clipping
        # read the gradient twice and write it once. The weight is written in its own type, the whole gradient buffer zeroed.
        seconds = (shard * (10 * FP32 + itemsize) + count.total * FP32) / hardware.memory_bytes_per_s
        largest = max(largest, seconds)  # stages step at the same time
    parts["optimizer"] += largest


def _host_trip_s(memory: Mapping[int, RoleMemory] | None, hardware: Hardware) -> tuple[float, float]:
    """Seconds of offloaded (weights, optimizer state) one way between host memory and the device (`engine/offload.py`)."""
    # Each moves once per phase: the state comes with the first optimizer step and goes back after the last.
    if memory is None:
        return 0.0, 0.0
    weights = max(one.offloaded_weights for one in memory.values())
    optimizer = max(one.offloaded_optimizer for one in memory.values())
    return weights / hardware.host_bytes_per_s, optimizer / hardware.host_bytes_per_s


def exchange_s(weights: int, gradients: int, layout: ParallelLayout, layers: int, work: Pass, hardware: Hardware) -> float:
    """Seconds that communication under engine fsdp2 adds to one micro-batch of a rank (Rajbhandari et al. 2020, section 7.2).
    weights, gradients: bytes of the whole model, or of what tp leaves of it; no gradients if they are not reduced after this one.
    work: its arithmetic; without a backward pass only the forward is counted."""
    links, group = Links.of(hardware), span(layout, "gradients", hardware.gpus_per_node)
    gather = links.gather_s(group, weights)
    # Every weight is gathered in the forward and again in the backward pass, which reduces and scatters every gradient.
    times = [(gather, work.forward_s)]
    if work.backward:
        reduce = links.gather_s(group, gradients) if gradients else 0.0
        times.append((gather + reduce, work.total_s - work.forward_s))
    if not hardware.is_gpu():
        return sum(talk for talk, _ in times)  # the cores that send are those that compute
    # The next layer is gathered while one computes: only the first layer shows, what computation is too short to hide, and that it
    # is slower meanwhile.
    return sum(max(talk / layers, talk - compute) + min(talk, compute) * SLOWER / (1 + SLOWER) for talk, compute in times)


def copies_s(weights: int, gradients: int, layout: ParallelLayout, hardware: Hardware, *, backward: bool) -> float:
    """Seconds of the copies of a micro-batch under engine fsdp2 on a GPU; arguments as in `exchange_s`."""
    if not hardware.is_gpu() or layout.cp * layout.dp == 1:
        return 0.0
    # What is gathered is copied out of the buffer in which it arrives, and gradients into one, by the stream that computes.
    moved = 2 * weights + (3 * weights + 3 * gradients if backward else 0)
    return moved / hardware.memory_bytes_per_s
