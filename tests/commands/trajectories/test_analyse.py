"""Figures of trajectories whose numbers are known."""

from __future__ import annotations

import math

import pytest

from megappo.commands.trajectories.analyse import analyse
from megappo.telemetry.trajectories import read
from megappo.telemetry.trajectories.read import read_run
from tests.commands.trajectories.runs import EOS, record, write_run


def analysis_of(tmp_path, rows, worst=3):
    steps = rows if isinstance(rows, dict) else {1: rows}
    return analyse(read_run(write_run(tmp_path, steps)).trajectories, worst)


def test_a_step_in_figures(tmp_path):
    rows = [
        record((5, 6, EOS), score=1.0),
        record((5, 6, EOS), sample=1, score=0.0),  # equal to the first
        record((5, 6, EOS), sample=2, score=0.5, id="train.jsonl#1"),  # equal, to another prompt
        record([7, 8, 9] * 6, sample=3, score=0.0, id="train.jsonl#1", finish="length"),
    ]
    (step,) = analysis_of(tmp_path, rows).steps
    assert (step.samples, step.score, step.truncated) == (4, 0.375, 0.25)
    assert step.length == (3 + 3 + 3 + 18) / 4
    assert step.repetition == pytest.approx((15 - 3) / 15 / 4)
    assert step.kl == pytest.approx(0.25 * 27 / 4)


def test_kl_is_the_policy_less_the_reference(tmp_path):
    """A policy that likes its own tokens more than the reference does has a positive KL."""
    liked = record(logprob=[-0.1] * 3, ref_logprob=[-1.1] * 3)
    analysis = analysis_of(tmp_path, [liked])
    assert analysis.samples[0].kl == pytest.approx(3.0)
    assert [one.kl for one in analysis.positions] == pytest.approx([1.0] * 3)
    assert analysis.worst["highest KL"] == [analysis.samples[0]]


def test_a_kl_of_the_wrong_sign_is_noticed(tmp_path, monkeypatch):
    """Negative control of the test above."""
    right = read.Trajectory._difference
    monkeypatch.setattr(read.Trajectory, "_difference", lambda self, name, other: right(self, other, name))
    with pytest.raises(AssertionError):
        test_kl_is_the_policy_less_the_reference(tmp_path)


def test_tokens_that_were_given_do_not_count(tmp_path):
    """The output of a tool has no numbers; it is no part of the length, of repetition, or of a position."""
    given = record((5, 6, 7, 8, EOS), response_mask=[1, 0, 0, 1, 1], entropy=[1.0, None, None, 2.0, 3.0])
    analysis = analysis_of(tmp_path, [given])
    assert analysis.samples[0].length == 3 and analysis.samples[0].entropy == 2.0
    assert [one.entropy for one in analysis.positions] == [1.0, 2.0, 3.0]
    assert analysis.samples[0].kl == pytest.approx(0.75)


def test_long_responses_are_cut_into_tenths(tmp_path):
    tokens = list(range(100, 120))
    numbers = [float(i) for i in range(20)]
    rows = [record(tokens, entropy=numbers, value=numbers, returns=[10.0] * 20), record(tokens[:5], sample=1, entropy=[100.0] * 5)]
    analysis = analysis_of(tmp_path, rows)
    assert not analysis.by_token and [one.position for one in analysis.positions][::9] == ["0-10 %", "90-100 %"]
    # The short one has its tokens in tenths 0, 2, 4, 6, 8.
    assert [one.tokens for one in analysis.positions] == [3, 2] * 5
    assert [one.entropy for one in analysis.positions][:2] == [pytest.approx((0 + 1 + 100) / 3), 2.5]
    second = analysis.positions[1]
    assert second.value_bias == -7.5 and second.value_error == pytest.approx(math.sqrt((8**2 + 7**2) / 2))


def test_the_worst_are_listed_once_and_the_newest_first(tmp_path):
    rows = [record(sample=i, score=0.0, response_tokens=[5, 6 + (i == 3), EOS]) for i in range(4)]
    steps = {1: [record(score=-1.0)], 2: rows}
    worst = analysis_of(tmp_path, steps).worst
    assert [(one.trajectory.step, one.trajectory.sample) for one in worst["lowest score"]] == [(1, 0), (2, 3), (2, 2)]
    assert not worst["most repetitive"]


def test_a_score_that_is_no_number_is_the_worst_and_in_no_mean(tmp_path):
    analysis = analysis_of(tmp_path, [record(score=1.0), record(sample=1, score=None, entropy=[None, 0.5, 0.7])])
    assert math.isnan(analysis.worst["lowest score"][0].trajectory.score)
    assert analysis.steps[0].score == 1.0 and analysis.samples[1].entropy == pytest.approx(0.6)


def test_a_run_without_a_reference_has_no_kl(tmp_path):
    row = record()
    del row["ref_logprob"]
    analysis = analysis_of(tmp_path, [row])
    assert math.isnan(analysis.steps[0].kl) and math.isnan(analysis.positions[0].kl) and not analysis.worst["highest KL"]
    assert analysis.positions[0].logprob == -1.0


def test_responses_without_a_token(tmp_path):
    analysis = analysis_of(tmp_path, [record(())])
    assert analysis.steps[0].length == 0 and not analysis.positions
