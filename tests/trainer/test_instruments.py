"""What is exchanged between ranks for the statistics, and the traces of profiled steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from megappo.trainer.instruments import StepProfiler, largest_over_ranks
from tests.worlds import spawn_world

CPU = torch.device("cpu")


def exchange(rank: int, folder: str) -> tuple[dict[str, float], list[str]]:
    found = largest_over_ranks({"memory/score_peak_gib": 1.0 + rank, "memory/host_peak_gib": 5.0 - rank})
    profiler = StepProfiler(Path(folder, "profile"), (2,), CPU)
    for step in (1, 2):
        with profiler.step(step), profiler.section("score"):
            torch.ones(3).sum()
    broken = StepProfiler(Path(folder, "file"), (2,), CPU)  # its directory cannot be made: the trace is lost, not the run
    with broken.step(2):
        pass
    with pytest.raises(ZeroDivisionError), profiler.step(2), profiler.section("generate"):
        1 / 0
    return found, list(broken._side_work.lost)


def test_ranks_exchange_the_largest_and_each_writes_its_trace(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = spawn_world(exchange, 2, str(tmp_path))
    assert [one for one, _ in found] == [{"memory/score_peak_gib": 2.0, "memory/host_peak_gib": 5.0}] * 2
    assert [lost for _, lost in found] == [["profile"]] * 2
    traces = sorted((tmp_path / "profile").iterdir())
    assert [trace.name for trace in traces] == [f"step_000002_rank_0000{rank}.json.gz" for rank in range(2)]
    for trace in traces:
        names = {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        assert "stage score" in names and "aten::sum" in names and "stage generate" not in names, "a step that raised has no trace"


def test_on_a_gpu_stages_are_nvtx_ranges_in_every_step(monkeypatch, tmp_path: Path) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    profiler = StepProfiler(tmp_path, (), torch.device("cuda", 0))
    with profiler.step(1), profiler.section("score"):
        calls.append("work")
    assert calls == ["score", "work", "end"]
