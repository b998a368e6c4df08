"""docs/telemetry.md says what the code says: names, the block's tables, the notes at a run's start."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from megappo.config.run_sections import TelemetryConfig
from megappo.telemetry.metrics import MODEL_STAGES, STAGES, Metric
from megappo.telemetry.timers import DevicePeak, HostPeak
from megappo.trainer.instruments import RoleModel, peak_note, peak_tflops
from tests.models.test_flops import LLAMA_7B

PAGE = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()


def test_the_page_names_every_family_of_costs() -> None:
    for metric in (Metric.TFLOP, Metric.TFLOPS, Metric.MFU, Metric.HFU, Metric.STAGE_TOKENS):
        assert f"`{metric.of('STAGE')}" in PAGE
    assert all(f"`{metric.value}`" in PAGE for metric in (Metric.HOST_PEAK, Metric.DEVICE_PEAK, Metric.MODELS, Metric.SHAPED))


def test_the_block_of_the_page_has_the_stages_in_their_order() -> None:
    block = PAGE[PAGE.index("--- steps") : PAGE.index("\n    ---\n")]
    stages = [word for word in re.findall(r"^ +(\w+)", block[block.index("  stage ") :], re.M) if word in STAGES]
    assert stages == [stage for stage in STAGES if stage in stages] and set(MODEL_STAGES) <= set(stages)
    assert all(f"  {row}" in block for row in ("score - KL", "response tokens", "total tokens", "advantage", "return", "value"))


def test_the_notes_of_the_page_are_those_of_a_run(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    for device, gauge in ((torch.device("cpu"), HostPeak), (torch.device("cuda", 0), DevicePeak)):
        models = {"policy": RoleModel(LLAMA_7B, False, "none", peak_tflops(TelemetryConfig(), device, "bf16"), [0])}
        note = peak_note(TelemetryConfig(), device, models)
        assert f"    statistics: memory of a stage is the {gauge.kind}; {note}\n" in PAGE
    named, cpu = TelemetryConfig(hardware="h20"), torch.device("cpu")
    models = {"policy": RoleModel(LLAMA_7B, False, "none", peak_tflops(named, cpu, "bf16"), [0])}
    assert peak_note(named, cpu, models) == "MFU is against 148 TFLOP/s of a rank (telemetry.hardware)"
