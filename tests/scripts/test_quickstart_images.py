"""The control of the quickstart with images: shuffled pictures leave questions and answers as they are, and say nothing of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy
import pytest

from scripts.quickstart_images import COLOURS, MOST, NUM_EVAL, NUM_TRAIN, write_questions

Question = tuple[str, str, str]


def read(folder: Path, name: str) -> list[Question]:
    """Prompt, answer and picture of every record."""
    records = map(json.loads, (folder / "data" / f"{name}.jsonl").read_text().splitlines())
    return [(one["prompt"], one["answer"], one["image"]) for one in records]


def best_score(questions: list[Question], counts: list[dict[str, int]]) -> float:
    """Share of right answers of the best rule from the squares of the picture that is shown."""
    cases = Counter((counts[int(image.removesuffix(".png"))][prompt[7:-1]], answer) for prompt, answer, image in questions)
    return sum(max(cases[shown, str(answer)] for answer in range(MOST + 1)) for shown in range(MOST + 1)) / len(questions)


@pytest.mark.parametrize("name", ["train", "eval"])
def test_nothing_can_be_learned_from_shuffled_pictures(tmp_path: Path, name: str) -> None:
    generator = numpy.random.default_rng(3)
    counts = [dict(zip(COLOURS, generator.integers(0, MOST + 1, 3).tolist())) for _ in range(NUM_TRAIN + NUM_EVAL)]
    found = {}
    for shuffled in (False, True):
        (tmp_path / str(shuffled)).mkdir()
        write_questions(tmp_path / str(shuffled), counts, shuffled=shuffled)
        found[shuffled] = {one: read(tmp_path / str(shuffled), one) for one in ("train", "eval")}
    right, shuffled = found[False], found[True]
    assert [one[:2] for one in shuffled[name]] == [one[:2] for one in right[name]]
    pictures = [Counter(image for one in sets.values() for _, _, image in one) for sets in (right, shuffled)]
    assert pictures[0] == pictures[1] and set(pictures[0].values()) == {len(COLOURS)}
    # Four answers are equally frequent: a quarter of guesses is right, and the best of four of them by chance a little more.
    spread = (len(right[name]) * 3 / 16) ** 0.5 / len(right[name])
    assert best_score(right[name], counts) == 1.0, "negative control"
    assert best_score(shuffled[name], counts) < 0.25 + 4 * spread
