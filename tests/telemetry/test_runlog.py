"""Output of a run on disk and on the console, read back by other means than it was written."""

import io
import json
import math
from dataclasses import dataclass
from xml.etree import ElementTree

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megappo.telemetry.jsonl import MetricsFile, read_lines
from megappo.telemetry.metrics import Metric
from megappo.telemetry.plot import learning_curves, picture_of
from megappo.telemetry.runlog import RunLog
from megappo.telemetry.trackers.tensorboard import TensorBoard
from tests.worlds import spawn_world


@dataclass
class Result:
    score: float
    name: str = ""

    def metrics(self):
        place = f"eval/{self.name}/" if self.name else "eval/"
        return {f"{place}score": self.score, f"{place}exact_match": 0.25, f"{place}length": 4.0, f"{place}truncated": 0.5}

    def describe(self):
        return f"score {self.score:.3f} on 500 held-out prompts, exact_match 0.250"


def metrics(step):
    return {
        "reward/score_mean": step / 10,
        "kl/per_response": 0.01 * step,
        "policy/entropy": 1.0 / step,
        "policy/grad_norm": math.inf if step == 2 else 1.0,
        "critic/loss": 0.1,
        "critic/explained_variance": math.nan if step == 1 else 0.5,
        "lengths/response_mean": 5.0,
        "throughput/tokens_per_s": 12345.6,
        "timing/step_s": 2.0,
    }


def run(root, first, last, *, resume=None, close=True, evaluate=(2,)):
    stream = io.StringIO()
    log = RunLog(root, {"tensorboard": TensorBoard(root / "tensorboard")}, stream=stream)
    if resume is not None:
        log.resume_after(resume)
    else:
        log.evaluation(Result(0.5), 0)
    for step in range(first, last + 1):
        if step in evaluate:
            log.evaluation(Result(0.75), step)
        log.step(metrics(step), step, 8)
    if close:
        log.close()
    return stream.getvalue()


