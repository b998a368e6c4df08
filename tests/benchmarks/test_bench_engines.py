"""The benchmark of the engines prints a line for each, with memory beside the plan's, and refuses wrong arguments in one line."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bench_engines
from benchmarks.harness.alive import alive_peak
from tests.worlds import start_forked

SMALL = ["--ranks", "2", "--dtypes", "bf16", "--rounds", "1", "--layers", "2", "--hidden", "128", "--vocabulary", "512"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--rounds", "0"], "error: --rounds 0 is too few; at least 1"),
        (["--hidden", "100"], "error: --hidden 100 is no multiple of 64, the size of a head"),
        (["--ranks", "3"], "error: --ranks 3 does not divide the 32 sequences (--samples)"),
        (["--length", "4"], "error: --length 4 is too short; at least 8"),
        (["--dtypes", "fp8"], "error: argument --dtypes: invalid choice: 'fp8' (choose from 'fp32', 'bf16')"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench_engines.main(argv) == 2
    assert capfd.readouterr().err == f"{message}\n"


def test_storages_that_are_resized_are_counted() -> None:
    held = torch.zeros(1000)

    def work() -> None:
        first = torch.ones(100)
        first.untyped_storage().resize_(0)
        second = held * 2  # 4,000 bytes, alone
        first.untyped_storage().resize_(400)
        second.add_(1)  # both

    assert alive_peak(work, [held]) == 4400


def test_both_engines_are_measured_side_by_side(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engines.mp, "spawn", start_forked)
    assert bench_engines.main(SMALL) == 0
    said = capfd.readouterr().out
    lines = said.splitlines()
    assert "one thread a rank; load" in said
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| 2 |")]
    assert [row[2] for row in cells] == ["megatron", "fsdp2"]
    for row in cells:
        assert all(float(cell.replace(",", "")) > 0 for cell in (*row[3:8], row[9]))
        assert row[8] == "+0.0 %", "what is held is what the plan counts"
        assert abs(float(row[10].removesuffix(" %"))) < 5, "what passes add is estimated"
    megatron, fsdp2 = (float(row[7]) for row in cells)
    assert fsdp2 < megatron
