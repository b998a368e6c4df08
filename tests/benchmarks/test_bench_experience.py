"""The benchmark of the experience counts the bytes that the plan of owners says, and prints a column for each world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_experience
from benchmarks.harness import experience_step
from benchmarks.harness.experience_step import Shape, step
from tests.forked_commands import run_script
from tests.trainer.experience.threads import world_of_threads

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--samples", "2"], "error: --samples 2 is too few; at least 8"),
        (["--rank-samples", "1"], "error: --rank-samples 1 is too few; at least 8"),
        (["--worlds", "0"], "error: --worlds 0 has no rank; at least 1"),
        (["--alone", "12", "--tp", "8"], "error: --tp 8 does not divide a world of 12 (--alone)"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench_experience.main(argv) == 2
    assert capfd.readouterr().err == f"{message}\n"


@pytest.mark.parametrize("shape", [Shape(4, 40, 32), Shape(8, 64, 32, tp=4), Shape(64, 16, 32, tp=2)], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_alone_sends_the_bytes_of_the_plan(shape: Shape, rank: int) -> None:
    cost = step(shape, rank, None)
    assert cost.sent == cost.planned
    assert cost.sent > 0 or rank % shape.tp, "the first rank of a replica draws, and reports results"


def test_a_field_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one that the plan does not count."""
    reads = experience_step.update_reads
    monkeypatch.setattr(experience_step, "update_reads", lambda *arguments: (*reads(*arguments), "entropy"))
    cost = step(Shape(4, 40, 32), 0, None)
    assert cost.sent > cost.planned


def test_ranks_of_a_world_send_the_bytes_of_the_plan() -> None:
    """In the first exchange, counted by another wire than the benchmark's."""
    shape = Shape(3, 24, 32)
    table = shape.table()

    def spread(rank: int, wire: Any) -> tuple[int, int]:
        source = experience_step.Owners.drawn(table, 3)
        target = experience_step.Owners.spread(table, 3)
        numbers = source.numbers(rank)
        drawn = experience_step.pack_experience(*experience_step.responses_of(table, numbers))
        experience_step.Experience(table, source, drawn, rank, wire).redistribute(target)
        return wire.bytes_sent, experience_step.planned_bytes(table, source, target, rank, wire, 5, 1)

    for sent, planned in world_of_threads(range(3), spread):
        assert sent == planned > 0


def test_the_tables_are_printed() -> None:
    sizes = [
        "--samples",
        "64",
        "--world-samples",
        "16",
        "--rank-samples",
        "8",
        "--tokens",
        "32",
        "--worlds",
        "2",
        "--alone",
        "16",
        "--tp",
        "1",
        "2",
    ]
    done = run_script(ROOT / "benchmarks" / "bench_experience.py", *sizes, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    starts = [number for number, line in enumerate(lines) if "samples of about 32 tokens" in line]
    assert len(starts) == 4 and all(" cores, load " in line for line in map(lines.__getitem__, starts))
    for start, columns in zip(starts, (1, 1, 2, 2)):
        table = lines[start + 2 : start + 25]
        values = {row[0]: row[1:] for row in ([cell.strip() for cell in line.strip("|").split("|")] for line in table)}
        assert all(len(value) == columns for value in values.values())
        assert values["sent, bytes"] == values["planned, bytes"] and "0" not in values["sent, bytes"]
        phases = list(values)[4:14]
        assert phases[0] == "pack" and phases[-1] == "metrics" and all(float(x) > 0 for p in phases for x in values[p])
        summed = [float(x) for x in values["sum, ns"]]
        assert summed == pytest.approx([sum(float(values[p][i]) for p in phases) for i in range(columns)], abs=1)
        assert all(0 < float(wire) < whole for wire, whole in zip(values["of it the wire, ns"], summed))
    assert sum("extrapolated" in line for line in lines) == 4
    assert sum("ns of processor time per own token (limit 120)" in line for line in lines) == 2
    beside = [line for line in lines if line.startswith("beside, as many worlds of one rank with that share at once")]
    assert len(beside) == 1 and float(beside[0].rpartition("2: ")[2]) > 0
