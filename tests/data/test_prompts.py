"""Prompt building: template, suffix, overlong filter, and the one line that every bad record gives."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megappo.data.cache import Cache
from megappo.data.prompts import PromptFormat, PromptSet
from megappo.data.texts import DemonstrationRules, demonstrations_of
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from megappo.trainer.prepare.reward_parts import AnswerKey, require_answer
from scripts.arithmetic import train_tokenizer
from tests.data.record_lists import Records, prompts_of_records
from tests.data.tokenizer_files import write_hf_tokenizer
from tests.gsm8k_files import gsm8k, needs_gsm8k

PLAIN = PromptFormat(chat_template=False)


@pytest.fixture(scope="module")
def char(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("char")))


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_hf_tokenizer(tmp_path_factory.mktemp("hf")))


def build(records: list, tokenizer: Tokenizer, prompt_format: PromptFormat = PLAIN, **options) -> PromptSet:
    return prompts_of_records(records, tokenizer, prompt_format, **options)


def records_of(*prompts: object) -> list[dict]:
    return [{"prompt": prompt, "answer": i} for i, prompt in enumerate(prompts)]


def test_plain_prompts_keep_id_text_answer_and_record(char: Tokenizer) -> None:
    records = records_of("1+1=", "12+34=", "2+2=")  # bos and 4, 6, 4 characters
    prompts = build(records, char)
    assert [p.id for p in prompts.prompts] == ["t.jsonl#0", "t.jsonl#2"]
    assert prompts[1].tokens == (char.bos_id, *char.encode("2+2="))
    assert (prompts[1].text, prompts[1].answer, prompts[1].record) == ("2+2=", "2", records[2])
    assert prompts.summary() == "kept 2 of 3 prompts; 1 longer than data.max_prompt_tokens=6"


def test_a_prompt_of_exactly_the_limit_is_kept(char: Tokenizer) -> None:
    assert build(records_of("12+34="), char, max_prompt_tokens=7).summary() == "kept 1 of 1 prompts"


def test_suffix_and_system_prompt_enter_the_conversation_that_the_template_sees(hf: Tokenizer) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    built = build(records_of("a", turns), hf, PromptFormat(system_prompt="S", prompt_suffix=" !"), max_prompt_tokens=99)
    system = {"role": "system", "content": "S"}
    assert built[0].tokens == tuple(hf.chat([system, {"role": "user", "content": "a !"}]))
    assert built[1].tokens == tuple(hf.chat([system, *turns[:2], {"role": "user", "content": "c !"}]))
    assert built[1].text == "c" and turns[2]["content"] == "c"  # the record is not changed


def test_a_suffix_joins_the_question_before_tokens_are_made(char: Tokenizer) -> None:
    assert build(records_of("1+1"), char, PromptFormat(chat_template=False, prompt_suffix="="))[0].tokens == tuple(
        char.encode_prompt("1+1=")
    )


def test_numbers_and_truth_values_are_answers(char: Tokenizer) -> None:
    built = build([{"prompt": "1=", "answer": answer} for answer in (7, 2.5, "7", 10**30, True)], char)
    assert [prompt.answer for prompt in built.prompts] == ["7", "2.5", "7", str(10**30), "true"]


@pytest.mark.parametrize("ends", ["a", " ", ""])
def test_a_prompt_that_ends_with_the_assistant_is_refused(hf: Tokenizer, ends: str) -> None:
    """The template would close that turn and open a second one; of a demonstration it holds the answer that is to be learned."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ends}]
    says = r"t.jsonl#1 \(line 4\): the prompt ends with a message of the assistant, .*: leave it out"
    with pytest.raises(ValueError, match=says) as caught:
        build(records_of("1", turns), hf, PromptFormat(), max_prompt_tokens=99, lines=[1, 4])
    assert "\n" not in str(caught.value)
    records = Records([{"prompt": "1", "answer": "1"}, {"prompt": turns, "answer": ends}], "t.jsonl", [1, 4])
    with pytest.raises(ValueError, match=says):
        demonstrations_of(records, hf, DemonstrationRules("prompt", "answer", PromptFormat(), 99), Cache())
    assert len(build(records_of(turns[:1]), hf, PromptFormat(), max_prompt_tokens=99)) == 1


