"""The bridge's benchmarks refuse wrong arguments in one line, and one rank's run prints its costs."""

from __future__ import annotations

import pytest

from tests.bridge import bench_bridge, bench_bridge_plan


@pytest.mark.parametrize(
    "main, argv, message",
    [
        (bench_bridge.main, ["--mib", "1"], "error: --mib 1 is less than one layer of the model, 32"),
        (bench_bridge_plan.main, ["--trainers", "100"], "error: --trainers 100 is no multiple of 256, the size of the layouts"),
        (bench_bridge_plan.main, ["--sample", "0"], "error: --sample 0 measures no rank; at least 1"),
    ],
)
def test_a_mistake_is_one_line(main, argv, message, capfd):
    assert main(argv) == 2
    assert capfd.readouterr().err == f"{message}\n"


def test_the_cost_of_the_checksums_is_printed(capfd):
    assert bench_bridge.main(["--ranks", "1", "--mib", "32"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["policy", "bfloat16", "float32", "of"]
