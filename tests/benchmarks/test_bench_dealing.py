"""The simulation of replicas that share a batch."""

from __future__ import annotations

import numpy
import pytest

from benchmarks import bench_dealing


def test_a_line_for_each_case_and_no_end_before_the_ideal(capsys):
    assert bench_dealing.main(["--replicas", "2", "--running", "4", "--samples", "2", "--seeds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 12
    assert all(float(figure) >= 1.0 for line in lines for figure in line.split()[-3:])


def test_the_end_is_that_of_a_count_by_hand():
    # Two replicas of one: [4], [1, 2, 3] in order; every step of a full replica takes 1 + PER_RUNNING.
    lengths = numpy.array([4.0, 1.0, 2.0, 3.0])
    assert bench_dealing.end_of_last(lengths, None, 2, 1) == 6 * bench_dealing.step_s(1, 1)
    # Longest first: [4, 1], [3, 2].
    assert bench_dealing.end_of_last(lengths, lengths, 2, 1) == 5 * bench_dealing.step_s(1, 1)


@pytest.mark.parametrize("arguments", [["--replicas", "1"], ["--seeds", "0"], ["--unknown"]])
def test_wrong_arguments_are_one_line(capsys, arguments):
    assert bench_dealing.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench_dealing: ") and error.count("\n") == 1
