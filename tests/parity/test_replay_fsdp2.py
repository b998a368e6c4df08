"""The replay under engine fsdp2 prints a line for each layout, within rounding of Megatron, and refuses wrong arguments."""

from __future__ import annotations

import pytest

from tests.parity import replay_fsdp2


def test_two_steps_end_as_megatrons(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight updates of each role with its distributed optimizer."""
    replay_fsdp2.main(["--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 steps, llama, fp32, CPU; load ")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| fsdp2")]
    assert [row[0] for row in cells] == ["fsdp2, 1 rank", "fsdp2, 2 ranks", "fsdp2 tp2 sp, 2 ranks", "fsdp2 cp2, 2 ranks"]
    assert all(0 < float(cell) < 1e-5 for row in cells for cell in row[1:]), "not the same run twice, and not another one"


@pytest.mark.parametrize("argv, message", [(["--steps", "0"], "--steps 0 is too few"), (["--ranks", "3"], "invalid choice: 3")])
def test_a_mistake_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        replay_fsdp2.main(argv)
    assert left.value.code == 2 and message in capsys.readouterr().err
