"""The benchmark of slow environments, without its runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import yaml

from benchmarks import bench_environment
from megappo.config.loading import load_config


def row(step: int, step_s: float, generate_s: float) -> dict[str, float]:
    rest = {"timing/environment/total_s": 4.0, "rollout/turns_mean": 2.5, "reward/score_mean": 0.25 * step}
    return {"step": step, "timing/step_s": step_s, "timing/generate_s": generate_s, **rest}


def run_of(folder: Path, *rows: dict[str, float]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ({"step": 0, "eval/score": 1.0}, *rows)))
    return folder


def test_the_fastest_step_counts_and_the_first_does_not(tmp_path):
    inline = bench_environment.timed(run_of(tmp_path / "a", row(1, 1.0, 0.5), row(2, 6.0, 4.0), row(3, 7.0, 3.0)))
    assert inline == bench_environment.Timed(6.0, 4.0, 4.0, (2.5, 0.25))
    workers = bench_environment.timed(run_of(tmp_path / "b", row(1, 9.0, 9.0), row(2, 3.0, 1.0)))
    first, last = bench_environment.report({"inline": inline, "workers": workers}).splitlines()[1:]
    assert first.split()[-4:] == ["1.0", "x", "1.0", "x"] and last.split()[-4:] == ["4.0", "x", "2.0", "x"]


@pytest.mark.parametrize("way", bench_environment.WAYS)
def test_the_configuration_of_each_way_is_one(tmp_path, way):
    args = argparse.Namespace(seconds=0.1, workers=3, samples=8, turns=2, steps=3, engine="megatron")
    made = bench_environment.configuration(tmp_path, args, bench_environment.WAYS[way])
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(made))
    environment = load_config(str(tmp_path / "run.yaml"), []).rollout.environment
    assert environment is not None and (environment.workers > 0) is (way != "inline")


@pytest.mark.parametrize("arguments", [["--turns", "1"], ["--steps", "1"], ["--seconds", "0"], ["--engine", "other"]])
def test_wrong_arguments_are_one_line(capsys, arguments):
    assert bench_environment.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench_environment: ") and error.count("\n") == 1
