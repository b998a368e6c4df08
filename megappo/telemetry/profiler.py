"""Profiles of chosen steps by torch: one Chrome trace per step and rank, with named stages, for https://ui.perfetto.dev or
chrome://tracing. On a GPU the stages are NVTX ranges in every step, for Nsight Systems."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megappo.telemetry.side_work import SideWork

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
        """Context of one step. A step that raises leaves no trace."""
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
        """Name a stage in the trace, and for NVIDIA's tools."""
        with ExitStack() as ranges:
            if self._profiling:
                ranges.enter_context(torch.profiler.record_function(STAGE_RANGE.format(name)))
            if self._on_gpu:
                ranges.enter_context(torch.cuda.nvtx.range(name))
            yield

    def _write(self, profile: torch.profiler.profile, step: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._directory / f"step_{step:06d}_rank_{dist.get_rank():05d}.json.gz"))
