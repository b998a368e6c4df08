"""The model of the step time against whole steps and trainers that others published, part by part.

`published_steps.json` has them with their sources. A row that `chooses` a constant is no test of it."""

from __future__ import annotations

import json
import re
from statistics import median

import pytest

from benchmarks.step_time import FIGURES, PAGE, errors, group_of, page_lines, predicted, written_page
from megappo.commands.tune.lengths import Lengths

RECORD = json.loads(FIGURES.read_text())
MOST = {"total": 0.15, "generate": 0.2, "log-probs": 0.2, "update": 0.2}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return {row["name"]: predicted(row, RECORD, folder) for row in RECORD["rows"]}


def of(name):
    return next(row for row in RECORD["rows"] if row["name"] == name)


@pytest.mark.parametrize("part", MOST)
def test_the_median_error_of_whole_steps_is_small(found, part):
    off = errors(RECORD, "nemo", part, found)
    assert len(off) >= (32 if part == "total" else 5) and median(off) <= MOST[part]


def test_the_median_error_of_all_rows_is_small_and_that_of_the_rows_added_later_is_known(found):
    """Models and machines that chose no constant: further off, and most are too fast."""
    later = errors(RECORD, "later", "total", found)
    assert len(later) == 19 and median(later) <= 0.2 and median(later + errors(RECORD, "nemo", "total", found)) <= 0.15
    ratios = [found[row["name"]]["total"] / row["seconds"]["total"] for row in RECORD["rows"] if group_of(row) == "later"]
    assert min(ratios) > 0.5 and sum(ratio > 1 for ratio in ratios) <= 2


@pytest.mark.parametrize("asynchronous", [True, False])
def test_runs_that_wait_for_responses_and_runs_that_overlap_are_as_well_known(found, asynchronous):
    rows = [row for row in RECORD["rows"] if ("rollout.max_staleness" in row["set"]) == asynchronous]
    off = errors(RECORD | {"rows": rows}, "nemo", "total", found)
    assert len(off) >= (14 if asynchronous else 18) and median(off) <= 0.15


def test_with_experts_that_share_all_rows_evenly_steps_are_too_fast(found, tmp_path):
    """Negative control: no row has chosen how uneven experts are."""
    rows = [row for row in RECORD["rows"] if re.fullmatch("nemo0[456]-30b-\\d+(-gb200)?", row["name"])]
    even = [row | {"set": row["set"] | {"policy.router_aux_coef": 0.001}} for row in rows]
    ratios = [predicted(row, RECORD, tmp_path)["total"] / row["seconds"]["total"] for row in even]
    uneven = [found[row["name"]]["total"] / row["seconds"]["total"] for row in rows]
    assert len(rows) == 5 and max(ratios) < 1
    assert median(abs(ratio - 1) for ratio in uneven) < 0.7 * median(abs(ratio - 1) for ratio in ratios)


def test_with_constants_of_no_framework_steps_are_further_off(found, tmp_path):
    """Negative control: what the host time of NeMo-RL's layers with experts and its push are for."""
    rows = [row for row in RECORD["rows"] if "30b-16-gb200" in row["name"] and "chooses" not in row]
    plain = {row["name"]: predicted(row, RECORD | {"frameworks": {}}, tmp_path) for row in rows}
    without, within = (
        median(abs(one[row["name"]]["total"] / row["seconds"]["total"] - 1) for row in rows) for one in (plain, found)
    )
    assert len(rows) == 3 and within < 0.5 * without


def test_responses_are_as_long_as_the_tokens_of_a_step_say():
    """Of the rows that give tokens per second and GPU: what is left of a sample is its prompt."""
    for name, per_gpu, prompt in [("nemo05-8b-16", 1581, 127), ("nemo05-30b-32", 1066, 103), ("nemo06-671b-128-gb200", 30.2, 104)]:
        row = of(name)
        samples = row["set"].get("data.prompts_per_step", 64) * row["set"].get("rollout.samples_per_prompt", 32)
        tokens = per_gpu * row["set"]["run.num_ranks"] * row["seconds"]["total"] / samples
        assert tokens - row["response"] == pytest.approx(prompt, abs=3)


def test_the_median_error_of_trainers_and_of_pretraining_is_small(found):
    trainers = errors(RECORD, "prime", "trainer", found)
    assert len(trainers) == 32 and median(trainers) <= 0.2
    [pretraining] = errors(RECORD, "bridge", "update", found)
    assert pretraining <= 0.15


def test_a_replica_that_decodes_mean_responses_is_far_too_fast(tmp_path):
    """Negative control: what the tail of the lengths is for."""
    row = of("nemo03-70b-mcore-64")
    alike = predicted(row | {"spread": 0.0}, RECORD, tmp_path)["generate"]
    assert alike < 0.25 * row["seconds"]["generate"]


def test_the_tail_decides_how_replicas_are_cut(tmp_path):
    """8B on 8 GPUs: with responses that are all alike tp1 is the fastest, and where a step waits for the longest, tp2."""

    def seconds(tp, **more):
        row = of("nemo03-8b-mcore-8")
        return predicted(row | {"set": row["set"] | {"rollout.tp": tp}} | more, RECORD, tmp_path)["generate"]

    assert seconds(2) < seconds(1) and seconds(2, spread=0.0) > seconds(1, spread=0.0)


def test_every_row_names_its_source():
    assert {row["source"] for row in RECORD["rows"]} == set(RECORD["sources"])
    assert len({row["name"] for row in RECORD["rows"]}) == len(RECORD["rows"])


def test_the_page_shows_what_the_model_says_today(found):
    """`python benchmarks/step_time.py --write`."""
    text = PAGE.read_text()
    assert written_page(text, page_lines(RECORD, found)) == text


def test_lengths_have_the_mean_that_was_given():
    """Over all replicas, and cut at the limit."""
    for mean, spread in [(400, 0.85), (900, 0.3), (3000, 0.85), (3900, 1.5), (5, 0.0)]:
        lengths = Lengths(mean, 3968.0, spread)
        drawn = [lengths.quantile((at + 0.5) / 20000) for at in range(20000)]
        assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.01) and max(drawn) <= 3968
        assert lengths.square == pytest.approx(sum(one * one for one in drawn) / len(drawn), rel=0.02)
        longest = lengths.of_replica(256, 8)
        assert len(longest) == 256 and max(longest) == pytest.approx(lengths.quantile(1 - 0.5 / 2048))
