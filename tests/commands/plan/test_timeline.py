"""The pipeline's schedule against the published bubbles, and the picture of a plan."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from megappo.commands import cli
from megappo.commands.plan import plot
from megappo.commands.plan.estimate import work_out
from megappo.commands.plan.report import report
from megappo.commands.plan.timeline import chunk_work, timeline
from megappo.config.loading import load_config
from megappo.parallel.layout import ParallelLayout
from megappo.trainer.prepare.layouts import check_layouts, read_archs
from tests.commands.plan.checkpoints import write_run

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    "pp, vpp, micro", [(1, 1, 3), (2, 1, 1), (2, 1, 5), (4, 1, 4), (4, 1, 16), (2, 2, 4), (4, 2, 8), (4, 3, 12)]
)
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


@pytest.mark.parametrize("backward", [2.0, 3.0])
def test_the_slowest_stage_makes_the_others_wait(backward):
    """Of 2 stages with 3 layers and 1, the second one waits two thirds of the time."""
    layout = ParallelLayout(2, pp=2, layers_per_stage=(3, 1))
    assert chunk_work(layout, 4) == [[1.5], [0.5]]
    found = timeline(layout, 8, backward=backward, work=chunk_work(layout, 4))
    # The first backward waits for the second stage where that takes longer than the second forward.
    wait = max(0.0, 0.5 * (1 + backward) - 1.5)
    assert found.total == pytest.approx(8 * 1.5 * (1 + backward) + wait)
    assert found.bubble == pytest.approx(1 - 8 * 2.0 * (1 + backward) / (2 * found.total))
    even = timeline(ParallelLayout(2, pp=2), 8, backward=backward)
    assert even == timeline(ParallelLayout(2, pp=2), 8, backward=backward, work=[[1.0], [1.0]]) and even.bubble < found.bubble


def large_plan(recipe, facts, overrides):
    config = load_config(CONFIGS / "large" / f"{recipe}.yaml", [f"policy.model={CONFIGS / 'models' / facts}", *overrides])
    archs, ranks = read_archs(config), config.run.num_ranks
    return work_out(config, archs, check_layouts(config, archs, ranks), ranks, "cuda", 80 << 30)


LARGE = {
    64: ("llama3.1_70b_64gpu", "Llama-3.1-70B-Instruct", []),
    256: ("llama3.1_405b_256gpu", "Llama-3.1-405B-Instruct", []),
    1024: ("qwen3_30b_a3b_32gpu", "Qwen3-30B-A3B", ["run.num_ranks=1024", "algorithm.mini_batch_size=512"]),
}


def boxes_of_texts(figure):
    """(text, its box in pixels) of everything that is written."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    return [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]


def overlaps(boxes):
    extents = numpy.array([box.extents for _, box in boxes])
    left, bottom, right, top = (extents[:, None, side] for side in range(4))
    crossing = (left + 1 < right.T) & (left.T + 1 < right) & (bottom + 1 < top.T) & (bottom.T + 1 < top)
    return [(boxes[a][0], boxes[b][0]) for a, b in zip(*numpy.nonzero(numpy.triu(crossing, 1)))]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LARGE)
def test_a_picture_of_a_large_run_shows_every_rank_and_no_text_on_another(ranks, monkeypatch):
    plan = large_plan(*LARGE[ranks])
    boxes = boxes_of_texts(plot.figure_of(plan))
    assert not overlaps(boxes)
    said = {text for text, _ in boxes}
    assert {"forward", "backward", "waits"} <= said, "a legend"
    assert any(text.split()[0].split("-")[-1] == str(ranks - 1) for text in said), "the last rank"
    printed = report(plan)
    for role in ("policy", "critic"):
        whole = plan.pipeline(role)
        assert any(text.startswith(f"{role}: ") and f"bubble {100 * whole.bubble:.1f} %" in text for text in said)
        assert plan.bubble(role) == pytest.approx(whole.bubble)
        (row,) = (line for line in printed.splitlines() if line.startswith(f"  {role}, one mini-batch"))
        assert row.endswith(f" {100 * whole.bubble:.0f} %")
    if ranks == 64:
        monkeypatch.setattr(plot, "_WIDTH_INCHES", 5.0)
        assert overlaps(boxes_of_texts(plot.figure_of(plan))), "negative control: a picture too narrow for its numbers"


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
