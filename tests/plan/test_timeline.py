"""The pipeline's schedule against the published bubbles, and the picture of a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo import cli
from megappo.parallel.layout import ParallelLayout
from megappo.plan.timeline import timeline

from .checkpoints import write_run


@pytest.mark.parametrize("pp, vpp, micro", [(1, 1, 3), (2, 1, 1), (2, 1, 5), (4, 1, 4), (4, 1, 16), (2, 2, 4), (4, 2, 8), (4, 3, 12)])
def test_the_bubble_is_that_of_the_paper(pp, vpp, micro):
    """Narayanan et al. 2021: (pp - 1) / (vpp m) of the ideal time, so the share of all time is (pp - 1) / (vpp m + pp - 1)."""
    found = timeline(ParallelLayout(pp, pp=pp, vpp=vpp), micro)
    assert found.bubble == pytest.approx((pp - 1) / (vpp * micro + pp - 1))
    assert found.total == pytest.approx(3 * (micro + (pp - 1) / vpp))


@pytest.mark.parametrize("pp, vpp, micro", [(1, 1, 2), (4, 1, 6), (3, 2, 6)])
def test_every_pass_runs_once_alone_and_after_what_it_needs(pp, vpp, micro):
    found = timeline(ParallelLayout(pp, pp=pp, vpp=vpp), micro)
    at = {(one.kind, one.stage, one.chunk, one.micro_batch): one for one in found.passes}
    assert len(at) == len(found.passes) == 2 * pp * vpp * micro
    for stage in range(pp):
        mine = sorted((one for one in found.passes if one.stage == stage), key=lambda one: one.start)
        assert all(a.end <= b.start + 1e-9 for a, b in zip(mine, mine[1:]))
    for (kind, stage, chunk, m), one in at.items():
        if kind == "backward":
            assert one.start >= at["forward", stage, chunk, m].end
        elif stage > 0:
            assert one.start >= at["forward", stage - 1, chunk, m].end


def test_too_few_micro_batches_are_filled_up_as_the_engine_does():
    assert timeline(ParallelLayout(4, pp=4, vpp=2), 5) == timeline(ParallelLayout(4, pp=4, vpp=2), 8)


def test_plan_draws_the_picture(tmp_path, capsys):
    path, picture = write_run(tmp_path), tmp_path / "plan.png"
    assert cli.main(["plan", str(path), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    assert f"picture: {picture}" in capsys.readouterr().out


@pytest.mark.parametrize("name, says", [("plan.bmp", "must end in .png"), ("absent/plan.png", "there is no directory")])
def test_a_picture_that_cannot_be_written_is_refused(tmp_path, capsys, name, says):
    assert cli.main(["plan", str(write_run(tmp_path)), "--plot", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_without_matplotlib_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    from megappo.plan.plot import check_plot

    with pytest.raises(ValueError, match="matplotlib is not installed; pip install"):
        check_plot(str(Path(tmp_path) / "plan.png"))
