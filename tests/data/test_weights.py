"""Weights of prompts from a field of their records: read once, anew when anything changes, bad ones refused with their record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from megappo.data.cache import Cache
from megappo.data.loader import weights_of
from megappo.data.prompt_rows import PromptRules, prompts_of
from megappo.data.prompts import PromptFormat, PromptSet
from megappo.data.sources import open_source
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from tests.data.record_lists import Records
from tests.data.tokenizer_files import write_hf_tokenizer

RULES = PromptRules("prompt", "answer", PromptFormat(chat_template=False), 12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(str(write_hf_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def write(file: Path, records: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps({"prompt": "1+1", "answer": "2", **record}) + "\n" for record in records))
    return str(file)


def loaded(spec: str, tokenizer: Tokenizer, root: Path) -> PromptSet:
    return prompts_of(open_source(spec), tokenizer, RULES, Cache(root))


def test_weights_are_those_of_the_prompts_that_are_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = [{"w": 2, "meta": {"v": 0.1}}, {"prompt": "1" * 40, "w": 9, "meta": {"v": 9}}, {"w": 0.5, "meta": {"v": 1e308}}]
    prompts = loaded(write(tmp_path / "a.jsonl", records), tokenizer, tmp_path / "cache")
    assert len(prompts) == 2, "one is too long"
    for key, expected in (("w", [2.0, 0.5]), ("meta.v", [0.1, 1e308])):
        for _ in range(2):  # made, and read again
            found = weights_of(prompts, key, Cache(tmp_path / "cache"))
            assert found.dtype == numpy.float64 and found.tolist() == expected


def test_another_key_or_another_file_is_never_the_kept_one(tmp_path: Path, tokenizer: Tokenizer, monkeypatch) -> None:
    cache = Cache(tmp_path / "cache")

    def weights(value: float, key: str) -> list[float]:
        spec = write(tmp_path / "a.jsonl", [{"w": value, "v": 7.0}, {"w": 1.0, "v": 7.0}])
        return weights_of(loaded(spec, tokenizer, tmp_path / "cache"), key, cache).tolist()

    assert [weights(2.0, "w"), weights(2.0, "v"), weights(3.0, "w"), weights(2.0, "w")] == [[2, 1], [7, 7], [3, 1], [2, 1]]
    monkeypatch.setattr("megappo.data.loader._weight", lambda *_: pytest.fail("read again"))
    assert weights(3.0, "w") == [3, 1], "kept"


@pytest.mark.parametrize(
    "records, says",
    [
        ([{"w": 1}, {"w": -0.5}], "data.weight_key=w: a.jsonl#1 (line 2) holds -0.5, not a finite number of 0 or more"),
        ([{"w": float("nan")}], "data.weight_key=w: a.jsonl#0 (line 1) holds nan, not a finite number of 0 or more"),
        ([{"w": float("inf")}], "data.weight_key=w: a.jsonl#0 (line 1) holds inf, not a finite number of 0 or more"),
        ([{"w": "3"}], "data.weight_key=w: a.jsonl#0 (line 1) holds '3', not a finite number of 0 or more"),
        ([{"w": True}], "data.weight_key=w: a.jsonl#0 (line 1) holds True, not a finite number of 0 or more"),
        ([{"w": 1}, {}], "data.weight_key=w: a.jsonl#1 (line 2) has no such key; it has prompt, answer"),
        ([{"w": 0}, {"w": 0.0}], "data.weight_key=w: all 2 prompts have weight 0, so none would be drawn"),
    ],
)
def test_a_bad_weight_is_refused_with_its_record(records, says: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = Records([{"prompt": "1+1", "answer": "2", **record} for record in records], "a.jsonl", range(1, len(records) + 1))
    prompts = prompts_of(source, tokenizer, RULES, Cache(tmp_path / "cache"))
    for _ in range(2):  # an error is not kept
        with pytest.raises(ValueError) as error:
            weights_of(prompts, "w", Cache(tmp_path / "cache"))
        assert str(error.value) == says
