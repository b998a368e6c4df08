"""Measurements of a run's steps: time, memory, FLOPs and profiles."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config.layout_checks import reference_is_base
from megappo.config.rank_ranges import ALL
from megappo.config.role_sections import RoleConfig, TrainableConfig, is_critic, section_of
from megappo.config.run_sections import TelemetryConfig
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig
from megappo.data.images import ImageStore
from megappo.data.packing import PackedBatch
from megappo.models.arch import ModelArch, VisionArch
from megappo.models.flops import BACKWARD, Recompute, forward_flops, generation_flops, tower_flops
from megappo.models.freeze import frozen_of
from megappo.models.vision import spans_of
from megappo.parallel.layout import Placement, placement_of
from megappo.parallel.totals import total
from megappo.runtime.sections import Sections
from megappo.telemetry.hardware import Dtype, profile_of
from megappo.telemetry.metrics import REWARD_MODEL_STAGE, STAGES, Metric
from megappo.telemetry.side_work import SideWork
from megappo.telemetry.tables import table
from megappo.telemetry.timers import StageTimers, host_peak_gib, memory_gauge
from megappo.trainer.build_roles import Roles, spec_of_role
from megappo.trainer.experience.experience import Experience
from megappo.trainer.rundir import RunDir
from megappo.trainer.step_record import StepRecord
from megappo.trainer.updates import UpdateSummary

STAGE_RANGE = "stage {}"
"""Name of a stage's range in a trace."""


