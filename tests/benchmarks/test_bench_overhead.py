"""The benchmark of a run's guards, in one round."""

from __future__ import annotations

import re

import pytest

from benchmarks import bench_overhead
from tests.worlds import start_forked


def test_every_guard_has_a_line_and_rounds_are_compared(capfd, monkeypatch) -> None:
    monkeypatch.setattr(bench_overhead.mp, "spawn", start_forked)
    assert bench_overhead.main(["--rounds", "1", "--prompts", "16", "--idle", "0.2"]) == 0
    lines = capfd.readouterr().out.strip().splitlines()[-8:]
    assert re.search(r"2 ranks; step \d+ ms$", lines[0])
    names = ["schedule agreement", "watchdog", "comparison of copies", "together"]
    costs = {name: float(re.match(rf"{name} +(-?[\d.]+) +-?[\d.]+%", line)[1]) for name, line in zip(names, lines[2:])}  # type: ignore[index]
    assert 0 < costs["schedule agreement"] and 0 < costs["comparison of copies"]
    assert costs["together"] == pytest.approx(sum(costs[name] for name in names[:3]), abs=0.002)
    assert lines[6].startswith("interleaved, 1 rounds, clock: median ")
