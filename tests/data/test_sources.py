"""Records from every kind of source, and the one-line error of each bad one."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections import Counter
from decimal import Decimal
from pathlib import Path
from random import Random

import numpy
import pandas
import pyarrow
import pytest
from pyarrow import parquet

from megappo.data.cache import Cache
from megappo.data.prompt_rows import PromptRules, prompts_of
from megappo.data.prompts import PromptFormat, PromptSet
from megappo.data.reward_text import RewardText
from megappo.data.sources import Record, Source, open_source
from megappo.data.texts import DemonstrationRules, demonstrations_of
from megappo.data.tokenizers import load_tokenizer
from megappo.trainer.prepare.reward_parts import AnswerKey, require_answer
from scripts.arithmetic import train_tokenizer
from tests.data.tokenizer_files import write_hf_tokenizer


def read_all(spec: str) -> Source:
    """The source, read to its end."""
    source = open_source(spec)
    for batch in source.batches():
        list(source.records(spec, batch))
    return source


def read_records(spec: str) -> list[Record]:
    source = open_source(spec)
    return [record for batch in source.batches() for record, _ in source.records(spec, batch)]


RECORDS = [{"prompt": "a\u2028b", "answer": "1"}, {"prompt": [{"role": "user", "content": "é"}], "answer": "2"}]


def test_jsonl_is_split_at_line_feeds_only(tmp_path: Path) -> None:
    """U+2028 may stand unescaped in a JSON string, where str.splitlines would cut the record in two."""
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"prompt": "a\u2028b", "answer": "1"}\n\n{"prompt": [{"role": "user", "content": "é"}], "answer": "2"}\r\n', "utf-8"
    )
    assert read_records(str(file)) == RECORDS
    assert len(file.read_text("utf-8").splitlines()) == 4  # what splitting by str would see


def test_parquet_gives_the_same_records_with_nested_messages(tmp_path: Path) -> None:
    records = [{"prompt": [{"role": "user", "content": f"q{i}"}], "reward_model": {"ground_truth": str(i)}} for i in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    assert read_records(str(tmp_path / "a.parquet")) == records


@pytest.mark.parametrize(
    "content, says",
    [
        (b'{"a": 1}\n{"a": \n', "line 2 is not valid JSON"),
        (b'{"a": 1}\n\n[1]\n', "line 3 is a JSON list, not an object"),
        (b'{"a": "\xff"}\n', "line 1 is not valid JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_records(str(file))
    assert f"{file} {says}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec, says",
    [
        ("missing.jsonl", "data file missing.jsonl does not exist"),
        ("missing.parquet", "data file missing.parquet does not exist"),
        ("bad.parquet", "cannot be read as parquet"),
        ("data.csv", "neither a .jsonl nor a .parquet file"),
        ("no/such/folder", "does not exist and is not the name of a Hugging Face dataset"),
        ("name:subset", "must be a .jsonl or .parquet file, a dataset `name`, or `name:subset:split`"),
        ("name:subset:", "must be a .jsonl or .parquet file"),
    ],
)
def test_a_bad_source_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text("a,b\n")
    Path("bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError) as caught:
        read_records(spec)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_dataset_that_cannot_be_reached_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        ValueError, match=r"cannot load the Hugging Face dataset someone/nothing:main:train: .*; for a local file"
    ) as caught:
        read_records("someone/nothing:main:train")
    assert "\n" not in str(caught.value)


def test_a_dataset_is_read_by_name_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is not reachable from tests: what is asked of the datasets library is checked, with a real in-memory Dataset."""
    import datasets

    asked = []

    def load_dataset(*args: object, **kwargs: object) -> datasets.Dataset:
        asked.append((*args, kwargs))
        return datasets.Dataset.from_list([{"question": "q", "answer": "#### 1"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for spec in ("gsm8k", "openai/gsm8k:main:test", "openai/gsm8k::test"):
        assert read_records(spec) == [{"question": "q", "answer": "#### 1"}]
    assert asked == [
        ("gsm8k", None, {"split": "train"}),
        ("openai/gsm8k", "main", {"split": "test"}),
        ("openai/gsm8k", None, {"split": "test"}),
    ]


DEEP = "[" * 500 + "]" * 500
LINES = {
    "deep": ('{"a": ' + DEEP + "}", "line 2 is nested more than 100 levels deep"),
    "deeper than Python's own limit": ('{"a": ' + "[" * 100_000, "line 2 is nested more than 100 levels deep"),
    "nan": ('{"a": NaN}', "line 2 is not valid JSON: NaN is no number of JSON's"),
    "infinity": ('{"a": -Infinity}', "line 2 is not valid JSON: -Infinity is no number of JSON's"),
    "huge integer": ('{"a": ' + "9" * 5000 + "}", "line 2 is not valid JSON: Exceeds the limit"),
    "truncated": ('{"a": "b', "line 2 is not valid JSON: Unterminated string"),
    "nul": ("\0", "line 2 is not valid JSON"),
    "two records": ('{"a": 1}{"a": 2}', "line 2 is not valid JSON: Extra data"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_line_that_no_reader_should_take_is_named(tmp_path: Path, case: str) -> None:
    line, says = LINES[case]
    file = tmp_path / "bad.jsonl"
    file.write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(ValueError) as caught:
        read_all(str(file))
    assert f"{file} {says}" in str(caught.value) and "\n" not in str(caught.value)


def test_brackets_in_a_text_are_no_levels(tmp_path: Path) -> None:
    record = {"prompt": DEEP, "answer": [[[1]]] * 60}
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(record))
    assert read_records(str(file)) == [record]


def test_marks_and_line_ends_of_other_systems_are_read(tmp_path: Path) -> None:
    file = tmp_path / "windows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r\n\r\n{"a": 2}\r\n')
    source = open_source(str(file))
    read = [found for batch in source.batches() for found in source.records(str(file), batch)]
    assert read == [({"a": "é"}, 1), ({"a": 2}, 3)]


def test_another_encoding_is_named_with_the_way_out(tmp_path: Path) -> None:
    for encoding in ("utf-16", "utf-32", "latin-1"):
        file = tmp_path / f"{encoding}.jsonl"
        file.write_text('{"a": "é"}\n', encoding=encoding)
        with pytest.raises(ValueError, match=r"line 1 is not valid JSON: byte \d+ is not UTF-8; save it as UTF-8$"):
            read_all(str(file))


def test_what_is_no_readable_file_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ValueError, match="folder.jsonl is a directory"):
        read_all(str(tmp_path / "folder.jsonl"))
    (tmp_path / "secret.parquet").touch()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match="secret.parquet cannot be read: Permission denied$"):
        read_all(str(tmp_path / "secret.parquet"))


def test_the_hash_is_that_of_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n')
    assert read_all(str(file)).sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    parquet.write_table(pyarrow.Table.from_pylist([{"a": 1}]), tmp_path / "a.parquet")
    assert read_all(str(tmp_path / "a.parquet")).sha256 == hashlib.sha256((tmp_path / "a.parquet").read_bytes()).hexdigest()
    seen = []
    for records in ([{"a": 1, "b": 2}], [{"b": 2, "a": 1}], [{"a": 1, "b": 3}]):
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, records=records, **__: datasets.Dataset.from_list(records))
        seen.append(read_all("someone/data").sha256)
    assert seen[0] == seen[1] != seen[2]


def test_what_changes_no_record_of_a_jsonl_file_changes_no_hash(tmp_path: Path) -> None:
    """A copy of the data by git or an editor on another system must not end a run at its resume."""
    file, plain = tmp_path / "a.jsonl", b'{"a": "1"}\n{"a": "2"}\n'

    def sha256(content: bytes) -> str:
        file.write_bytes(content)
        return read_all(str(file)).sha256

    same = [plain.replace(b"\n", b"\r\n"), plain.rstrip(), b"\xef\xbb\xbf" + plain, b"\n" + plain + b" \n"]
    other = [plain.replace(b"2", b"3"), plain.replace(b'"1"', b'" 1"'), plain + b'{"a": "2"}\n', b'{"a": "2"}\n{"a": "1"}\n']
    assert {sha256(content) for content in same} == {sha256(plain)}
    assert len({sha256(content) for content in [plain, *other]}) == 5


def mutated(text: bytes, random: Random) -> bytes:
    """One or two edits: bytes changed, inserted, deleted, doubled, cut, or put in place of a telling token."""
    tokens = (b"NaN", b"null", b"\\ud800", b"\\u0000", b"[" * 300, b"1e999", b'"', b"{", b"}", b"\x00", b"\xff", b"9" * 5000, b"\n")
    data = bytearray(text)
    for _ in range(random.randint(1, 2)):
        start = random.randrange(len(data) + 1)
        end = min(len(data), start + random.randint(0, 8))
        kind = random.randrange(4)
        data[start:end] = (
            random.randbytes(end - start),
            random.choice(tokens),
            b"",
            bytes(data[start:end]) * 2,
        )[kind]
    return bytes(data)


@pytest.mark.slow
def test_mutated_data_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """Up to the prompts, as a run reads it."""
    tokenizer = load_tokenizer(train_tokenizer(tmp_path / "model"))
    rules, cache = PromptRules("prompt", "answer", PromptFormat(chat_template=False), 64), Cache(tmp_path / "cache")
    file, random, outcomes = tmp_path / "a.jsonl", Random(0), Counter()
    text = b"".join(b'{"prompt": "%d+1=", "answer": "%d", "more": {"a": [1, 2.5, true]}}\n' % (n, n + 1) for n in range(4))
    for _ in range(600):
        file.write_bytes(mutated(text, random))
        try:
            built = prompts_of(open_source(str(file)), tokenizer, rules, cache)
            outcomes["read"] += 1
            assert all(prompt.answer not in ("None", "nan", "inf") for prompt in built.prompts)
        except ValueError as error:
            outcomes["refused"] += 1
            assert str(file) in str(error) and "\n" not in str(error), error
            assert not isinstance(error, UnicodeError)  # a library's own words
    assert min(outcomes["read"], outcomes["refused"]) > 25, outcomes


def answers_of(spec: str, root: Path, answer_key: str = "answer") -> list[str]:
    """The texts that the rewards get for the answers of a file."""
    return [prompt.answer for prompt in answered(spec, root, answer_key).prompts]


def answered(spec: str, root: Path, answer_key: str = "answer") -> PromptSet:
    """Prompts of a file, tokenised character by character."""
    rules = PromptRules("prompt", answer_key, PromptFormat(chat_template=False), max_prompt_tokens=99)
    tokenizer = load_tokenizer(train_tokenizer(root / "char"))
    return prompts_of(open_source(spec), tokenizer, rules, Cache(root / "cache"))


def test_a_number_of_json_is_the_answer_as_it_is_written(tmp_path: Path) -> None:
    written = [
        "0.00001",
        "1e5",
        "1E-7",
        "72.0",
        "2.50",
        "0.1",
        "-3",
        "100000000000000000000000",
        "12345678901234567890.123",
        "true",
        "false",
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"prompt": "1=", "answer": {text}, "n": 0.50}}\n' for text in written), "utf-8")
    assert answers_of(str(file), tmp_path) == written
    [first, *_] = read_records(str(file))
    assert first == {"prompt": "1=", "answer": 1e-5, "n": 0.5} and json.dumps(first["n"]) == "0.5"
    assert type(pickle.loads(pickle.dumps(first["n"]))) is float, "a reward in another process gets plain numbers"


