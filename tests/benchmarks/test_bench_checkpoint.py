"""The benchmark of saves and loads, on a small model."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import bench_checkpoint
from tests.worlds import start_forked


def test_every_rank_writes_and_the_table_says_so(capfd, monkeypatch):
    monkeypatch.setattr(bench_checkpoint.mp, "start_processes", start_forked)
    assert bench_checkpoint.main(["--dp", "2", "--hidden", "64", "--layers", "1", "--repeats", "1"]) == 0
    table, asynchronous = capfd.readouterr().out.strip().split("\n\n")
    first, heading, row = table.splitlines()[-3:]
    assert "million parameters" in first and heading.split()[:3] == ["dp", "save", "s"]
    dp, _, least, _, most, *_ = row.split()
    assert dp == "2" and 0.9 * float(most) < float(least) <= float(most)
    # Name, seconds and share; name and GB/s.
    figures = [float(number.rstrip("%")) for number in re.findall(r" (\d+\.\d+%?)(?= |$)", asynchronous, re.MULTILINE)]
    assert len(figures) >= 4 * 12 + 6 + 5 and all(figure >= 0 for figure in figures)


def test_the_share_of_a_run_is_that_of_its_saves(tmp_path, capsys):
    # Every second of four steps of 2 s begins a save (0.3 s), which the next one completes (0.1 s).
    lines = [{"timing/step_s": 2.0, "timing/checkpoint_s": seconds} for seconds in (0.0, 0.3, 0.1, 0.3)]
    (metrics := tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert bench_checkpoint.main(["--metrics", str(metrics), "--save-every", "2"]) == 0
    assert f"{0.35 / (0.35 + 50 * 2):.2%} of the time" in capsys.readouterr().out
    assert bench_checkpoint.main(["--metrics", str(metrics)]) == 2, "no two saves in four steps"


@pytest.mark.parametrize("arguments", [["--dp", "0"], ["--dp", "two"], ["--hidden", "100"], ["--repeats", "0"], ["--unknown"]])
def test_wrong_arguments_are_one_line(capsys, arguments):
    assert bench_checkpoint.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench_checkpoint: ") and error.count("\n") == 1