def test_half_a_pair_in_a_message_names_the_record(hf: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"t.jsonl#0: the prompt holds .ud800 at character 1"):
        build(records_of([{"role": "user", "content": "a\ud800"}]), hf, PromptFormat())


def test_identities_change_with_the_prompts_and_not_with_the_place_of_the_file(char: Tokenizer) -> None:
    records = records_of("1+1=", "12+34=", "2+2=")
    plain = build(records, char).identities()
    assert plain == build(records, char, source="elsewhere/t.jsonl").identities()
    more = build(records, char, max_prompt_tokens=7).identities()
    assert more["kept"] != plain["kept"] and more["tokens"] != plain["tokens"]
    other = build([*records[:2], {"prompt": "2+2=", "answer": 5}], char).identities()
    assert other["kept"] == plain["kept"] and other["tokens"] != plain["tokens"]
    suffix = build(records, char, PromptFormat(chat_template=False, prompt_suffix="+"), max_prompt_tokens=7).identities()
    assert suffix["tokens"] not in (plain["tokens"], more["tokens"])


def test_dotted_keys_reach_into_nested_records_and_plain_keys_come_first(char: Tokenizer) -> None:
    records = [{"prompt": "1=", "reward_model": {"ground_truth": "a"}}, {"prompt": "1=", "reward_model.ground_truth": "b"}]
    assert [p.answer for p in build(records, char, answer_key="reward_model.ground_truth").prompts] == ["a", "b"]


def test_limit_takes_the_first_prompts_that_fit(char: Tokenizer) -> None:
    prompts = build(records_of("123456=", "1=", "2=", "3="), char, limit=2)
    assert [p.text for p in prompts.prompts] == ["1=", "2="]
    assert prompts.summary() == "kept 2 of 3 prompts; 1 longer than data.max_prompt_tokens=6"