def lines(root):
    """By the strictest reader: NaN and Infinity are not JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (root / "metrics.jsonl").read_text().splitlines()]


def events(root):
    accumulator = EventAccumulator(str(root / "tensorboard"))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_a_line_per_step_that_any_json_reader_takes(tmp_path):
    run(tmp_path, 1, 3)
    records = lines(tmp_path)
    assert [r["step"] for r in records] == [0, 1, 2, 3]
    assert records[0]["eval/score"] == 0.5 and records[0]["eval/exact_match"] == 0.25
    assert records[2]["eval/score"] == 0.75 and "eval/score" not in records[3]  # joined with its step
    assert records[1]["critic/explained_variance"] is None and records[2]["policy/grad_norm"] is None


def test_event_files_read_back(tmp_path):
    run(tmp_path, 1, 3)
    scalars = events(tmp_path)
    assert [(step, pytest.approx(value)) for step, value in scalars["reward/score_mean"]] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert scalars["eval/score"] == [(0, 0.5), (2, 0.75)]
    assert [step for step, _ in scalars["critic/explained_variance"]] == [2, 3]  # NaN is a gap


def test_a_non_finite_value_is_warned_of_once(tmp_path, caplog):
    log = RunLog(tmp_path, stream=io.StringIO())
    for step in (1, 2, 3):
        log.step({"critic/explained_variance": math.nan}, step, 3)
    log.close()
    assert [r.getMessage().split()[0] for r in caplog.records] == ["critic/explained_variance"]
    assert not (tmp_path / "tensorboard").exists()


def test_a_resumed_run_writes_what_the_whole_run_would_have(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for path in (whole, broken):
        path.mkdir()
    run(whole, 1, 6)
    run(broken, 1, 5)
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rewa')  # the crash tore this line
    run(broken, 4, 6, resume=3)
    strip = [[{k: v for k, v in r.items() if k != "time"} for r in lines(path)] for path in (whole, broken)]
    assert strip[0] == strip[1]
    assert events(broken)["policy/entropy"] == events(whole)["policy/entropy"]


def test_without_truncation_the_resumed_file_would_differ(tmp_path):
    run(tmp_path, 1, 5)
    run(tmp_path, 4, 6)  # no resume_after
    assert [r["step"] for r in lines(tmp_path)] != [0, 1, 2, 3, 4, 5, 6]


def test_resume_from_the_first_step_and_without_a_file(tmp_path):
    log = MetricsFile(tmp_path / "metrics.jsonl")
    log.truncate_after(3)
    log.append({"step": 4})
    log.close()
    assert lines(tmp_path) == [{"step": 4}]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\noops\n{"step": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2: not JSON"):
        read_lines(path)


def test_the_console_has_a_header_and_one_line_per_step(tmp_path):
    rows = run(tmp_path, 1, 3).splitlines()
    assert rows[0].startswith("before training: score 0.500 on 500 held-out prompts, exact_match 0.250")
    assert rows[1].split() == "step score eval kl entropy length v loss expl.v tok/s s/step eta".split()
    assert rows[2].split()[:-1] == ["1/8", "0.100", "-", "0.010", "1.000", "5.0", "0.1000", "-", "12,346", "2.00"]
    assert rows[3].split()[2] == "0.750" and len(rows) == 5 and len({len(row) for row in rows[1:]}) == 1
    assert "\r" not in "".join(rows) and "\x1b" not in "".join(rows)


def test_a_small_negative_number_is_no_negative_zero(tmp_path):
    stream = io.StringIO()
    log = RunLog(tmp_path, stream=stream)
    log.step({"kl/per_response": -1e-4, "critic/loss": -0.2}, 1, 2)
    assert stream.getvalue().splitlines()[1].split()[3:7] == ["0.000", "-", "-", "-0.2000"]


def test_an_evaluation_whose_step_never_came_is_kept(tmp_path):
    log = RunLog(tmp_path, stream=io.StringIO())
    log.evaluation(Result(0.9), 5)
    log.close()
    assert lines(tmp_path)[0]["eval/score"] == 0.9


def test_supervised_runs_print_about_twenty_rows(tmp_path):
    stream = io.StringIO()
    columns = ("sft/loss", "sft/grad_norm", "sft/lr", "throughput/tokens_per_s")
    log = RunLog(tmp_path, stream=stream, progress=columns, rows=20)
    for step in range(1, 301):
        log.step({"sft/loss": 1 / step, "sft/grad_norm": 1.0, "sft/lr": 1e-3, "throughput/tokens_per_s": 10.0}, step, 300)
    log.close()
    assert len(lines(tmp_path)) == 300 and 20 <= len(stream.getvalue().splitlines()) <= 23
    assert stream.getvalue().splitlines()[-1].split()[0] == "300/300"


def test_trajectories_replace_those_of_a_repeated_step(tmp_path):
    log = RunLog(tmp_path, stream=io.StringIO())
    for score in (0.0, math.nan):
        log.trajectories(10, [{"prompt": "2+2=", "response": "4 ✓", "logprob": [-0.5, math.nan], "score": score}] * 2)
    rows = read_lines(tmp_path / "trajectories" / "step_000010.jsonl")
    assert rows == [{"step": 10, "prompt": "2+2=", "response": "4 ✓", "logprob": [-0.5, None], "score": None}] * 2


def test_the_learning_curve_has_a_panel_for_everything_that_was_logged(tmp_path):
    run(tmp_path, 1, 8, evaluate=(2, 4, 8))
    text = "".join(ElementTree.parse(tmp_path / "learning_curve.svg").getroot().itertext())
    panels = learning_curves(read_lines(tmp_path / "metrics.jsonl"))
    assert len(panels) == 5 and all(title in text for title in panels) and "held-out, greedy" in text
    assert list(panels["score"]["held-out, greedy"]) == [0, 2, 4, 8]
    assert panels["score"]["training"] == {step: step / 10 for step in range(1, 9)}


def test_the_scores_of_named_sets_are_drawn_beside_the_others():
    rows = [{"step": 0, "eval/score": 0.1, "eval/hard/mean@8": 0.0}, {"step": 2, "eval/hard/mean@8": 0.5, "eval/hard/pass@8": 1.0}]
    assert learning_curves(rows) == {"score": {"held-out, greedy": {0: 0.1}, "held-out hard": {0: 0.0, 2: 0.5}}}


def test_supervised_runs_have_their_loss_and_the_order_of_pairs_in_the_learning_curve():
    dpo = {"dpo/loss": 0.6, "dpo/accuracy": 0.5, "eval/loss": 0.7}
    rows = [{"step": 0, "eval/loss": 0.69}, {"step": 1, **dpo}, {"step": 2, **dpo, "eval/accuracy": 0.9}]
    assert learning_curves(rows) == {
        "loss": {"training": {1: 0.6, 2: 0.6}, "held-out": {0: 0.69, 1: 0.7, 2: 0.7}},
        "share of pairs in the right order": {"training": {1: 0.5, 2: 0.5}, "held-out": {2: 0.9}},
    }
    assert learning_curves([{"step": step, "sft/loss": 1.0} for step in (1, 2)]) == {"loss": {"training": {1: 1.0, 2: 1.0}}}


@pytest.mark.parametrize("values", [[0.0, 0.0], [5.0, 5.0], [-1e-9, 1e-9], [1e6, -1e6], [0.1, None]])
def test_any_values_can_be_drawn(values):
    records = [{"step": step, Metric.SCORE_MEAN.value: value} for step, value in enumerate([*values, 0.5])]
    ElementTree.fromstring(picture_of(learning_curves(records), "a <run> & $more$, \\x"))


def test_nothing_logged_draws_nothing():
    assert learning_curves([{"step": 0, "eval/score": 0.1}]) == {}


def write_on_rank(rank, root):
    from pathlib import Path

    run(Path(root), 1, 2)


def test_only_the_first_rank_writes(tmp_path):
    spawn_world(write_on_rank, 2, str(tmp_path), timeout_s=60.0)
    assert [r["step"] for r in lines(tmp_path)] == [0, 1, 2]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