class StepProfiler:
    """Profiler of this rank. Traces of `steps` go to `directory`, which need not exist; one that cannot be written is a warning."""

    def __init__(self, directory: Path, steps: Collection[int], device: torch.device) -> None:
        self._directory, self._steps = directory, frozenset(steps)
        self._on_gpu = device.type == "cuda"
        self._profiling = False
        self._side_work = SideWork()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        if step not in self._steps:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if self._on_gpu else []
        self._profiling = True
        try:
            with torch.profiler.profile(activities=activities) as profile:
                yield
        finally:
            self._profiling = False
        self._side_work.run("profile", lambda: self._write(profile, step))

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        with ExitStack() as ranges:
            if self._profiling:
                ranges.enter_context(torch.profiler.record_function(STAGE_RANGE.format(name)))
            if self._on_gpu:
                ranges.enter_context(torch.cuda.nvtx.range(name))
            yield

    def _write(self, profile: torch.profiler.profile, step: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        trace = self._directory / f"step_{step:06d}_rank_{dist.get_rank():05d}.json"
        profile.export_chrome_trace(str(trace))
        # Not by torch, which packs line by line at the highest level: that was a fifth of the processor time of 15 small steps.
        with trace.open("rb") as plain, gzip.open(f"{trace}.gz", "wb", compresslevel=1) as packed:
            shutil.copyfileobj(plain, packed, 1 << 20)
        trace.unlink()


Span = tuple[float, float]
"""Begin and end in seconds since the step's start."""

STAGES_OF_ROLE: Mapping[str, Sequence[str]] = {
    "rollout": ("generate", "push_weights"),
    "reward_model": ("score",),
    "policy": ("logprobs", "update_policy", "push_weights"),
    "reference": ("logprobs",),
    "teacher": ("logprobs",),
    "critic": ("logprobs", "update_critic"),
}
"""Role -> stages in which its ranks work for it (`critic`: any critic). In others they serve another role, exchange or wait."""
SHARED = ("score", "advantages", "check_replicas", "evaluate")
"""Stages in which all ranks work, whatever their roles."""


def spans_of_ranks(timers: StageTimers) -> list[dict[str, Span]]:
    """Return stage -> span for every rank, in seconds since rank 0 started the step. Collective over the world."""
    # Clocks of machines differ: the end of this exchange counts as the same moment on all ranks.
    dist.all_reduce(torch.zeros(1))
    met = timers.total_s
    mine = torch.full((len(STAGES) * 2 + 1,), torch.nan, dtype=torch.float64)
    mine[0] = met
    for place, stage in enumerate(STAGES):
        if stage in timers.spans:
            mine[1 + 2 * place : 3 + 2 * place] = torch.tensor(timers.spans[stage], dtype=torch.float64)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    shifted = [one[1:].add(found[0][0] - one[0]).view(-1, 2) for one in found]
    return [
        {stage: (begin, end) for stage, (begin, end) in zip(STAGES, one.tolist()) if begin == begin}  # NaN: not in this step
        for one in shifted
    ]


def timeline(spans: Sequence[Mapping[str, Span]], places: Mapping[str, Placement], step: int) -> list[str]:
    """Format a table with a row per role and a column per stage: from the first begin on a rank of the role to the last end.
    spans: of every rank (`spans_of_ranks`). places: placements of the roles."""
    order = list(STAGES_OF_ROLE)
    kinds = sorted(((order.index("critic" if is_critic(role) else role), role) for role in places), key=lambda one: one[0])
    rows = [(f"{role} {places[role]}", STAGES_OF_ROLE[order[kind]], places[role].ranks) for kind, role in kinds]
    rows.append(("all", SHARED, tuple(range(len(spans)))))
    cells = [[title, *(_cell(spans, ranks, stage) if stage in own else "" for stage in STAGES)] for title, own, ranks in rows]
    header = [f"seconds of step {step}", *STAGES]
    used = [0, *(column for column in range(1, len(header)) if any(row[column] for row in cells))]
    return table([header[column] for column in used], [[row[column] for column in used] for row in cells])


def _cell(spans: Sequence[Mapping[str, Span]], ranks: Sequence[int], stage: str) -> str:
    found = [spans[rank][stage] for rank in ranks if stage in spans[rank]]
    if not found:
        return ""
    # A rank may begin the step a moment before rank 0.
    return f"{max(0.0, min(begin for begin, _ in found)):.2f}-{max(end for _, end in found):.2f}"


TERA = 1e12
REWARD_MODEL = "reward_model"
"""Role that reads texts of its own; the other roles pass over the step's samples as generated."""
DECODING = "generate"
"""Stage without MFU: decoding reads weights and cache for every token, so arithmetic does not bound it."""


@dataclass(frozen=True)
class RoleModel:
    """Facts of a role's model that determine its FLOPs. peak_tflops: of one rank in the role's dtype, None if unknown. ranks: world
    ranks that share the work. frozen: only adapters train. tower_trains: false if only its language model does."""

    arch: ModelArch
    value_head: bool
    recompute: Recompute
    peak_tflops: float | None
    ranks: Sequence[int]
    frozen: bool = False
    tower_trains: bool = False

    def forward(self, lengths: Tensor, shown: Tensor | None = None) -> Work:
        """Work of a pass without gradients. shown: tower's FLOPs of the samples (`tower_work`), None without images."""
        flops = forward_flops(self.arch, lengths, value_head=self.value_head).total
        return Work(flops + _of_tower(shown, False), 0, int(lengths.sum()))

    def training(self, lengths: Tensor, shown: Tensor | None = None) -> Work:
        flops = forward_flops(self.arch, lengths, value_head=self.value_head)
        of_model = flops.training_frozen if self.frozen else flops.training
        of_model += _of_tower(shown, self.tower_trains)
        return Work(of_model, flops.recomputed(self.recompute), int(lengths.sum()))

    def generation(self, prompts: Tensor, responses: Tensor, shown: Tensor | None = None) -> Work:
        """Work of sampling. shown: of the samples that are kept; those that are not see as much on average."""
        flops = generation_flops(self.arch, prompts, responses).total
        if shown is not None:
            flops += round(_of_tower(shown, False) * len(prompts) / len(shown))
        return Work(flops, 0, int((prompts + responses).sum()))


def tower_work(vision: VisionArch, batch: PackedBatch, images: ImageStore) -> Tensor:
    """Return [B, 2] fp64 on the host, FLOPs of a forward pass of a tower over the images of every sequence: of the whole tower, and
    of the product with the pixels. An image counts for every sequence that shows it, as its tokens do."""
    work = torch.zeros(batch.num_sequences, 2, dtype=torch.float64)
    if not (found := spans_of(batch.tokens.cpu(), images)):
        return work
    flops = {image: tower_flops(vision, images.grid(image)) for image in {span.image for span in found}}
    sequence = torch.bucketize(torch.tensor([span.start for span in found]), batch.cu_seqlens[1:].cpu(), right=True)
    return work.index_add_(0, sequence, torch.tensor([flops[span.image] for span in found], dtype=torch.float64))


def _of_tower(shown: Tensor | None, trains: bool) -> int:
    """FLOPs of a tower in a pass. shown: `tower_work` of its sequences."""
    if shown is None:
        return 0
    forward, embedding = (round(one) for one in shown.sum(0).tolist())
    return (1 + BACKWARD) * forward - embedding if trains else forward


@dataclass(frozen=True)
class Work:
    """Work of a role in a stage over all ranks. flops: of the model. recomputed: extra FLOPs of recomputation. tokens: of its
    passes."""

    flops: int
    recomputed: int
    tokens: int


@dataclass(frozen=True)
class StepWork:
    """Stage -> role -> work of one step. models: of the roles. generating: ranks that share the generation."""

    by_stage: Mapping[str, Mapping[str, Work]]
    models: Mapping[str, RoleModel]
    generating: Sequence[int]

    @classmethod
    def of_step(
        cls,
        models: Mapping[str, RoleModel],
        lengths: Tensor,
        generated: tuple[Tensor, Tensor],
        critics: Mapping[str, UpdateSummary],
        policy: UpdateSummary,
        generating: Sequence[int],
        scoring: Work | None = None,
        shown: Mapping[str, Tensor] = {},
    ) -> StepWork:
        """Compute the work of a step from the lengths [N] of all its samples; updates count only the mini-batches that they took.
        generated: prompt and response tokens, [M] each, M >= N. scoring: work of the reward model, None without one. shown: role ->
        `tower_work` [N, 2] of all samples; empty without images."""

        def trained(role: str, one: UpdateSummary) -> Work:
            of_tower = shown[role][torch.cat(one.samples)] if role in shown else None
            return models[role].training(torch.cat(one.lengths), of_tower)

        by_critic = {role: trained(role, one) for role, one in critics.items() if one.lengths}
        by_policy = {"policy": trained("policy", policy)} if policy.lengths else {}
        by_stage = {
            "generate": {"policy": models["policy"].generation(*generated, shown.get("policy"))},
            **({} if scoring is None else {REWARD_MODEL_STAGE: {REWARD_MODEL: scoring}}),
            "logprobs": {role: model.forward(lengths, shown.get(role)) for role, model in models.items() if role != REWARD_MODEL},
            **{stage: works for stage, works in (("update_critic", by_critic), ("update_policy", by_policy)) if works},
        }
        return cls(by_stage, models, generating)

    def metrics(self, seconds: Mapping[str, float], step_s: float) -> dict[str, float]:
        """Return the figures by stage. seconds: stage -> wall time. step_s: seconds of the whole step."""
        found: dict[str, float] = {}
        for stage, roles in self.by_stage.items():
            rank_s = max(seconds[stage], 1e-9) * len(self._ranks(stage, roles))
            found |= {Metric.TFLOP.of(f"{stage}/{role}"): work.flops / TERA for role, work in roles.items()}
            found[Metric.TFLOPS.of(stage)] = sum(work.flops for work in roles.values()) / TERA / rank_s
            # Roles of one stage pass the same tokens, except in critic updates, where each critic has its own.
            together = sum if stage == "update_critic" else max
            found[Metric.STAGE_TOKENS.of(stage)] = together(work.tokens for work in roles.values()) / rank_s
            found |= dict(self._shares_of_peak(stage, roles, rank_s))
        whole = sum(work.flops for roles in self.by_stage.values() for work in roles.values())
        ranks = {rank for stage, roles in self.by_stage.items() for rank in self._ranks(stage, roles)}
        return found | {Metric.TFLOPS.of("step"): whole / TERA / (step_s * len(ranks))}

    def _ranks(self, stage: str, roles: Mapping[str, Work]) -> set[int]:
        return set(self.generating) if stage == DECODING else {rank for role in roles for rank in self.models[role].ranks}

    def _shares_of_peak(self, stage: str, roles: Mapping[str, Work], rank_s: float) -> Iterator[tuple[str, float]]:
        """Yield MFU, and HFU with recomputation: time of the work at peak over the time taken."""
        if stage == DECODING:
            return
        model_s = hardware_s = 0.0
        for role, work in roles.items():
            peak = self.models[role].peak_tflops
            if peak is None:
                return
            model_s += work.flops / (peak * TERA)
            hardware_s += (work.flops + work.recomputed) / (peak * TERA)
        yield Metric.MFU.of(stage), model_s / rank_s
        if hardware_s > model_s:
            yield Metric.HFU.of(stage), hardware_s / rank_s


def role_models(config: AnyConfig, placements: Mapping[str, Placement], device: torch.device) -> dict[str, RoleModel]:
    """Return role -> model facts."""
    models: dict[str, RoleModel] = {}
    for role, placement in placements.items():
        section: RoleConfig = section_of(config, role)
        recompute, frozen, tower_trains = "none", False, False
        spec = spec_of_role(config, role, None)
        has_head = spec.value_head is not None
        if isinstance(section, TrainableConfig):
            recompute, frozen = section.recomputed, section.lora is not None
            if (vision := spec.arch.vision) is not None and not frozen:
                still = frozen_of(section, spec.arch, value_head=has_head)
                tower_trains = not still.issuperset(name for name, _ in vision.tensors)
        peak = peak_tflops(config.telemetry, device, section.dtype)
        models[role] = RoleModel(spec.arch, has_head, recompute, peak, placement.ranks, frozen, tower_trains)
    if reference_is_base(config):
        models["reference"] = models[config.learner]  # its pass is one more of the same model
    return models


def peak_tflops(telemetry: TelemetryConfig, device: torch.device, dtype: Dtype) -> float | None:
    """Return the peak TFLOP/s of one rank: `telemetry.peak_tflops`, or its profile's; None without one."""
    if telemetry.peak_tflops is not None:
        return telemetry.peak_tflops
    profile = profile_of(telemetry.hardware, torch.cuda.get_device_name(device) if device.type == "cuda" else None)
    return None if profile is None else profile.peak_tflops(dtype)


def peak_note(telemetry: TelemetryConfig, device: torch.device, models: Mapping[str, RoleModel]) -> str:
    """Return a log line on the peak that MFU refers to, or on why there is no MFU."""
    peaks = sorted({model.peak_tflops for model in models.values() if model.peak_tflops is not None})
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if peaks:
        profile = "telemetry.hardware" if telemetry.hardware is not None else f"the profile of {gpu}"
        source = "telemetry.peak_tflops" if telemetry.peak_tflops is not None else profile
        return f"MFU is against {' and '.join(f'{peak:g}' for peak in peaks)} TFLOP/s of a rank ({source})"
    if not gpu:
        return "no MFU on a CPU without telemetry.peak_tflops"
    return f"no MFU: no profile has the peak of {gpu}; telemetry.peak_tflops sets it"


class Instruments:
    """Instruments of this rank. sections: of the watchdog, which is told of every stage. images: of the run; None without."""

    def __init__(
        self,
        config: AnyConfig,
        roles: Roles,
        run_dir: RunDir,
        device: torch.device,
        sections: Sections,
        images: ImageStore | None = None,
    ) -> None:
        self.sections, self._on_gpu, self._images = sections, device.type == "cuda", images
        self._models = role_models(config, roles.placements, device)
        # The training half of an asynchronous run waits together for ranks outside of its world.
        generating = ALL
        if isinstance(config, TrainConfig) and config.rollout.max_staleness is None:
            generating = config.rollout.ranks
        self._split = not all(placement.is_whole for placement in roles.placements.values()) or generating != ALL
        rollout = placement_of(generating, dist.get_world_size())
        self._generating = rollout.ranks
        self._places = {**roles.placements, **({"rollout": rollout} if isinstance(config, TrainConfig) else {})}
        self._memory = memory_gauge(device)
        self._profiler = StepProfiler(run_dir.profiles, config.telemetry.profile_steps, device)
        self.note = f"statistics: memory of a stage is the {self._memory.kind}; {peak_note(config.telemetry, device, self._models)}"
        """Meaning of the figures on this machine, in one line."""

    def step(self, step: int) -> AbstractContextManager[None]:
        return self._profiler.step(step)

    def timers(self, step: int | None = None) -> StageTimers:
        """Start the timers of a step, or of work outside of steps."""
        if step is not None:
            self.sections.of_step(step)
            if self._images is not None:
                self._images.begin_step()  # without any, also the first step of a run that goes on
        return StageTimers(observer=self, memory=self._memory)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        with self.sections.section(name), self._profiler.section(name):
            yield

    def settle_times(self, timers: StageTimers) -> None:
        """Replace each stage's seconds by the slowest rank's if ranks have different roles; then collective over the world."""
        if self._split:
            timers.seconds.update(largest_over_ranks(timers.seconds))

    def timeline(self, timers: StageTimers, step: int) -> list[str]:
        """Return lines on which role's ranks were in which stage, none if all roles live on all ranks; else collective over the
        world."""
        return timeline(spans_of_ranks(timers), self._places, step) if self._split else []

    def costs(self, record: StepRecord, timers: StageTimers) -> dict[str, float]:
        """Return FLOPs, their rates, and memory (largest over all ranks) of a step. Collective over the world."""
        lengths, (generated, sampled) = record.experience.table.length.long(), record.generated
        prompts = (generated - sampled).long()
        asked = record.critics, record.policy, self._generating, self._scoring(record), self._shown(record.experience)
        work = StepWork.of_step(self._models, lengths, (prompts, sampled.long()), *asked)
        return {**work.metrics(timers.seconds, timers.total_s), **largest_over_ranks(self._memory_of(timers))}

    def costs_of_update(
        self, stage: str, role: str, lengths: Tensor, timers: StageTimers, shown: Tensor | None = None
    ) -> dict[str, float]:
        """Return the same of a step that is one update of a role. lengths: [M] int64, tokens of all its sequences. shown:
        `tower_work` of them, or its sum. Collective over the world."""
        work = StepWork({stage: {role: self._models[role].training(lengths, shown)}}, self._models, ())
        return {**work.metrics(timers.seconds, timers.total_s), **largest_over_ranks(self._memory_of(timers))}

    def _shown(self, experience: Experience) -> dict[str, Tensor]:
        """Return role -> `tower_work` of all samples; empty without images. Collective over the world with images."""
        towers: dict[VisionArch, Tensor] = {}  # roles share what they see alike
        found: dict[str, Tensor] = {}
        for role, model in self._models.items():
            vision, mine = model.arch.vision, None
            if vision is not None and vision not in towers and (mine := self.shown(role, experience.batch)) is not None:
                towers[vision] = torch.stack([experience.column(one) for one in mine.unbind(1)], 1)
            found |= {role: towers[vision]} if vision in towers else {}
        return found

    def shown(self, role: str, batch: PackedBatch) -> Tensor | None:
        """Return `tower_work` of a role's model on this rank's sequences; None without images."""
        vision = self._models[role].arch.vision
        return None if vision is None or self._images is None else tower_work(vision, batch, self._images)

    def _scoring(self, record: StepRecord) -> Work | None:
        """Return the reward model's work over the texts of all ranks; None without one. Collective over the world with one."""
        model = self._models.get(REWARD_MODEL)
        if model is None:
            return None
        lengths = torch.tensor(record.scored.model_lengths, dtype=torch.long)
        own = model.forward(lengths, self.shown(REWARD_MODEL, record.experience.batch))
        flops, tokens = total(torch.tensor([own.flops, own.tokens])).tolist()
        return Work(flops, 0, tokens)

    def _memory_of(self, timers: StageTimers) -> dict[str, float]:
        gib = {Metric.STAGE_MEMORY.of(f"{stage}_{self._memory.suffix}"): value for stage, value in timers.memory_gib.items()}
        if self._on_gpu:
            gib |= {Metric.DEVICE_PEAK.value: self._memory.highest, Metric.HOST_PEAK.value: host_peak_gib()}
        else:
            gib[Metric.HOST_PEAK.value] = self._memory.highest
        return gib


def largest_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Return the largest value of any rank under each name. Collective over the world on the host, with equal names."""
    largest = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(values, largest.tolist()))
