"""Demonstrations: the tokens of a rollout, and a mask over what is to be learnt."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.data.cache import Cache
from megappo.data.prompts import PromptFormat
from megappo.data.texts import DemonstrationRules, DemonstrationSet, demonstrations_of
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from scripts.arithmetic import train_tokenizer
from tests.data.record_lists import Records
from tests.data.tokenizer_files import write_hf_tokenizer


@pytest.fixture(scope="module")
def char(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("char")))


def build(
    records: list, tokenizer: Tokenizer, prompt_format=PromptFormat(chat_template=False), max_tokens: int = 99
) -> DemonstrationSet:
    rules = DemonstrationRules("prompt", "answer", prompt_format, max_tokens)
    return demonstrations_of(Records(records, "s"), tokenizer, rules, Cache())


def test_the_mask_covers_the_response_and_eos_and_nothing_else(char: Tokenizer) -> None:
    demonstrations = build([{"prompt": "1+1=", "answer": "2"}, {"prompt": "5*5=", "answer": "25"}], char)
    batch = demonstrations.packed([1, 0, 1])
    masked = [batch.tokens[a:b][batch["response_mask"][a:b]].tolist() for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:])]
    assert masked == [[*char.encode(text), char.eos_id] for text in ("25", "2", "25")]
    first = batch.tokens[: int(batch.cu_seqlens[1])]
    assert first[~batch["response_mask"][: len(first)]].tolist() == char.encode_prompt("5*5=")


def test_a_chat_demonstration_has_the_tokens_of_a_rollout(tmp_path: Path) -> None:
    """Prompt as the template writes it up to the assistant's turn, response on its own, eos: what a policy would have sampled."""
    hf = load_tokenizer(write_hf_tokenizer(tmp_path / "t"))
    demonstration = build([{"prompt": "How many?", "answer": " 46."}], hf, PromptFormat(prompt_suffix="!"))[0]
    prompt = hf.chat([{"role": "user", "content": "How many?!"}])
    assert demonstration.tokens == (*prompt, *hf.encode(" 46."), hf.eos_id)
    assert demonstration.prompt_length == len(prompt)


@pytest.mark.parametrize("end", ["</s>", "<|im_end|>"])
def test_a_response_that_is_written_with_its_end_has_one(tmp_path: Path, end: str) -> None:
    hf = load_tokenizer(write_hf_tokenizer(tmp_path / "t"))
    tokens = build([{"prompt": "How many?", "answer": f" 46.{end}"}], hf, PromptFormat())[0].tokens
    assert tokens[-len(hf.encode(" 46.")) - 1 :] == (*hf.encode(" 46."), *hf.encode(end)) and hf.encode(end)[0] in hf.eos_ids


def test_longer_records_are_left_out_and_counted(char: Tokenizer) -> None:
    """bos, 4 characters, answer, eos: 7 and 8 tokens."""
    built = build([{"prompt": "1+1=", "answer": "2"}, {"prompt": "5*5=", "answer": "25"}], char, max_tokens=7)
    assert [built[i].id for i in range(len(built))] == ["s#0"]
    assert built.summary() == "kept 1 of 2 demonstrations; 1 longer than data.max_tokens=7"


@pytest.mark.parametrize(
    "records, says",
    [
        ([{"prompt": "1+1=", "gold": "2"}], "data.response_key=answer: s#0 has no such key; it has prompt, gold"),
        ([{"question": "1+1=", "answer": "2"}], "data.prompt_key=prompt: s#0 has no such key; it has question, answer"),
        ([{"prompt": "1+1=", "answer": 2}], "data.response_key=answer: s#0 holds a int, not a string"),
        (
            [{"prompt": "1+1=", "answer": "2" * 99}],
            "no demonstrations are left of s: kept 0 of 1 demonstrations; 1 longer than data.max_tokens=99",
        ),
        ([], "no demonstrations are left of s: kept 0 of 0 demonstrations"),
    ],
)
def test_bad_data_gives_one_line(char: Tokenizer, records: list, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(records, char)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_half_a_surrogate_pair_in_a_response_names_the_record(char: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"^s#1: the response holds .ud800 at character 1, half of a surrogate pair"):
        build([{"prompt": "1", "answer": "2"}, {"prompt": "1", "answer": "2\ud800"}], char)