@pytest.mark.parametrize(
    "kind, values, texts",
    [
        ("int64", [72, -1], ["72", "-1"]),
        (
            "double",
            [72.0, 0.1, 1e-5, 1e22, 2.5],
            ["72", "0.1", "0.00001", "1" + 22 * "0", "2.5"],
        ),  # pandas: int with a missing value
        ("float", [72.0, 0.1, 1e-5, 16777216.0], ["72", "0.1", "0.00001", "16777216"]),
        ("halffloat", [0.1, 2.0], ["0.1", "2"]),
        ("bool", [True, False], ["true", "false"]),
        ("decimal", ["72.00", "0.10", "0.0000001"], ["72.0000000", "0.1000000", "0.0000001"]),
    ],
)
def test_a_number_of_parquet_is_the_answer_in_digits(tmp_path: Path, kind: str, values: list, texts: list[str]) -> None:
    if kind == "decimal":
        column = pyarrow.array([Decimal(value) for value in values], pyarrow.decimal128(20, 7))
    elif kind == "halffloat":
        column = pyarrow.array(numpy.array(values, numpy.float16))
    else:
        column = pyarrow.array(values, pyarrow.type_for_alias(kind))
    nested = pyarrow.StructArray.from_arrays([column], ["value"])
    table = pyarrow.table({"prompt": ["1="] * len(values), "answer": column, "deep": nested})
    parquet.write_table(table, tmp_path / "a.parquet")
    for key in ("answer", "deep.value"):
        assert answers_of(str(tmp_path / "a.parquet"), tmp_path, key) == texts


