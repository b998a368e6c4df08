"""Evaluations of a run, alone and after a resume: policy tp=2, critic pp=2; the same figures wherever they are measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability.compare import MEASURED
from megappo.commands import cli
from tests.trainer.evaluation_runs import HALF, STEPS, run_all
from tests.trainer.small_run import write_small_task
from tests.worlds import spawn_world


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("evaluations")
    write_small_task(path)
    return path


@pytest.fixture(scope="module")
def results(folder) -> dict[str, Any]:
    mine, other = spawn_world(run_all, 2, folder)
    assert mine == other, "every rank has the same results"
    return mine


def rows(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    """Step -> figures of the evaluations, and everything else that is not measured by a clock."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    kept = [{k: v for k, v in json.loads(line).items() if k == "step" or not k.startswith((*MEASURED, "step"))} for line in lines]
    return {row["step"]: row for row in kept}


def figures(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("eval/")}


def best_step(folder: Path, name: str) -> int:
    return int((folder / "runs" / name / "checkpoints" / "BEST").read_text().split("-")[1])


def test_greedy_figures_of_data_eval_are_those_of_before_to_the_last_bit(results):
    assert len(results["old"]) == STEPS + 1
    assert all(old == new for old, new in results["old"])
    assert len({new["eval/length"] for _, new in results["old"]}) > 1, "the answers change, so equal figures mean something"


def test_every_set_has_its_figures_at_its_steps(folder, results):
    found = rows(folder, "whole")
    assert sorted(found) == list(range(STEPS + 1))
    assert not [name for name in found[0] if name.startswith("eval/short/")] and "eval/sampled/pass@4" in found[0]
    row = found[STEPS]
    names = {name.removeprefix("eval/sampled/") for name in row if name.startswith("eval/sampled/")}
    assert names == {
        *("mean@4", "stderr", "pass@1", "pass@2", "pass@4", "maj@4", "length", "truncated"),
        *("exact_match", "has_eos"),
    }
    for row in found.values():
        sampled = {name.removeprefix("eval/sampled/"): value for name, value in row.items() if name.startswith("eval/sampled/")}
        assert sampled["mean@4"] == pytest.approx(sampled["exact_match"] + sampled["has_eos"])
        # At 0.5 every response that ends by itself is correct.
        assert sampled["pass@1"] == pytest.approx(1 - sampled["truncated"]) == pytest.approx(sampled["has_eos"])
        assert sampled["pass@1"] <= sampled["pass@2"] <= sampled["pass@4"]
    assert all(found[step]["eval/short/length"] <= 3 for step in range(1, STEPS + 1)), "of its own max_response_tokens"
    assert any(row["eval/length"] > 3 for row in found.values())


def test_eval_of_the_last_checkpoint_repeats_the_last_evaluation_exactly(folder, results):
    last = figures(rows(folder, "whole")[STEPS])
    assert len(last) > 20 and results["last"] == last
    assert results["export"] == last, "the export holds the same weights"


def test_eval_of_the_best_checkpoint_repeats_the_evaluation_of_its_step(folder, results):
    """And the negative control: another checkpoint has other figures."""
    found = rows(folder, "whole")
    assert results["best"] == figures(found[best_step(folder, "whole")]) != results["last"]


def test_greedy_figures_do_not_depend_on_the_layout_or_the_sampler(results):
    greedy = {name: value for name, value in results["last"].items() if not name.startswith("eval/sampled/")}
    for other in ("tp1", "pp2", "seed"):
        assert {name: results[other][name] for name in greedy} == greedy
    assert results["vllm"] == {name: value for name, value in greedy.items() if name.startswith("eval/short/")}


def test_samples_depend_on_the_seed_of_the_run(results):
    assert results["seed"]["eval/sampled/length"] != results["last"]["eval/sampled/length"]


def test_the_best_checkpoint_stays_beside_the_last(folder, results):
    lengths = {step: row["eval/sampled/length"] for step, row in rows(folder, "whole").items() if step > 0}
    best = max(lengths, key=lambda step: (lengths[step], -step))
    checkpoints = folder / "runs" / "whole" / "checkpoints"
    assert best_step(folder, "whole") == best < STEPS - 1, "or it would have stayed anyway"
    assert {path.name for path in checkpoints.glob("step-*")} == {f"step-{best}", f"step-{STEPS}"}
    state = json.loads((checkpoints / f"step-{STEPS}" / "state.json").read_text())["trainer"]["best"]
    assert state == {"metric": "eval/sampled/length", "mode": "max", "step": best, "value": lengths[best]}


def test_a_resumed_run_keeps_the_same_best_and_ends_with_the_same_bits(folder, results):
    whole, halves = rows(folder, "whole"), rows(folder, "halves")
    assert [halves[step] for step in range(HALF + 1)] == [whole[step] for step in range(HALF + 1)]
    assert [figures(halves[step]) for step in range(STEPS + 1)] == [figures(whole[step]) for step in range(STEPS + 1)]


def test_a_resume_with_another_mode_starts_to_choose_anew(folder, results):
    """The run "halves" went on for one step with the smallest as the best."""
    lengths = {step: row["eval/sampled/length"] for step, row in rows(folder, "halves").items()}
    checkpoints = folder / "runs" / "halves" / "checkpoints"
    state = json.loads((checkpoints / f"step-{STEPS + 1}" / "state.json").read_text())["trainer"]["best"]
    assert state == {"metric": "eval/sampled/length", "mode": "min", "step": STEPS + 1, "value": lengths[STEPS + 1]}
    assert best_step(folder, "halves") == STEPS + 1


def test_a_best_step_whose_save_failed_is_none(results):
    assert results["failed saves"] == [
        (1, None, None),  # the save failed
        (2, 2, None),
        (2, None, 2),
        (3, None, 2),  # failed: step 2 is the best that there is
        (4, 4, None),  # better than step 2
        (4, None, 4),
        (5, 4, None),  # the last one is saved anyway
        (5, None, 4),
    ]


def test_runs_shows_the_best(folder, results, capsys):
    assert cli.main(["runs", str(folder / "runs")]) == 0
    step = best_step(folder, "whole")
    assert f"whole: best checkpoint step-{step}: eval/sampled/length = " in capsys.readouterr().out
