"""Instruments of a run: what is measured of its steps beside their results - time, memory, FLOPs, profiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist

from megappo.config.rank_ranges import ALL
from megappo.config.schema import TrainConfig
from megappo.parallel.placement import placement_of
from megappo.parallel.totals import total
from megappo.runtime.sections import Sections
from megappo.telemetry.memory import host_peak_gib, memory_gauge
from megappo.telemetry.metrics import Metric
from megappo.telemetry.profiler import StepProfiler
from megappo.telemetry.timers import StageTimers
from megappo.trainer.build_roles import Roles
from megappo.trainer.report import StepRecord
from megappo.trainer.rundir import RunDir
from megappo.trainer.step_work import REWARD_MODEL, StepWork, Work, peak_note, role_models
from megappo.trainer.timeline import spans_of_ranks, timeline


class Instruments:
    """Instruments of this rank. sections: marks of the watchdog, which are told of every stage."""

    def __init__(self, config: TrainConfig, roles: Roles, run_dir: RunDir, device: torch.device, sections: Sections) -> None:
        self.sections, self._on_gpu = sections, device.type == "cuda"
        self._models = role_models(config, roles.placements, device)
        self._split = not all(placement.is_whole for placement in roles.placements.values()) or config.rollout.ranks != ALL
        rollout = placement_of(config.rollout.ranks, dist.get_world_size())
        self._generating = rollout.ranks
        self._places = {**roles.placements, "rollout": rollout}
        self._memory = memory_gauge(device)
        self._profiler = StepProfiler(run_dir.profiles, config.telemetry.profile_steps, device)
        self.note = f"statistics: memory of a stage is the {self._memory.kind}; {peak_note(config.telemetry, device, self._models)}"
        """Meaning of the figures on this machine, in one line."""

    def step(self, step: int) -> AbstractContextManager[None]:
        """Around one step: profiles it if it is to be."""
        return self._profiler.step(step)

    def timers(self, step: int | None = None) -> StageTimers:
        """Timers of a step from here on, or of work outside of steps."""
        if step is not None:
            self.sections.of_step(step)
        return StageTimers(observer=self, memory=self._memory)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Mark a stage for the watchdog and for profilers."""
        with self.sections.section(name), self._profiler.section(name):
            yield

    def settle_times(self, timers: StageTimers) -> None:
        """Make the seconds of every stage those of the rank that took longest, if ranks have different roles. Collective then."""
        if self._split:
            timers.seconds.update(largest_over_ranks(timers.seconds))

    def timeline(self, timers: StageTimers, step: int) -> list[str]:
        """Lines on when each role's ranks were in which stage; none if all roles live on all ranks. Collective if not."""
        return timeline(spans_of_ranks(timers), self._places, step) if self._split else []

    def costs(self, record: StepRecord, timers: StageTimers) -> dict[str, float]:
        """FLOPs, their rates, and memory of a step. Collective: memory is the largest over all ranks."""
        lengths, (generated, sampled) = record.experience.table.length.long(), record.generated
        prompts = (generated - sampled).long()
        work = StepWork.of_step(
            self._models, lengths, (prompts, sampled.long()), record.critics, record.policy, self._generating, self._scoring(record)
        )
        return {**work.metrics(timers.seconds, timers.total_s), **largest_over_ranks(self._memory_of(timers))}

    def _scoring(self, record: StepRecord) -> Work | None:
        """Work of the reward model over the texts of all ranks; None without one. Collective then."""
        model = self._models.get(REWARD_MODEL)
        if model is None:
            return None
        own = model.forward(torch.tensor(record.scored.model_lengths, dtype=torch.long))
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
    """Largest value of any rank under each name. Collective over the world, on the host; all ranks have the same names."""
    largest = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(values, largest.tolist()))