def test_an_int_column_with_a_missing_value_gives_integers(tmp_path: Path) -> None:
    column = pyarrow.array([72, None], pyarrow.int64())
    parquet.write_table(pyarrow.table({"prompt": ["1=", "2="], "answer": column}), tmp_path / "a.parquet")
    found = answered(str(tmp_path / "a.parquet"), tmp_path)
    assert [prompt.answer for prompt in found.prompts] == ["72", ""] and list(found.unanswered) == [1]
    with pytest.raises(ValueError, match="a.parquet#1 holds null, not a string or a number"):
        require_answer(found[1], AnswerKey("answer"), "exact_match")
    frame = pandas.DataFrame({"prompt": ["1=", "2="], "answer": [72, None]})  # its column of integers is one of doubles now
    frame.dropna().to_parquet(tmp_path / "b.parquet")
    assert answers_of(str(tmp_path / "b.parquet"), tmp_path) == ["72"]


CALL = {"function": {"name": "f", "arguments": {"x": 1}}}
CONVERSATION = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "tool_calls": [CALL, {"function": {"name": "g", "arguments": {"y": [None, 2]}}}]},
    {"role": "user", "content": "c", "name": "bob"},
]
"""No two messages have the same keys, so that the columns of parquet pad each with nulls."""
SHOWS_KEYS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}{% if 'name' in m %} name={{ m['name'] }}{% endif %}"
    "{% if 'tool_calls' in m %}{% for c in m['tool_calls'] %} {{ c['function']['arguments'] | tojson }}{% endfor %}{% endif %}"
    "\n{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_nulls_with_which_parquet_pads_messages_are_no_keys(tmp_path: Path) -> None:
    record = {"prompt": CONVERSATION, "answer": "x", "deep": {"chat": CONVERSATION, "style": None}, "chats": [CONVERSATION]}
    parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    assert parquet.read_table(tmp_path / "a.parquet").to_pylist() != [record], "the file has them"
    assert read_records(str(tmp_path / "a.parquet")) == [record], "a null beside messages stays"


