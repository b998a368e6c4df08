"""The plan of a run as a value: layouts, memory per role and stage, rollout replicas, and what does not fit. `report.py` prints it.
Certain memory (weights, gradients, optimizer, KV cache) can refuse a run; the estimate of activations only warns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, floor
from typing import Any, Literal

from megappo.commands.plan.activations import ITEMSIZE, RoleWork, micro_batch_bytes, tower_bytes
from megappo.commands.plan.fsdp2 import count_own_parameters, inputs_away, score_bytes, sharded_memory
from megappo.commands.plan.hf_activations import OwnPasses
from megappo.commands.plan.memory import (
    GIB,
    Moment,
    ParameterCount,
    RoleMemory,
    RolloutMemory,
    count_parameters,
    fullest_moment,
    role_memory,
    rollout_memory,
    with_average,
)
from megappo.commands.plan.reserve import reserve_bytes
from megappo.commands.plan.timeline import BACKWARD, Timeline, chunk_work, padded_micro_batches, timeline
from megappo.commands.plan.tower import Shown, shown_by_keys, tower_trains, working_bytes
from megappo.config.batch import StepArithmetic, micro_batches_bound, step_arithmetic, text_arithmetic, update_schedule
from megappo.config.checks import Device
from megappo.config.errors import ConfigError, problem
from megappo.config.evaluations import evaluation_sets
from megappo.config.layout_checks import (
    placements_in_use,
    reference_is_base,
    roles_in_use,
    scores_with_model,
    trained_sections,
    value_head_of,
)
from megappo.config.role_sections import TrainableConfig, key_of_role, section_of
from megappo.config.schema import TrainConfig
from megappo.data.images import FEATURE_BYTES
from megappo.data.packing import route_dtype
from megappo.models.arch import ModelArch
from megappo.models.families.registry import FAMILIES
from megappo.models.freeze import frozen_of
from megappo.models.lora import adapted_modules, tensors_to_adapt
from megappo.parallel.layout import ParallelLayout, Placement, placement_of
from megappo.rollout.types import SamplingParams
from megappo.rollout.vllm_options import CPU_KV_CACHE_GIB
from megappo.telemetry.tables import gib
from megappo.trainer.roles import critic_reads, policy_reads


@dataclass(frozen=True)
class Plan:
    """Sizes and memory of a run."""

    config: TrainConfig
    archs: Mapping[str, ModelArch]
    layouts: Mapping[str, ParallelLayout]
    world_size: int
    device: Device
    device_memory: int | None
    """Bytes of one GPU; None if unknown."""
    step: StepArithmetic
    micro_batches: Mapping[str, int]
    memory: Mapping[str, tuple[RoleMemory, ...]]
    """[role][stage]: one rank of the stage."""
    rollout: RolloutMemory | None
    reserve: int = 0
    """Bytes of one rank for the CUDA context and NCCL."""
    warnings: tuple[str, ...] = field(default=())
    is_supervised: bool = False
    """The step is that of a supervised run (`config.supervised_step`), which samples held-out answers alone, if any."""
    shown: Shown | None = None
    """Images of a prompt, from the data; None: from the keys, or none."""

    @property
    def replicas(self) -> int:
        """Number of vLLM replicas, or of the policy's data-parallel ranks if those generate; 0 if the run does not sample."""
        if not self.samples:
            return 0
        if self.rollout is None:
            return self.layouts["policy"].dp
        return len(self.placements["rollout"]) // self.config.rollout.tp

    @property
    def samples(self) -> bool:
        """True if the policy samples; False if a critic trains on recorded trajectories, or a model on examples alone."""
        return "policy" in self.layouts and not (self.is_supervised and not evaluation_sets(self.config))

    @cached_property
    def placements(self) -> Mapping[str, Placement]:
        """Ranks of every role and of `rollout`."""
        return {name: placement_of(ranks, self.world_size) for name, ranks in placements_in_use(self.config).items()}

    def roles_on(self, rank: int) -> list[str]:
        return [role for role in self.layouts if rank in self.placements[role]]

    def generates(self, rank: int) -> bool:
        """True if vLLM runs on this rank."""
        return self.rollout is not None and rank in self.placements["rollout"]

    def distinct_ranks(self) -> list[int]:
        """First rank of every combination of stages, and a few more. A rank in between holds as much as the one before it."""
        # Stages and placements are runs of neighbouring ranks: a combination begins where a stage or a placement begins or ends.
        begins = {
            self.placements[role].rank_of(layout.rank_of(pp=stage))
            for role, layout in self.layouts.items()
            for stage in range(layout.pp)
        }
        for placement in (one for one in self.placements.values() if not one.is_whole):
            begins |= {rank for rank in placement.ranks if rank - 1 not in placement}
            begins |= {rank + 1 for rank in placement.ranks if rank + 1 not in placement} - {self.world_size}
        return sorted(begins)

    def stage(self, role: str, rank: int) -> RoleMemory:
        """Memory of a role on `rank`, a number in the world."""
        return self.memory[role][self.layouts[role].coordinates(self.placements[role].position_of(rank)).pp]

    def rollout_bytes(self, moment: Moment = "generate") -> int:
        """Bytes of vLLM on one of its ranks: everything while it generates, otherwise what does not sleep (`rollout.sleep`)."""
        return self.rollout.held(moment, self.config.rollout.sleep) if self.rollout is not None else 0

    def trainer_at_rest(self, rank: int) -> int:
        """Bytes of one rank without vLLM while no role works, as when vLLM starts."""
        return self.reserve + sum(self.stage(role, rank).resident for role in self.roles_on(rank))

    def experience(self, rank: int) -> int:
        """`experience_bytes` and `feature_bytes` of one rank; 0 on a CPU, where they take no memory of a device."""
        if self.device != "cuda":
            return 0
        replicas = {role: self.layouts[role].dp for role in self.roles_on(rank)}
        features = feature_bytes(self.config, self.archs, replicas, self.shown)
        if self.is_supervised:  # examples stay on the host
            return features
        return features + experience_bytes(
            self.config, self.world_size, replicas, route_bytes(self.config, self.archs.get("policy"))
        )

    def certain(self, rank: int) -> int:
        """Bytes of one rank in its fullest moment, without activations."""
        pushed = [self.stage(role, rank).saving for role in self._beside_sampler(rank)]
        return self._fullest(rank, [m.offloaded + m.offloaded_optimizer for m in self._roles(rank)], pushed)

    def peak(self, rank: int) -> int:
        """Bytes of one rank in its fullest moment, with the estimate of activations."""
        trained = trained_sections(self.config)
        pushed = [beside_sampler(self.stage(role, rank), role in trained) for role in self._beside_sampler(rank)]
        return self._fullest(rank, [m.active for m in self._roles(rank)], pushed)

    def _roles(self, rank: int) -> list[RoleMemory]:
        return [self.stage(role, rank) for role in self.roles_on(rank)]

    def _beside_sampler(self, rank: int) -> list[str]:
        here = self.roles_on(rank)
        return [role for role in roles_beside_sampler(self.config) if role in here]

    def _fullest(self, rank: int, training: Sequence[int], pushed: Sequence[int]) -> int:
        """training, pushed: bytes that each role adds to what rests, at its peak in stages 3 to 6 and after a push."""
        work = max(training, default=0), max(pushed, default=0)
        rollout, held = self.rollout if self.generates(rank) else None, self.experience(rank)
        work = work[0] + held, work[1] + held
        return fullest_moment(self.trainer_at_rest(rank), *work, rollout, self.config.rollout.sleep)

    def host_memory(self, rank: int) -> int:
        """Bytes of host memory on one rank for the offloaded parts of all roles, while none of them works."""
        return sum(memory.host_memory for memory in self._roles(rank))

    def snapshot_memory(self, rank: int) -> int:
        """Bytes of host memory on one rank for the copy that an asynchronous save writes from. It is kept after the first save."""
        if not self.config.checkpoint.asynchronous:
            return 0
        roles = [self.stage(role, rank) for role in self.roles_on(rank) if role in trained_sections(self.config)]
        written = sum(m.written_weights if self.config.checkpoint.save_only_model else m.written for m in roles)
        refreshed = "reference" in self.roles_on(rank) and self.config.reference.refresh is not None
        return written + (-(-self.stage("reference", rank).weights // self._copies("reference")) if refreshed else 0)

    def _copies(self, role: str) -> int:
        """Number of ranks that hold the same weights of a frozen role and share the writing."""
        layout = self.layouts[role]
        return 1 if section_of(self.config, role).engine == "fsdp2" else layout.dp * layout.cp

    def pipeline(self, role: str) -> Timeline:
        """Schedule of one mini-batch of an update when its sequences are at their longest."""
        layout, settings = self.layouts[role], section_of(self.config, role)
        backward = BACKWARD + (settings.recomputed == "full")  # recomputation adds a forward to every backward
        work = chunk_work(layout, self.archs[role].num_layers)
        return timeline(layout, self.micro_batches[role], backward=backward, work=work)

    def bubble(self, role: str) -> float:
        """Share of the time of `pipeline` in which stages wait."""
        layout = self.layouts[role]
        if layout.layers_per_stage:
            return self.pipeline(role).bubble
        # The closed form of Narayanan et al. 2021, section 2.2, for an even split.
        count = layout.vpp * padded_micro_batches(layout, self.micro_batches[role])
        return (layout.pp - 1) / (count + layout.pp - 1)

    def fullest_rank(self) -> int:
        return max(self.distinct_ranks(), key=lambda rank: (self.peak(rank), -rank))  # of equal ranks the first


LARGE_SHARE = 0.05  # of a rank's memory: to lower a smaller one would help little


def roles_beside_sampler(config: TrainConfig) -> list[str]:
    """Roles that work while vLLM's pushed weights are awake: those that a checkpoint saves, and a reward model in evaluations."""
    evaluates = scores_with_model(config) and bool(evaluation_sets(config))
    return [*trained_sections(config), *(["reward_model"] if evaluates else [])]


def beside_sampler(memory: RoleMemory, is_trained: bool) -> int:
    """Bytes that a role of `roles_beside_sampler` adds on the device while it works."""
    return memory.saving if is_trained else memory.inferring


def check_plan(plan: Plan) -> Plan:
    """Check a plan and add its warnings. ConfigError if its certain memory exceeds the device's, or if vLLM could not start."""
    check_kv_cache(plan)
    plan = _check_fit(plan)
    check_rollout_start(plan)
    return plan


def work_out(
    config: TrainConfig,
    archs: Mapping[str, ModelArch],
    layouts: Mapping[str, ParallelLayout],
    world_size: int,
    device: Device,
    device_memory: int | None = None,
    shown: Shown | None = None,
) -> Plan:
    """Plan a run without checking whether it fits. device_memory: bytes of one GPU. shown: images of a prompt; None: as far as keys
    say."""
    step = step_arithmetic(config)
    micro_batches = {role: _work(config, role, layout, device).num_micro_batches for role, layout in layouts.items()}
    memory = {
        role: tuple(memory_of_stages(config, role, archs[role], layout, range(layout.pp), device, shown).values())
        for role, layout in layouts.items()
    }
    by_vllm = config.rollout.engine == "vllm" and "policy" in layouts
    rollout = memory_of_rollout(config, archs["policy"], device, device_memory) if by_vllm else None
    plan = Plan(config, archs, layouts, world_size, device, device_memory, step, micro_batches, memory, rollout, shown=shown)
    return replace(plan, reserve=_reserve(plan)) if device == "cuda" else plan


def _reserve(plan: Plan) -> int:
    def of_rank(rank: int) -> int:
        of_roles = [(plan.layouts[role], plan.archs[role].moe is not None) for role in plan.roles_on(rank)]
        return reserve_bytes(of_roles, plan.world_size, plan.config.rollout.tp if plan.generates(rank) else 1)

    return max(map(of_rank, plan.distinct_ranks()))


def samples_of_pass(config: TrainConfig, role: str, step: StepArithmetic) -> int:
    """Samples in one pass: of a mini-batch for a role that trains, of the whole step for a frozen one."""
    return update_schedule(config, role).mini_batch_size if role in trained_sections(config) else step.samples


def _each(samples: int, count: int) -> int:
    return -(-samples // count)


def route_bytes(config: TrainConfig, arch: ModelArch | None) -> int:
    """Bytes of the experts that the sampler chose for a token, if they are replayed. arch: of the policy, if there is one."""
    if arch is None or arch.moe is None or not config.rollout.replays_experts:
        return 0
    return route_pairs(arch) * route_dtype(arch.moe.num_experts).itemsize


def route_pairs(arch: ModelArch) -> int:
    """Count the experts that a token meets in all layers."""
    return 0 if arch.moe is None else (arch.num_layers - len(arch.moe.dense_layers)) * arch.moe.top_k


def experience_bytes(config: TrainConfig, world_size: int, replicas: Mapping[str, int], routes: int = 0) -> int:
    """Bytes of a step's tokens and fields on one rank if all are at their longest: its own samples at the end of stage 5, and what
    its trained roles read of theirs in stage 6. replicas: role on the rank -> its model replicas. routes: `route_bytes`."""
    step, frozen = step_arithmetic(config), {"reference", "teacher"} & {*roles_in_use(config)}
    num_frozen = len(frozen) + reference_is_base(config)
    # Log-probs of sampler, policy, reference and teacher, entropy, reward, both advantages; value and returns of each critic.
    held = _each(step.samples, world_size) * (_token_bytes(6 + num_frozen + 2 * len(config.critics_in_use)) + routes)
    for role in set(replicas) & set(trained_sections(config)):
        read = _token_bytes(values_read(config, role)[1]) + (routes if role == "policy" else 0)
        held += _each(step.samples, replicas[role]) * read
    return held * step.max_sequence_tokens


def feature_bytes(
    config: TrainConfig, archs: Mapping[str, ModelArch], replicas: Mapping[str, int], shown: Shown | None = None
) -> int:
    """Most bytes of features that the frozen towers of a rank keep through a step (`data.images.Features`). replicas: as in
    `experience_bytes`. shown: as in `work_out`."""
    held, samples = 0, step_arithmetic(config).samples
    for role, count in replicas.items():
        arch, settings = archs[role], section_of(config, role)
        seen = shown or shown_by_keys(config, arch)
        if seen is not None and arch.vision is not None and not tower_trains(settings, arch):
            of_token = (1 + arch.vision.deepstack) * arch.hidden_size * ITEMSIZE[settings.dtype]
            held += _each(samples, count) * seen.tokens * of_token
    return min(held, FEATURE_BYTES)


def _token_bytes(num_fields: int) -> int:
    return 8 + 1 + 4 * num_fields  # id, response_mask, fp32 fields


def _full_micro_batch(budget: int, total: int, longest: int, layout: ParallelLayout) -> int:
    """Most tokens of a micro-batch in a pass of `total` tokens."""
    tokens = min(max(budget, longest), total)
    if layout.cp == 1:
        return tokens
    # Context parallel pads every sequence to a multiple of 2 cp.
    padding = -longest % (2 * layout.cp)
    return tokens + -(-tokens // longest) * padding


def memory_of_stages(
    config: TrainConfig,
    role: str,
    arch: ModelArch,
    layout: ParallelLayout,
    stages: Iterable[int],
    device: Device,
    shown: Shown | None = None,
) -> dict[int, RoleMemory]:
    """Stage -> memory of one of its ranks, of these stages of a role's layout. shown: as in `work_out`."""
    settings, work = section_of(config, role), _work(config, role, layout, device)
    work = replace(work, patches=patches_of(config, role, arch, layout, work, shown))
    if work.values is not None and (role == "policy" or role == "reference" and config.rollout.replay_experts == "all"):
        # The routes of a micro-batch, and a table of them in int16
        numbers = -(-(2 * route_pairs(arch) + route_bytes(config, arch)) // 4) if route_bytes(config, arch) else 0
        work = replace(work, values=(work.values[0] + numbers, work.values[1] + numbers))
    frozen = frozen_of(settings, arch, value_head=work.value_head)
    kept, found = replace(work, frozen=frozen, tower_trains=tower_trains(settings, arch)), {}
    for stage in stages:
        count = None
        if settings.engine == "megatron":
            memory, count = role_memory(arch, layout, stage, kept), count_parameters(arch, layout, stage)
        else:
            memory = role_memory(arch, layout, stage, work, count_own_parameters)
            # `sharded_memory` counts what is frozen by transformers' names.
            memory = _with_tower(_sharded(config, role, arch, layout, device, memory, kept), arch, layout, kept)
        found[stage] = _with_average(config, role, memory, count, layout, device)
    return found


def _work(config: TrainConfig, role: str, layout: ParallelLayout, device: Device) -> RoleWork:
    """Settings and sizes of a role's passes; nothing is frozen."""
    step, settings, texts = step_arithmetic(config), section_of(config, role), text_arithmetic(config, role)
    longest, samples = _longest(config, role), samples_of_pass(config, role, step)

    def full(samples: int, longest: int, texts_tokens: int = 0) -> int:
        total = _each(samples, layout.dp) * step.max_sequence_tokens + texts_tokens
        return _full_micro_batch(settings.micro_batch_tokens, total, longest, layout)

    work = RoleWork(
        dtype=settings.dtype,
        trained=False,
        micro_batch_tokens=full(samples, longest, _each(texts.count, layout.dp) * texts.max_tokens),
        longest=longest if settings.engine == "megatron" else 0,  # `_sharded` counts scores by itself
        # Log-probs and values are computed for the whole step at once, and not for texts.
        forward_tokens=full(step.samples, step.max_sequence_tokens),
        # The most of a pass: when every sequence and every text is at its longest.
        num_micro_batches=micro_batches_bound(
            _each(samples, layout.dp) + _each(texts.count, layout.dp), longest, settings.micro_batch_tokens
        ),
        value_head=value_head_of(settings) is not None,
        fused=device == "cuda",
        values=values_read(config, role),
        offload=("parameters" in settings.offload and device == "cuda", False, False),
    )
    if not isinstance(settings, TrainableConfig):
        return work
    return replace(
        work,
        trained=True,
        distributed_optimizer=settings.optimizer.distributed,
        recompute=settings.recomputed,
        offload=(work.offload[0], "gradients" in settings.offload, "optimizer" in settings.offload and device == "cuda"),
        steps=update_schedule(config, role).optimizer_steps(step.samples),
        adam_buffers=device == "cuda" and config.model.impl == "local",
        lora=settings.lora,
    )


def patches_of(
    config: TrainConfig, role: str, arch: ModelArch, layout: ParallelLayout, work: RoleWork, shown: Shown | None
) -> tuple[int, int]:
    """Most patches of images in a pass of a tower, of (a training pass, a pass without gradients): if no two samples of the
    micro-batch show the same image, and responses are so short that as many samples as can be are in it. A frozen tower passes the
    images of a sample at most."""
    shown = shown or shown_by_keys(config, arch)
    if shown is None or arch.vision is None:
        return 0, 0
    step = step_arithmetic(config)
    passes = (
        (work.micro_batch_tokens, samples_of_pass(config, role, step)),
        (work.forward_tokens or work.micro_batch_tokens, step.samples),
    )
    together = (_each(samples, layout.dp) if tower_trains(section_of(config, role), arch) else 1 for _, samples in passes)
    training, forward = (min(tokens, count * shown.tokens) for (tokens, _), count in zip(passes, together))
    return training * arch.vision.merge**2, forward * arch.vision.merge**2


def _longest(config: TrainConfig, role: str) -> int:
    """Tokens of the longest sequence or text of a role."""
    return max(step_arithmetic(config).max_sequence_tokens, text_arithmetic(config, role).max_tokens)


def _sharded(
    config: TrainConfig, role: str, arch: ModelArch, layout: ParallelLayout, device: Device, whole: RoleMemory, work: RoleWork
) -> RoleMemory:
    """Memory of a rank under engine fsdp2. whole: with unsharded weights."""
    settings, itemsize, tokens = section_of(config, role), ITEMSIZE[work.dtype], work.micro_batch_tokens
    forward_tokens = work.forward_tokens or tokens
    forward, _ = score_bytes(arch, forward_tokens, step_arithmetic(config).max_sequence_tokens, itemsize, work.recompute)
    _, training = score_bytes(arch, tokens, _longest(config, role), itemsize, work.recompute)
    how: dict[str, Any] = {}
    if isinstance(settings, TrainableConfig):
        how["accumulates"] = settings.reduce_once and work.num_micro_batches > 1
        if settings.recompute == "offload" and device == "cuda":
            how["inputs_on_host"] = inputs_away(arch, layout, tokens, itemsize)
    if arch.family in FAMILIES:
        adapted = None
        if work.lora is not None:
            names = adapted_modules(tensors_to_adapt(arch), work.lora.targets)
            adapted = frozenset(name.rpartition(".")[2] for name in names)
        read_forward, read = work.values or (0, 0)
        how["passes"] = OwnPasses(
            tokens=-(-tokens // layout.cp),
            forward_tokens=-(-forward_tokens // layout.cp),
            recompute=work.recompute,
            device=device,
            batch=micro_batch_bytes(layout, tokens, read),
            forward_batch=micro_batch_bytes(layout, forward_tokens, read_forward),
            value_head=work.value_head,
            longest=step_arithmetic(config).max_sequence_tokens,
            adapted=adapted,
            rank=0 if work.lora is None else work.lora.rank,
        )
    return sharded_memory(whole, arch, layout, work, scores=(forward, training), **how)


def _with_tower(memory: RoleMemory, arch: ModelArch, layout: ParallelLayout, work: RoleWork) -> RoleMemory:
    """Add the activations of a vision tower to the memory of a rank under engine fsdp2."""
    if arch.vision is None or not any(work.patches):
        return memory
    kept, passing = tower_bytes(arch, layout, 0, work)
    return replace(
        memory,
        forward=max(memory.forward, work.patches[1] * working_bytes(arch.vision, ITEMSIZE[work.dtype])),
        activations=max(memory.activations + kept, passing),
        patches=work.patches[not work.trained],
        tower=max(kept, passing),
    )


def _with_average(
    config: TrainConfig, role: str, memory: RoleMemory, count: ParameterCount | None, layout: ParallelLayout, device: Device
) -> RoleMemory:
    """Add the moving average of the policy's weights, if the run has one. count: as in `memory.with_average`."""
    if role != "policy" or config.policy.ema is None:
        return memory
    on_device = device == "cpu"  # whose memory is the host's
    return with_average(memory, count, layout, on_device=on_device, swaps=config.trainer.evaluate_with == "ema")


def values_read(config: TrainConfig, role: str) -> tuple[int, int]:
    """Numbers per token that a role's passes read (without, with) gradients: kept top-k ids and the fields of its losses."""
    if value_head_of(section_of(config, role)) is not None:
        return 0, len(critic_reads(role))
    kept = ids_of_token(config)
    return kept, kept + len(policy_reads(config.algorithm))


def ids_of_token(config: TrainConfig) -> int:
    """Ids that the sampler keeps of a token, at most; 0 if it samples from all."""
    rollout, s = config.rollout, config.rollout.sampling
    return SamplingParams(
        rollout.max_response_tokens, s.temperature, s.top_p, s.top_k, record_top_k_ids=s.replay_top_k_ids
    ).top_k_width


def rollout_dtype(config: TrainConfig) -> Literal["bf16", "fp32"]:
    return config.policy.dtype if config.rollout.dtype == "auto" else config.rollout.dtype


def memory_of_rollout(config: TrainConfig, arch: ModelArch, device: Device, device_memory: int | None) -> RolloutMemory:
    """Memory of one vLLM rank."""
    rollout, dtype = config.rollout, rollout_dtype(config)
    cache_gib = CPU_KV_CACHE_GIB if rollout.kv_cache_gib is None and device == "cpu" else rollout.kv_cache_gib
    return rollout_memory(arch, rollout.tp, ITEMSIZE[dtype], cache_gib, rollout.memory_share, device_memory)


def sequences_at_once(plan: Plan) -> int:
    """Most sequences that one vLLM replica decodes together, of all steps that may have begun (`rollout.max_staleness`)."""
    if plan.is_supervised:  # the number of held-out prompts is known only with the data
        return plan.config.rollout.max_num_seqs
    begun = plan.step.samples * (1 + (plan.config.rollout.max_staleness or 0))
    return min(plan.config.rollout.max_num_seqs, sequences_of_replica(begun, plan.replicas))


def sequences_of_replica(samples: int, replicas: int) -> int:
    """Sequences of a step that the fullest replica generates."""
    return -(-samples // replicas)


def check_kv_cache(plan: Plan) -> None:
    """Raise ConfigError if the KV cache cannot hold one sequence at its longest. vLLM would refuse to start."""
    rollout = plan.rollout
    longest = plan.step.max_sequence_tokens
    if rollout is None or rollout.holds_sequence(longest):
        return
    needed = longest * rollout.kv_bytes_per_token
    config = plan.config.rollout
    sequence = f"one sequence of {longest} tokens needs {gib(needed)} GiB"
    if config.kv_cache_gib is not None or plan.device == "cpu":
        on_cpu = f" (null is {CPU_KV_CACHE_GIB} on a CPU)" if config.kv_cache_gib is None else ""
        gpu = "; --gpu-memory-gib plans for GPUs" if plan.device == "cpu" and plan.config.run.device == "auto" else ""
        fix = f"{sequence} of KV cache{on_cpu}; use at least {gib(needed * 1.01)}, or shorter sequences{gpu}"
        raise ConfigError(problem("rollout.kv_cache_gib", config.kv_cache_gib, fix))
    assert plan.device_memory is not None
    least = ceil(100 * (rollout.weights + needed) / plan.device_memory) / 100
    fix = f"use at least {least:.2f}, or raise rollout.tp" if least < 1 else "raise rollout.tp, or use larger GPUs"
    raise ConfigError(
        problem(
            "rollout.memory_share",
            config.memory_share,
            f"of {gib(plan.device_memory)} GiB must hold vLLM's weights ({gib(rollout.weights)} GiB), and {sequence} "
            f"of KV cache on top; {fix}",
        )
    )


def check_rollout_start(plan: Plan) -> None:
    """Raise ConfigError if vLLM would refuse to start because its share of the device is not free at that moment."""
    if plan.rollout is None or plan.device_memory is None or plan.device == "cpu":
        return
    config, have = plan.config.rollout, plan.device_memory
    generating = [rank for rank in plan.distinct_ranks() if plan.generates(rank)]
    rank = max(generating, key=lambda rank: (plan.trainer_at_rest(rank), -rank))
    held = plan.trainer_at_rest(rank)
    if config.kv_cache_gib is not None or held + config.memory_share * have <= have:
        return
    most = floor(100 * (1 - held / have)) / 100
    fix = f"use at most {most:.2f}, or offload more" if most > 0 else "offload more, or use larger GPUs"
    raise ConfigError(
        problem(
            "rollout.memory_share",
            config.memory_share,
            f"of {gib(have)} GiB must be free when vLLM starts, and rank {rank} then holds {gib(held)} GiB; {fix}",
        )
    )


def _check_fit(plan: Plan) -> Plan:
    if plan.device_memory is None:
        return plan
    rank = plan.fullest_rank()
    certain, peak, have = plan.certain(rank), plan.peak(rank), plan.device_memory
    if certain > have:
        raise ConfigError(
            f"rank {rank} needs {gib(certain)} GiB for weights, gradients, optimizer, experience, rollout and reserve and has "
            f"{gib(have)} GiB; " + ", or ".join(_ways_to_fit(plan, rank))
        )
    if peak <= have:
        return plan
    warning = (
        f"rank {rank} may run out of memory: {gib(peak)} GiB with activations (an estimate), {gib(have)} GiB there; "
        "the table of phases says what would relieve it"
    )
    return replace(plan, warnings=(warning,))


def _ways_to_fit(plan: Plan, rank: int) -> Iterator[str]:
    here = plan.roles_on(rank)
    if not here:
        yield "raise rollout.tp"
        return
    role = max(here, key=lambda role: plan.stage(role, rank).held)
    yield f"raise {key_of_role(role)}.parallel.tp or .pp" + (" or .ep" if plan.archs[role].moe is not None else "")
    resting = max(here, key=lambda role: plan.stage(role, rank).resident)
    section = section_of(plan.config, resting)
    kept = [what for what in section.may_offload if what not in section.offload]
    if kept and plan.device == "cuda" and (len(here) > 1 or plan.generates(rank)):
        yield f"set {key_of_role(resting)}.offload=[{','.join((*section.offload, kept[-1]))}]"
    if plan.experience(rank) > LARGE_SHARE * plan.certain(rank):
        yield "lower data.prompts_per_step or rollout.max_response_tokens"
    if plan.generates(rank):
        yield "lower " + ("rollout.memory_share" if plan.config.rollout.kv_cache_gib is None else "rollout.kv_cache_gib")


def bytes_of_gib(value: float | None) -> int | None:
    return None if value is None else int(value * GIB)
