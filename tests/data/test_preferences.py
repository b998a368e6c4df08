"""Preferences: sequences of pairs, lists and labelled responses, their fields, and one line for each kind of bad record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megappo.data.cache import Cache
from megappo.data.preferences import LabelKeys, ListKeys, PairKeys, PreferenceRules, PreferenceSet, preferences_of
from megappo.data.prompts import PromptFormat
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from scripts.arithmetic import train_tokenizer
from tests.data.record_lists import Records
from tests.data.tokenizer_files import TEMPLATE, write_hf_tokenizer

PAIR, LIST, LABEL = PairKeys("chosen", "rejected"), ListKeys("responses"), LabelKeys("completion", "label")
TEXT, CHAT = PromptFormat(chat_template=False), PromptFormat()


@pytest.fixture(scope="module")
def char(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("char")))


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_hf_tokenizer(tmp_path_factory.mktemp("hf")))


def build(records: list, tokenizer: Tokenizer, keys: Any = PAIR, form: PromptFormat = TEXT, **rules: Any) -> PreferenceSet:
    source = Records(records, "s.jsonl", range(1, len(records) + 1))
    return preferences_of(source, tokenizer, PreferenceRules(keys, "prompt", form, **{"max_tokens": 99, **rules}), Cache())


def texts_of(batch: Any) -> list[list[int]]:
    return [batch.tokens[a:b].tolist() for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:])]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_pair_is_two_rollouts_of_one_prompt(char: Tokenizer) -> None:
    keys = PairKeys("chosen", "rejected", "by", "even")
    records = [{"prompt": "1+1=", "chosen": "2", "rejected": "11", "by": 0.5, "even": False}]
    records += [{"prompt": "2*2=", "chosen": "4", "rejected": "5", "by": 0, "even": 1}]
    pairs = build(records, char, keys)
    batch = pairs.packed([1, 0])
    prompts = [char.encode_prompt(text) for text in ("2*2=", "2*2=", "1+1=", "1+1=")]
    responses = [[*char.encode(text), char.eos_id] for text in ("4", "5", "2", "11")]
    assert texts_of(batch) == [[*prompt, *response] for prompt, response in zip(prompts, responses)]
    assert [batch.tokens[batch["response_mask"]].tolist()] == [[token for one in responses for token in one]]
    assert batch["unit"].tolist() == [1, 1, 2, 2] and batch["place"].tolist() == [0, 0, 0, 1]
    assert batch["margin"].tolist() == [0, 0, 0, 0.5] and batch["length"].tolist() == batch.lengths.tolist()
    assert pairs.lengths([1, 0]) == [tuple(batch.lengths[:2].tolist()), tuple(batch.lengths[2:].tolist())]
    assert pairs.summary() == "kept 2 of 2 pairs"


def test_messages_and_texts_without_a_prompt_give_the_same_pair(char: Tokenizer, hf: Tokenizer) -> None:
    question = [user("What is 12 + 34?")]
    explicit = build([{"prompt": question, "chosen": [says("46")], "rejected": "45"}], hf, form=CHAT).packed([0])
    implicit = build([{"chosen": [*question, says("46")], "rejected": [*question, says("45")]}], hf, form=CHAT).packed([0])
    assert explicit.tokens.equal(implicit.tokens)
    beside = {"prompt": "What is", "chosen": [*question, says("46")], "rejected": [*question, says("45")]}
    assert explicit.tokens.equal(build([beside], hf, form=CHAT).packed([0]).tokens)
    assert texts_of(explicit)[1] == [*hf.chat(question), *hf.encode("45"), hf.eos_id]
    text = build([{"chosen": "Twice as much. How many? They", "rejected": "Twice as much. How many? Then"}], hf).packed([0])
    assert texts_of(text)[0] == [*hf.encode_prompt("Twice as much. How many?"), *hf.encode(" They"), hf.eos_id]


def test_a_response_may_be_several_messages(hf: Tokenizer) -> None:
    """Its turns of the assistant are learned, what stands between them and the prompt is not."""
    question, again = user("What is 12 + 34?"), user("Sure?")
    longer, shorter = [says("46"), again, says("Yes")], [says("45")]
    given = build([{"prompt": [question], "chosen": longer, "rejected": shorter}], hf, form=CHAT).packed([0])
    whole = build([{"chosen": [question, *longer], "rejected": [question, *shorter]}], hf, form=CHAT).packed([0])
    assert given.tokens.equal(whole.tokens) and given["response_mask"].equal(whole["response_mask"])
    assert texts_of(given)[0] == hf.conversation([question, *longer])
    asked = [hf.chat([question]), hf.chat([question, *longer[:2]])]
    learned = [
        begin + place
        for begin, text in ((len(one), hf.encode("46" if one is asked[0] else "Yes")) for one in asked)
        for place in range(len(text) + 1)
    ]  # with the end of the turn
    first = int(given.cu_seqlens[1])
    assert given["response_mask"][:first].nonzero().flatten().tolist() == learned
    assert given["response_mask"][first:].sum() == len(hf.encode("45")) + 1
    scored = build([{"prompt": [question], "chosen": longer, "rejected": shorter}], hf, form=CHAT, scored=True).packed([0])
    assert texts_of(scored)[0] == texts_of(given)[0]
    labels = [{"prompt": [question], "completion": one, "label": one is longer} for one in (longer, shorter)]
    other = build(labels, hf, LABEL, CHAT).mismatched([1])
    assert other["response_mask"].sum() == given["response_mask"][:first].sum() and other.num_tokens == first


def test_a_list_is_ranked_and_a_label_is_signed(char: Tokenizer) -> None:
    batch = build([{"prompt": "1+1=", "responses": ["2", "3", "4"]}], char, LIST).packed([0])
    assert batch["place"].tolist() == [0, 1, 2] and batch["unit"].tolist() == [1, 1, 1]
    records = [{"prompt": f"{i}+1=", "completion": str(i), "label": i % 2 == 0} for i in range(5)]
    labelled = build(records, char, LABEL)
    assert labelled.packed([0, 1])["label"].tolist() == [1, -1]
    other = texts_of(labelled.mismatched([4]))[0]
    assert other == [*char.encode_prompt("4+1="), *char.encode("1"), char.eos_id]  # half the data further on, around its end


def test_a_reward_model_reads_what_it_scores(hf: Tokenizer) -> None:
    record = {"prompt": "How many?", "chosen": "46", "rejected": "45"}
    batch = build([record], hf, form=CHAT, scored=True).packed([0])
    assert texts_of(batch)[1] == hf.conversation([user("How many?"), says("45")])
    assert texts_of(build([record], hf, scored=True).packed([0]))[0] == hf.encode_prompt("How many?46")


def test_longer_records_are_left_out_and_counted_or_refused(char: Tokenizer) -> None:
    records = [{"prompt": "1+1=", "chosen": "2", "rejected": "1" * 20}, {"prompt": "1+1=", "chosen": "2", "rejected": "1"}]
    assert build(records, char, max_tokens=10).summary() == "kept 1 of 2 pairs; 1 longer than data.max_tokens=10"
    with pytest.raises(ValueError, match=r"s.jsonl#0 \(line 1\)"):
        build(records, char, max_tokens=10, overlong="error")


GOOD = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    "record, keys, expected",
    [
        ({**GOOD, "rejected": "2"}, PAIR, "s.jsonl#0 (line 1): two of its responses are the same tokens"),
        ({**GOOD, "rejected": " "}, PAIR, "data.rejected_key=rejected: s.jsonl#0 (line 1) has an empty response"),
        ({**GOOD, "chosen": 2}, PAIR, "data.chosen_key=chosen: s.jsonl#0 (line 1) holds 2, not a string or messages that"),
        ({**GOOD, "chosen": [user("2")]}, PAIR, "not a string or messages that the assistant begins and ends"),
        ({**GOOD, "chosen": [says("2"), user("why?")]}, PAIR, "not a string or messages that the assistant begins and ends"),
        (
            {**GOOD, "chosen": [says("2"), user("why?"), says("")]},
            PAIR,
            "message 2 of s.jsonl#0 (line 1), of the assistant, is empty",
        ),
        ({**GOOD, "chosen": [says("2"), user("why?"), says("3")]}, PAIR, "several messages needs data.chat_template=true"),
        ({"prompt": "1+1=", "chosen": "2"}, PAIR, "data.rejected_key=rejected: s.jsonl#0 (line 1) has no such key"),
        ({"chosen": "2", "rejected": "3"}, PAIR, "has no prompt, and no word with which all responses begin"),
        ({"chosen": [user("a"), says("2")], "rejected": [user("b"), says("3")]}, PAIR, "its conversations differ before"),
        (
            {"prompt": [user("b")], "chosen": [user("a"), says("2")], "rejected": [user("a"), says("3")]},
            PAIR,
            "data.prompt_key=prompt: s.jsonl#0 (line 1) has a prompt with which its conversations do not begin",
        ),
        ({**GOOD, "m": -1}, PairKeys("chosen", "rejected", "m"), "data.margin_key=m: s.jsonl#0 (line 1) holds -1, not a number"),
        (
            {**GOOD, "t": 2},
            PairKeys("chosen", "rejected", None, "t"),
            "data.tie_key=t: s.jsonl#0 (line 1) holds 2, not true or false",
        ),
        ({"prompt": "1+1=", "responses": ["2"]}, LIST, "not a list of two or more responses, the best one first"),
        ({"prompt": "1+1=", "completion": "2", "label": 2}, LABEL, "data.label_key=label: s.jsonl#0 (line 1) holds 2, not true"),
        ({"prompt": "1+1=", "completion": "2", "label": "1"}, LABEL, "holds '1', not true or false (1 or 0)"),
        ({"completion": "2", "label": 1}, LABEL, "data.prompt_key=prompt: s.jsonl#0 (line 1) has no such key"),
    ],
)
def test_bad_records_give_one_line(char: Tokenizer, record: dict, keys: Any, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        build([record], char, keys)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_template_that_changes_the_prompt_is_refused(tmp_path: Path) -> None:
    """One that writes the last answer's length in front; the same pair passes without the template, and for a policy."""
    length = "{{ messages[-1]['content'] | length }}"
    tokenizer = load_tokenizer(write_hf_tokenizer(tmp_path / "t", chat_template=length + TEMPLATE))
    record = {"prompt": "How many?", "chosen": "46", "rejected": "4545"}
    with pytest.raises(ValueError, match=r"s.jsonl#0 \(line 1\): the chat template changes the prompt before the response '46'"):
        build([record], tokenizer, form=CHAT, scored=True)
    assert len(build([record], tokenizer, scored=True)) == len(build([record], tokenizer, form=CHAT)) == 1
