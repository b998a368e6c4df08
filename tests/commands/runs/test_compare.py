"""`megappo compare`: values, differences and where curves part, what of the settings differs, limits, pictures and bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import write_manifest
from megappo.commands import cli
from megappo.commands.compare.curves import curve_of, difference, steps_to_show
from tests.commands.runs.folders import save, write_end, write_lease

STEPS = 10
CONFIG = {"run": {"name": "a", "output_dir": "runs", "seed": 0}, "policy": {"engine": "megatron", "parallel": {"tp": 2}}}


def rows_of(**metrics: Any) -> list[dict[str, Any]]:
    """Step n of `steps` has the n-th value of every metric; __ in a name is the slash."""
    length = max(map(len, metrics.values()))
    return [
        {"step": n, "time": 1.0, **{name.replace("__", "/"): values[n - 1] for name, values in metrics.items() if n <= len(values)}}
        for n in range(1, length + 1)
    ]


SCORES = [n / 10 for n in range(1, STEPS + 1)]
LOSSES = [2.0] * STEPS


def write_run(folder: Path, name: str, records: list[dict[str, Any]], config: Any = CONFIG, tail: str = "") -> Path:
    run = folder / name
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    if config is not None:
        (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    write_end(run, step=len(records))
    return run


@pytest.fixture
def pair(tmp_path) -> tuple[str, str]:
    """Two runs: scores part by 0.25 at step 7 alone; losses by 0.0001 from step 3 on; b evaluates at 5 and 10 too."""
    scores, losses = list(SCORES), [2.0, 2.0, *[2.0001] * 8]
    scores[6] += 0.25
    evaluated = [{"step": step, "time": 2.0, "eval/score": step / 20} for step in (5, 10)]
    changed = {
        "run": {**CONFIG["run"], "name": "b"},
        "policy": {"engine": "fsdp2", "parallel": {"tp": 1}, "offload": ["gradients"]},
    }
    a = write_run(tmp_path, "a", rows_of(reward__score_mean=SCORES, policy__loss=LOSSES))
    b = write_run(tmp_path, "b", [*rows_of(reward__score_mean=scores, policy__loss=losses), *evaluated], changed)
    return str(a), str(b)


def compare(capsys, *words: object) -> tuple[int, str, str]:
    code = cli.main(["compare", *map(str, words)])
    return (code, *capsys.readouterr())


def cells(out: str, start: str) -> list[str]:
    """Words of the first line that starts so."""
    return next(line.split() for line in out.splitlines() if line.strip().startswith(start))


def test_the_table_has_values_largest_differences_and_where_curves_part(pair, capsys):
    code, out, err = compare(capsys, *pair)
    assert (code, err) == (0, "")
    assert cells(out, "metric") == ["metric", "run"] + "step 3 step 5 step 8 step 10 last largest difference apart from".split()
    assert cells(out, "reward/score_mean") == "reward/score_mean a 0.3 0.5 0.8 1 1 0.25 at 7 step 7".split()
    assert cells(out, "policy/loss") == "policy/loss a 2 2 2 2 2 0.0001 at 3 -".split(), "within 1e-4 of 2"
    assert cells(out, "eval/score") == "eval/score a - - - - - - -".split()
    assert cells(out, "b") == "b finished 10 ".split() + [pair[1]]
    assert "0 to 10 steps compared" in out


def test_the_tolerance_is_relative_to_the_largest_value(pair, capsys):
    _, out, _ = compare(capsys, *pair, "--tolerance", 4e-5)
    assert cells(out, "policy/loss")[-2:] == ["step", "3"]
    tiny = {"a": {1: 1e-9, 2: 4.0}, "b": {1: 2e-9, 2: 4.0}}
    assert difference(tiny, 1e-4).parts is None and difference(tiny, 1e-10).parts == 1


def test_settings_that_differ_have_their_dotted_names(pair, capsys):
    _, out, _ = compare(capsys, *pair)
    assert cells(out, "setting") == ["setting", "a", "b"]
    assert cells(out, "policy.engine") == ["policy.engine", "megatron", "fsdp2"]
    assert cells(out, "policy.parallel.tp") == ["policy.parallel.tp", "2", "1"]
    assert cells(out, "policy.offload") == ["policy.offload", "-", '["gradients"]']
    assert "run.seed" not in out and "run.name" not in out, "equal, and different in any two runs"
    _, out, _ = compare(capsys, pair[0], write_run(Path(pair[0]).parent, "c", rows_of(policy__loss=[2.0])))
    assert "all settings are equal" in out and "setting  " not in out


def record_facts(run: str, step: int, **facts: Any) -> None:
    save(Path(run), step)
    directory = CheckpointDirectory(Path(run) / "checkpoints")
    write_manifest(directory.step_path(step), replace(directory.read(step), facts=facts))


def test_versions_and_data_come_from_the_newest_checkpoint(pair, capsys):
    sha = {name: {"train": {"path": name, "sha256": name * 64}} for name in "ab"}
    record_facts(pair[0], 3, versions={"torch": "2.1", "megappo": "1"}, data=sha["a"])
    record_facts(pair[0], 7, versions={"torch": "2.13", "megappo": "1"}, data=sha["a"], reward={"code": {"own": "c"}})
    record_facts(pair[1], 5, versions={"torch": "2.12", "megappo": "1"}, data=sha["b"], reward={"code": {"own": "d"}})
    _, out, _ = compare(capsys, *pair)
    assert cells(out, "versions.torch") == ["versions.torch", "2.13", "2.12"]
    assert cells(out, "data.train.sha256") == ["data.train.sha256", "a" * 12, "b" * 12]
    assert cells(out, "code.own") == ["code.own", "c", "d"]
    assert "versions.megappo" not in out and "data.train.path" not in out
    (Path(pair[0]) / "checkpoints" / "step-7" / "manifest.json").write_text("{")
    assert cells(compare(capsys, *pair)[1], "versions.torch")[1:] == ["2.1", "2.12"], "a damaged one is passed over"


def test_of_a_run_without_a_checkpoint_nothing_is_said_to_differ(pair, capsys):
    record_facts(pair[0], 3, versions={"torch": "2.1"})
    _, out, _ = compare(capsys, *pair)
    assert "versions.torch" not in out and "b: has no checkpoint that can be read" in out


def test_the_environment_of_launches_is_compared_without_what_any_two_jobs_differ_in(pair, capsys):
    for number, run in enumerate(pair):
        folder = Path(run) / "launch" / "0"
        folder.mkdir(parents=True)
        variables = {"OMP_NUM_THREADS": str(number), "SLURM_JOB_ID": str(number), "RANK": str(number)}
        record = {"revision": {"commit": "abc"}, "packages": {"vllm": f"0.{number}"}, "environment": variables}
        (folder / "launch.json").write_text(json.dumps(record))
    _, out, _ = compare(capsys, *pair)
    assert cells(out, "packages.vllm") == ["packages.vllm", "0.0", "0.1"]
    assert cells(out, "environment.OMP_NUM_THREADS") == ["environment.OMP_NUM_THREADS", "0", "1"]
    assert "SLURM" not in out and "RANK" not in out and "revision" not in out


def test_secrets_of_settings_are_not_printed(pair, tmp_path, capsys):
    of_url = {"reward": {"parts": [{"url": "https://me:hidden-word@host/score"}]}}
    _, out, _ = compare(capsys, pair[0], write_run(tmp_path, "c", rows_of(policy__loss=LOSSES), of_url))
    assert "hidden-word" not in out and "(hidden)@host" in out


# ------------------------------------------------------------------------------------------------- crashed, resumed, running


def test_a_torn_line_repeated_steps_and_a_live_writer(tmp_path, capsys):
    """A resume without truncation leaves steps twice: the later values count, as for every reader."""
    first = rows_of(policy__loss=[1.0, 2.0, 9.0])
    again = rows_of(policy__loss=[1.0, 2.0, 3.0, 4.0])[2:]
    a = write_run(tmp_path, "a", rows_of(policy__loss=[1.0, 2.0, 3.0, 4.0]))
    b = write_run(tmp_path, "b", [*first, *again], tail='{"step": 5, "polic')
    (b / "ended.json").unlink()
    write_lease(b)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in b.iterdir()}
    code, out, _ = compare(capsys, a, b, "--max-difference", "policy/loss=0")
    assert code == 0 and "1 of 1 limits hold" in out and cells(out, "b")[1] == "running"
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in b.iterdir()} == before, "nothing was touched"
    code, _, _ = compare(capsys, a, write_run(tmp_path, "c", [*again, *first]), "--max-difference", "policy/loss=0")
    assert code == 1, "the earlier values would differ"


def test_it_needs_neither_torch_nor_matplotlib(pair):
    without = "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None; "
    command = [
        sys.executable,
        "-c",
        without + "from megappo.commands import cli; sys.exit(cli.main(sys.argv[1:]))",
        "compare",
        *pair,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "reward/score_mean" in done.stdout, done.stderr


# -------------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    "limits, code, says",
    [
        (["reward/score_mean=0.25"], 0, "1 of 1 limits hold"),
        (["reward/score_mean=0.24"], 1, "reward/score_mean differs by more than 0.24: 0.25 at step 7"),
        (["reward/score_mean=1", "policy/loss=1e-5"], 1, "1 of 2 limits hold"),
        (["policy/*=1e-3", "reward/*=1"], 0, "2 of 2 limits hold"),
        (["eval/score=1"], 1, "a has no value at step 5 (and at 1 more); --until N compares"),
    ],
)
def test_limits_decide_the_exit_code(pair, capsys, limits, code, says):
    found, out, _ = compare(capsys, *pair, *(word for limit in limits for word in ("--max-difference", limit)))
    assert (found, says in out) == (code, True), out


def test_a_shorter_run_does_not_pass_and_until_leaves_the_rest_out(pair, tmp_path, capsys):
    short = write_run(tmp_path, "short", rows_of(reward__score_mean=SCORES[:4], policy__loss=LOSSES[:4]))
    words = (pair[0], short, "--max-difference", "policy/loss=0")
    code, out, _ = compare(capsys, *words)
    assert code == 1 and "short has no value at step 5 (and at 5 more)" in out
    code, out, _ = compare(capsys, *words, "--until", 4)
    assert code == 0 and "4 steps compared" in out


def test_a_value_that_is_not_finite_in_one_run_alone_is_a_difference(tmp_path, capsys):
    a = write_run(tmp_path, "a", rows_of(policy__loss=[1.0, None, 3.0]))
    b = write_run(tmp_path, "b", rows_of(policy__loss=[1.0, None, None]))
    code, out, _ = compare(capsys, a, b, "--max-difference", "policy/loss=1e9")
    assert code == 1 and "not finite in one run alone at step 3" in out
    assert cells(out, "policy/loss")[-5:] == "inf at 3 step 3".split()
    code, _, _ = compare(capsys, a, b, "--max-difference", "policy/loss=0", "--until", 2)
    assert code == 0, "at step 2 neither is known"


# --------------------------------------------------------------------------------------------------------- windows, metrics


def test_a_window_is_a_mean_of_the_last_values():
    rows = {step: {"m": value} for step, value in enumerate([1.0, 3.0, None, 5.0, 9.0], 1)}
    assert curve_of(rows, "m", 2) == {1: 1.0, 2: 2.0, 3: None, 4: 4.0, 5: 7.0}
    assert curve_of(rows, "m") == {1: 1.0, 2: 3.0, 3: None, 4: 5.0, 5: 9.0}


def test_a_window_smooths_before_it_compares(pair, capsys):
    _, out, _ = compare(capsys, *pair, "--window", 5, "--metric", "reward/score_mean")
    assert cells(out, "reward/score_mean")[-5:] == "0.05 at 7 step 7".split() and "means of 5 steps" in out


def test_three_runs_differ_by_the_largest_less_the_smallest():
    curves = {"a": {1: 1.0, 2: 5.0}, "b": {1: 2.0, 2: 5.0}, "c": {1: -1.0, 2: 5.5, 3: 0.0}}
    found = difference(curves, 0.5)
    assert (found.steps, found.largest, found.at, found.parts) == (2, 3.0, 1, 1)
    assert found.missing == "a, b has no value at step 3"


def test_columns_are_steps_at_which_evaluations_have_values():
    every, tenth = dict.fromkeys(range(1, 101), 1.0), dict.fromkeys(range(0, 101, 10), 1.0)
    assert steps_to_show({"m": {"a": every, "b": every}, "e": {"a": tenth, "b": tenth}}) == [30, 50, 80, 100]
    assert steps_to_show({"m": {"a": every, "b": dict.fromkeys(range(1, 9), 1.0)}})[-1] == 8, "no further than both"
    assert steps_to_show({"m": {"a": {0: 1.0}, "b": {0: 1.0}}}) == []


def test_patterns_name_several_metrics(pair, capsys):
    _, out, _ = compare(capsys, *pair, "--metric", "*/loss", "--metric", "eval/score")
    assert "policy/loss" in out and "eval/score" in out and "reward/score_mean" not in out


def test_json_has_every_value(pair, capsys):
    code, out, _ = compare(capsys, *pair, "--json", "--max-difference", "reward/score_mean=0.1")
    facts = json.loads(out)
    assert code == 1
    assert facts["metrics"]["reward/score_mean"]["runs"]["b"]["7"] == pytest.approx(0.95)
    assert facts["metrics"]["reward/score_mean"]["parts"] == 7
    assert facts["settings"]["policy.engine"] == {"a": "megatron", "b": "fsdp2"}
    assert facts["limits"] == [{"metric": "reward/score_mean", "most": 0.1, "exceeded": "0.25 at step 7"}]


def test_a_picture_has_a_panel_for_each_metric_and_a_line_for_each_run(pair, tmp_path, capsys):
    from megappo.telemetry.plot import figure_of

    for name in ("curves.svg", "curves.png"):
        code, out, _ = compare(capsys, *pair, "--plot", tmp_path / name)
        assert code == 0 and (tmp_path / name).stat().st_size > 1000 and f"picture: {tmp_path / name}" in out
    text = (tmp_path / "curves.svg").read_text()
    assert all(word in text for word in (">reward/score_mean<", ">policy/loss<", ">a<", ">b<")), "text stays text"
    others = {name: {"b": {1: 4.0}} for name in "nop"}
    figure = figure_of({"m": {"a": {1: 1.0, 2: None, 3: 3.0}, "b": {1: 2.0}}, "none": {"a": {1: None}}, **others})
    shown = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title() for axes in shown] == ["m", *"nop"], "no panel for a metric without a value, and none that is empty"
    first, second = shown[0].lines
    assert list(first.get_xdata()) == [1, 2, 3] and first.get_ydata()[2] == 3.0 and first.get_ydata()[1] != first.get_ydata()[1]
    assert list(second.get_ydata()) == [2.0]


# ----------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "words, message",
    [
        (["A"], "compare: name two runs or more, not 1"),
        (["A", "A/."], "is named twice"),
        (["A", "absent"], "absent/metrics.jsonl: No such file or directory; name the directory of a run"),
        (["A", "A/config.yaml"], "config.yaml/metrics.jsonl: Not a directory"),
        (["A", "EMPTY"], "has no line yet; the run has logged no step"),
        (["A", "BROKEN"], "line 1: not JSON"),
        (["A", "BYTES"], "is not UTF-8"),
        (["A", "B", "--metric", "reward/scor_mean"], "no run has such a metric; did you mean reward/score_mean?"),
        (["A", "B", "--metric", "sft/loss"], "--metric sft/loss: no run has logged it"),
        (["A", "B", "--metric", "sft/*"], "--metric sft/*: no run has such a metric"),
        (
            ["A", "B", "--max-difference", "policy/los=1"],
            "--max-difference policy/los: no run has such a metric; did you mean policy/loss?",
        ),
        (["A", "B", "--max-difference", "policy/loss"], "is not METRIC=VALUE"),
        (["A", "B", "--max-difference", "policy/loss=-1"], "is not METRIC=VALUE"),
        (["A", "B", "--max-difference", "policy/loss=nan"], "is not METRIC=VALUE"),
        (["A", "B", "--window", "0"], "0 is not an integer >= 1"),
        (["A", "B", "--tolerance", "0"], "0 is not a number > 0"),
        (["A", "LATE", "--until", "5"], "--until 5: the first step of"),
        (["TIMES", "TIMES2"], "no run has logged a score, a loss or a KL; name metrics, for example --metric timing/step_s"),
        (["A", "B", "--plot", "curves.gif"], "must end in .png, .svg or .pdf"),
        (["A", "B", "--plot", "absent/curves.svg"], "there is no directory absent"),
        (["A", "B", "--plot", "FOLDER.svg"], "is a directory"),
    ],
)
def test_bad_input_is_one_line_and_2(pair, tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    os.rename("a", "A"), os.rename("b", "B"), os.mkdir("FOLDER.svg")
    for name, content in {"EMPTY": b"", "BROKEN": b"{\n{}\n", "BYTES": b"\xff\n"}.items():
        os.mkdir(name)
        Path(name, "metrics.jsonl").write_bytes(content)
    write_run(tmp_path, "LATE", [{"step": 7, "policy/loss": 1.0}])
    for name in ("TIMES", "TIMES2"):
        write_run(tmp_path, name, [{"step": 7, "timing/step_s": 1.0}])
    code, out, err = compare(capsys, *words)
    assert code == 2 and message in err and err.count("\n") == 1, err
    assert not out or "--plot" in words, "nothing is printed, except before a picture cannot be written"
