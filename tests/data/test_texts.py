"""Plain texts as sequences: none lost, a long one cut, a record that is wrong named."""

from __future__ import annotations

from typing import Any

import pytest

from megappo.data.cache import Cache
from megappo.data.texts import TextRules, TextSet, texts_of
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from scripts.arithmetic import train_tokenizer
from tests.data.record_lists import Records


@pytest.fixture(scope="module")
def char(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("char")))


def build(records: list[Any], tokenizer: Tokenizer, max_tokens: int = 99, key: str = "text") -> TextSet:
    return texts_of(Records(records, "s"), tokenizer, TextRules(key, max_tokens), Cache())


def whole(text: str, tokenizer: Tokenizer) -> list[int]:
    return [*tokenizer.encode_prompt(text), tokenizer.eos_id]


def test_a_sequence_is_a_text_from_its_start_to_eos(char: Tokenizer) -> None:
    texts = build([{"text": "1+1=2"}, {"text": ""}, {"text": "5*5=25"}], char)
    assert texts.summary() == f"3 sequences, {texts.num_tokens} tokens of 3 texts"
    batch = texts.packed([2, 0, 2])
    assert batch.tokens.tolist() == [t for text in ("5*5=25", "1+1=2", "5*5=25") for t in whole(text, char)]
    assert texts.lengths([2, 0, 1]).tolist() == [len(whole(text, char)) for text in ("5*5=25", "1+1=2", "")]
    assert len(texts.lengths([])) == texts.packed([]).num_tokens == 0


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 7, 8, 99])
def test_a_longer_text_is_cut_and_only_a_last_token_alone_is_left_out(char: Tokenizer, max_tokens: int) -> None:
    tokens = whole("5*5=25", char)
    texts = build([{"text": "5*5=25"}], char, max_tokens)
    pieces = [texts.packed([i]).tokens.tolist() for i in range(len(texts))]
    assert all(2 <= len(piece) <= max_tokens for piece in pieces)
    alone = len(tokens) % max_tokens == 1
    assert [t for piece in pieces for t in piece] == (tokens[:-1] if alone else tokens)


def test_texts_of_the_cache_are_those_of_the_source(char: Tokenizer) -> None:
    records = [{"body": {"text": f"{i}+{i}={2 * i}"}} for i in range(9)]
    first, again = (build(records, char, key="body.text") for _ in range(2))
    assert first.packed(range(9)).tokens.tolist() == again.packed(range(9)).tokens.tolist()
    assert first.source_sha256 == again.source_sha256 != build(records[:8], char, key="body.text").source_sha256


@pytest.mark.parametrize(
    "records, says",
    [
        ([{"prompt": "1"}], "algorithm.ptx.text_key=text: s#0 has no such key; it has prompt"),
        ([{"text": "1"}, {"text": 2}], "algorithm.ptx.text_key=text: s#1 holds a int, not a string"),
        ([], "s has no text: 0 records"),
    ],
)
def test_bad_texts_give_one_line(char: Tokenizer, records: list[Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(records, char)
    assert says in str(caught.value) and "\n" not in str(caught.value)
