"""The benchmark of saves and loads, on a small model."""

from __future__ import annotations

import re

import pytest

from scripts import bench_checkpoint


def test_every_rank_writes_and_the_table_says_so(capfd):
    assert bench_checkpoint.main(["--dp", "2", "--hidden", "64", "--layers", "1", "--repeats", "1"]) == 0
    table, asynchronous = capfd.readouterr().out.strip().split("\n\n")
    first, heading, row = table.splitlines()[-3:]
    assert "million parameters" in first and heading.split()[:3] == ["dp", "save", "s"]
    dp, _, least, _, most, *_ = row.split()
    assert dp == "2" and 0.9 * float(most) < float(least) <= float(most)
    # Name, seconds and share; name and GB/s.
    figures = [float(number.rstrip("%")) for number in re.findall(r" (\d+\.\d+%?)(?= |$)", asynchronous, re.MULTILINE)]
    assert len(figures) >= 2 * 6 + 5 and all(figure >= 0 for figure in figures)


@pytest.mark.parametrize("arguments", [["--dp", "0"], ["--dp", "two"], ["--hidden", "100"], ["--repeats", "0"], ["--unknown"]])
def test_wrong_arguments_are_one_line(capsys, arguments):
    assert bench_checkpoint.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench_checkpoint: ") and error.count("\n") == 1
