"""Results of evaluations in words: the console's line of a set, and the table of `megappo eval`."""

from __future__ import annotations

from megappo.commands.eval.evaluate import results_table
from megappo.trainer.evaluation import Evaluation
from megappo.trainer.step_totals import Turns


def evaluation(turns: Turns | None = None, num_parts: int = 0) -> Evaluation:
    parts = {f"part {number}": float(number) for number in range(num_parts)}
    return Evaluation("math", 8, 1, {"mean@1": 0.5, "length": 12.0, "truncated": 0.25}, parts, turns)


def test_turns_are_told_once():
    line = evaluation(Turns(2.5, 4.0, 0.0, 0.125, {})).describe()
    assert line.endswith("mean length 12.0 tokens, 25.0% cut, 2.50 turns, 12.5% ended by a late answer")


def test_a_table_has_every_figure_of_a_set():
    assert results_table([evaluation(num_parts=120)]).count("part ") == 120
