"""Names that `telemetry.progress` may have, and the columns that they become."""

from __future__ import annotations

import io

import pytest

from megappo.telemetry.metrics import metric_names, nearest_name
from megappo.telemetry.runlog import PPO_COLUMNS, Progress, columns_of, columns_without_critic

NAMES = metric_names(["exact_match", "mine.score"], ["policy", "critic", "reference"])


def test_names_are_whole_and_known_once() -> None:
    assert len(NAMES) == len(set(NAMES)) and not [name for name in NAMES if name.endswith("*")]
    assert {column.metric for column in PPO_COLUMNS} <= set(NAMES)
    work = "perf/work_tflop/logprobs/reference"
    assert {"reward/mine.score/max", "perf/mfu/update_critic", "timing/generate_s", work} <= set(NAMES)


def test_a_run_without_a_critic_has_no_names_of_it() -> None:
    names = metric_names(["exact_match"], ["policy", "reference"])
    assert not [name for name in names if "critic" in name] and [name for name in NAMES if "critic" in name]
    assert set(columns_without_critic()) == {column.metric for column in PPO_COLUMNS} & set(names)


@pytest.mark.parametrize(
    "wrong, meant",
    [
        ("reward/scor_mean", "reward/score_mean"),
        ("perf/mfu/update", "perf/mfu/update_policy"),
        ("grad_norm", "policy/grad_norm"),
        ("xyzzy", None),
    ],
)
def test_the_nearest_name_is_offered(wrong: str, meant: str | None) -> None:
    assert wrong not in NAMES and nearest_name(wrong, NAMES) == meant


def test_the_line_has_the_columns_that_were_asked_for() -> None:
    stream = io.StringIO()
    names = ("reward/score_mean", "policy/grad_norm", "critic/grad_norm", "perf/mfu/update_policy", "policy/lr")
    progress = Progress(columns_of(names), stream)
    progress.row({"reward/score_mean": 0.25, "policy/grad_norm": 1234.5678, "policy/lr": 1e-6, "kl/coef": 3.0}, 1, 1)
    header, row = stream.getvalue().splitlines()
    assert header.split() == ["step", "score", "policy/grad_norm", "critic/grad_norm", "mfu/update_policy", "lr", "eta"]
    assert row.split() == ["1/1", "0.250", "1235", "-", "-", "1e-06", "0:00"] and len(header) == len(row)


def test_without_names_the_line_is_the_usual_one() -> None:
    assert columns_of(()) == PPO_COLUMNS
