"""Gauges of a stage's memory against allocations of known size."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy
import pytest
import torch

from megappo.telemetry import timers as timing
from megappo.telemetry.timers import GIB, DevicePeak, HostPeak, HostResident, StageTimers, memory_gauge

CPU = torch.device("cpu")
MIB = 2**20 / GIB


def allocate(mib: int) -> numpy.ndarray:
    """Memory of its own mapping, which is returned to the system when it is freed: malloc may hand out what a test before left."""
    memory = numpy.frombuffer(mmap.mmap(-1, mib << 20), dtype=numpy.uint8)
    memory[:] = 1
    return memory


def test_the_peak_of_a_stage_is_its_own() -> None:
    gauge = memory_gauge(CPU)
    if not isinstance(gauge, HostPeak):
        pytest.skip("the peak cannot be reset on this machine")
    timers = StageTimers(memory=gauge)
    with timers.stage("small"):
        pass
    with timers.stage("large"):
        allocate(256)
    with timers.stage("after"):
        pass
    gib = timers.memory_gib
    assert gib["large"] - gib["small"] == pytest.approx(256 * MIB, abs=32 * MIB)
    assert gib["after"] == pytest.approx(gib["small"], abs=32 * MIB), "freed before, and the peak was reset"
    assert gauge.highest >= gib["large"]


def test_a_peak_between_stages_is_in_the_highest() -> None:
    gauge = memory_gauge(CPU)
    timers = StageTimers(memory=gauge)
    allocate(256)
    with timers.stage("small"):
        pass
    assert gauge.highest - timing._status("VmRSS") > 200 * MIB


def test_a_stage_entered_again_keeps_its_larger_value() -> None:
    class Fake:
        kind = suffix = ""
        highest = 0.0
        values = [3.0, 1.0]

        def begin(self) -> None: ...

        def end(self) -> float:
            return self.values.pop(0)

    timers = StageTimers(memory=Fake())
    for _ in range(2):
        with timers.stage("update"):
            pass
    assert timers.memory_gib == {"update": 3.0}


def test_where_the_peak_cannot_be_reset_the_memory_at_the_end_is_told_as_such(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timing, "_CLEAR", tmp_path / "absent" / "clear_refs")
    gauge = memory_gauge(CPU)
    assert isinstance(gauge, HostResident) and gauge.suffix == "end_gib" and "cannot be reset" in gauge.kind
    timers = StageTimers(memory=gauge)
    with timers.stage("freed"):
        allocate(256)
    with timers.stage("kept"):
        kept = allocate(256)
    assert timers.memory_gib["kept"] - timers.memory_gib["freed"] == pytest.approx(256 * MIB, abs=32 * MIB)
    del kept


def test_a_gpu_is_asked_for_its_own_peak_and_remembers_the_highest(monkeypatch) -> None:
    state = {"peak": 5 * GIB, "now": 1 * GIB}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: state["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: state.update(peak=state["now"]))
    gauge = memory_gauge(torch.device("cuda", 1))
    assert isinstance(gauge, DevicePeak)
    timers = StageTimers(memory=gauge)
    with timers.stage("update"):
        state["peak"] = 3 * GIB
    with timers.stage("push"):
        pass
    assert timers.memory_gib == {"update": 3.0, "push": 1.0} and gauge.highest == 5.0, "5 GiB before the first stage"