def test_a_null_of_a_message_in_json_is_no_key_and_those_of_its_values_stay(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"x": None}}}
    message = {"role": "user", "content": "null", "tool_calls": [call]}
    line = {"prompt": [{**message, "name": None}], "answer": None, "deep": {"chat": [{**message, "name": None}]}}
    (tmp_path / "a.jsonl").write_text(json.dumps(line), "utf-8")
    assert read_records(str(tmp_path / "a.jsonl")) == [{"prompt": [message], "answer": None, "deep": {"chat": [message]}}]


def test_a_template_does_not_see_padding_in_prompts_demonstrations_and_reward_texts(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": CONVERSATION, "answer": "x"}]), tmp_path / "a.parquet")
    tokenizer = load_tokenizer(write_hf_tokenizer(tmp_path / "hf", chat_template=SHOWS_KEYS))
    form, source = PromptFormat(), open_source(str(tmp_path / "a.parquet"))
    [prompt] = prompts_of(source, tokenizer, PromptRules("prompt", "answer", form, 999), Cache(tmp_path / "cache"))
    expected = tokenizer.chat(CONVERSATION)
    assert list(prompt.tokens) == expected and "None" not in tokenizer.decode(expected)
    rules = DemonstrationRules("prompt", "answer", form, 999)
    [shown] = demonstrations_of(source, tokenizer, rules, Cache(tmp_path / "cache"))
    assert list(shown.tokens[: shown.prompt_length]) == expected
    scored = RewardText(tokenizer, True, "prompt", form, None, 999).encode(prompt, "x")
    assert scored == tokenizer.conversation([*CONVERSATION, {"role": "assistant", "content": "x"}])