MESSAGE = {"role": "user", "content": "1"}
BAD = {
    "prompt key": (
        [{"question": "1", "answer": "2", "n": 3}],
        PLAIN,
        {},
        "data.prompt_key=prompt: t.jsonl#0 has no such key; it has question, answer, n",
    ),
    "answer key": (
        [{"prompt": "1", "gold": "2"}],
        PLAIN,
        {},
        "data.answer_key=answer: t.jsonl#0 has no such key; it has prompt, gold",
    ),
    "nested key": (
        [{"prompt": "1", "a": {"b": 1}}],
        PLAIN,
        {"answer_key": "a.c"},
        "data.answer_key=a.c: t.jsonl#0 has no such key; it has prompt, a",
    ),
    "type": (records_of("1", 5), PLAIN, {}, "data.prompt_key=prompt: t.jsonl#1 holds 5, not a string or a list of chat messages"),
    "no messages": (records_of([]), PLAIN, {}, "t.jsonl#0 holds [], not a string"),
    "half a message": (records_of([{"role": "user"}]), PLAIN, {}, "t.jsonl#0 holds [{'role': 'user'}], not a string"),
    "messages without template": (
        records_of("1", [MESSAGE]),
        PLAIN,
        {},
        "t.jsonl#1: the question is a list of chat messages, which needs",
    ),
    "no template": (records_of("1"), PromptFormat(), {}, "has no chat template: set data.chat_template=false"),
    "overlong": (
        records_of("1", "123456", "1234567"),
        PLAIN,
        {"overlong": "error"},
        "2 of 3 prompts are longer than data.max_prompt_tokens=6 (longest: t.jsonl#2, 8 tokens)",
    ),
    "all filtered": (
        records_of("123456", "1234567"),
        PLAIN,
        {},
        "no prompts are left of t.jsonl: kept 0 of 2 prompts; 2 longer than data.max_prompt_tokens=6",
    ),
    "null answer": ([{"prompt": "1", "answer": None}], PLAIN, {}, "data.answer_key=answer: t.jsonl#0 holds null, not a string or"),
    "list of answers": ([{"prompt": "1", "answer": ["2"]}], PLAIN, {}, "t.jsonl#0 holds ['2'], not a string or a number"),
    "infinite answer": ([{"prompt": "1", "answer": 1e999}], PLAIN, {}, "t.jsonl#0 holds inf, not a string or a number"),
    "null prompt": (records_of(None), PLAIN, {}, "t.jsonl#0 holds null, not a string or a list of chat messages"),
    "line of a record": (records_of("1", None), PLAIN, {"lines": [1, 4]}, "t.jsonl#1 (line 4) holds null"),
    "half a pair in a prompt": (
        records_of("1\ud83d"),
        PLAIN,
        {},
        "t.jsonl#0: the prompt holds \\ud83d at character 1, half of a surrogate pair; correct it",
    ),
    "half a pair in an answer": ([{"prompt": "1", "answer": "\udca9"}], PLAIN, {}, "the answer holds \\udca9 at character 0"),
    "no records": ([], PLAIN, {}, "no prompts are left of t.jsonl: kept 0 of 0 prompts"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_gives_one_line(char: Tokenizer, case: str) -> None:
    records, prompt_format, options, says = BAD[case]
    with pytest.raises(ValueError) as caught:
        prompts = build(records, char, prompt_format, **options)
        key = AnswerKey(options.get("answer_key", "answer"))
        require_answer(prompts[prompts.unanswered[0]], key, "exact_match")  # as `prepare` does
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_what_the_template_or_the_system_prompt_cannot_take_names_the_record(hf: Tokenizer) -> None:
    with pytest.raises(ValueError, match="t.jsonl#0: the question has a system message of its own: unset data.system_prompt"):
        build(records_of([{"role": "system", "content": "x"}, MESSAGE]), hf, PromptFormat(system_prompt="S"))
    with pytest.raises(ValueError, match="t.jsonl#0: the chat template of .* refuses the messages"):
        build(records_of([{"role": "tool", "content": "x"}]), hf, PromptFormat())


def test_a_system_prompt_without_a_template_is_refused() -> None:
    with pytest.raises(ValueError, match="data.system_prompt needs data.chat_template=true"):
        PromptFormat(chat_template=False, system_prompt="S")


def test_an_empty_prompt_without_bos_is_refused(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceTrainer

    prefix = str(tmp_path / "nobos")
    SentencePieceTrainer.train(
        sentence_iterator=iter(["1+2="]),
        model_prefix=prefix,
        model_type="char",
        vocab_size=7,
        hard_vocab_limit=False,
        bos_id=-1,
        minloglevel=2,
    )
    with pytest.raises(ValueError, match="t.jsonl#0: the prompt is empty"):
        build(records_of(""), load_tokenizer(prefix + ".model"))


@needs_gsm8k
def test_gsm8k_is_built_with_the_template_in_seconds_of_processor_time(hf: Tokenizer) -> None:
    """All 7,473 training questions; ids equal transformers' batch call, and the filter keeps those that are short enough."""
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(str(hf.path))
    records = gsm8k("train")
    started = time.process_time()
    built = build(records, hf, PromptFormat(), prompt_key="question", max_prompt_tokens=400)
    assert time.process_time() - started < 30
    conversations = [[{"role": "user", "content": record["question"]}] for record in records]
    expected = oracle.apply_chat_template(conversations, add_generation_prompt=True, return_dict=True)["input_ids"]
    short = [i for i, ids in enumerate(expected) if len(ids) <= 400]
    assert 0 < len(short) < len(records) == 7473
    assert [p.id for p in built.prompts] == [f"t.jsonl#{i}" for i in short]
    assert [list(p.tokens) for p in built.prompts] == [expected[i] for i in short]
    assert built.summary() == f"kept {len(short):,} of 7,473 prompts; {7473 - len(short):,} longer than data.max_prompt_tokens=400"
