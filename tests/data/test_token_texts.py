"""Texts of single tokens join to the text of all, whatever the bytes of a token are."""

from __future__ import annotations

import io

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from megappo.data.token_texts import special_ids, token_texts
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from tests.data.tokenizer_files import write_hf_tokenizer


def byte_fallback(directory):
    """SentencePiece with a piece for every byte, as Llama's tokenizers have."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the sum of two and two is four"] * 20),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    (directory / "x.model").write_bytes(model.getvalue())
    return directory / "x.model"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> list[Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return [load_tokenizer(write_hf_tokenizer(folder / "hf")), load_tokenizer(byte_fallback(folder))]


def test_a_character_is_the_text_of_the_last_token_of_its_bytes(tokenizers):
    for tokenizer in tokenizers:
        ids = tokenizer.encode("a€b😀")
        texts = [text for text in token_texts(ids, tokenizer) if text.strip()]
        assert len(ids) >= 1 + 3 + 1 + 4 and texts == ["a", "€", "b", "😀"]


def test_special_tokens_are_shown_and_known(tokenizers):
    hf, sentence = tokenizers
    ids = [3, *hf.encode("is\n"), 4, 2]
    assert token_texts(ids, hf)[0] == "<|im_start|>" and token_texts(ids, hf)[-2:] == ["<|im_end|>", "</s>"]
    assert special_ids(ids, hf) == [2, 3, 4]
    ids = [1, *sentence.encode("two"), 2]
    assert token_texts(ids, sentence)[-1] == "</s>" and special_ids(ids, sentence) == [1, 2]


def test_ids_beyond_the_vocabulary_and_no_ids(tokenizers):
    for tokenizer in tokenizers:
        assert token_texts([tokenizer.vocab_size + 5], tokenizer) == ["\ufffd"]
        assert special_ids([tokenizer.vocab_size + 5], tokenizer) == []
        assert token_texts([], tokenizer) == []


@given(st.data())
def test_joined_they_are_the_text(tokenizers, data):
    tokenizer = data.draw(st.sampled_from(tokenizers))
    if data.draw(st.booleans()):
        ids = tokenizer.encode(data.draw(st.text(st.sampled_from("ab é€😀漢\n\u200d"), max_size=30)))
    else:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    texts = token_texts(ids, tokenizer)
    assert len(texts) == len(ids) and "".join(texts) == tokenizer.decode_all(ids)


def test_texts_of_ids_decoded_alone_do_not_join(tokenizers):
    """Negative control: the simple way tears characters apart."""
    tokenizer = tokenizers[0]
    ids = tokenizer.encode("€")
    assert "".join(tokenizer.decode_all([one]) for one in ids) != tokenizer.decode_all(ids)
