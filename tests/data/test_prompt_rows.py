"""Prompts of mapped rows: those that a list in memory would hold, for every kind of source; tokenised again when they must be."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megappo.data import prompt_rows
from megappo.data.cache import Cache
from megappo.data.prompt_rows import PromptRules, prompts_of
from megappo.data.prompts import PromptFormat, PromptSet
from megappo.data.sources import open_source
from megappo.data.texts import DemonstrationRules, demonstrations_of
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from scripts.arithmetic import train_tokenizer
from tests.data.tokenizer_files import write_hf_tokenizer

PLAIN = PromptFormat(chat_template=False)
RULES = PromptRules("prompt", "answer", PLAIN, 6)


@pytest.fixture(scope="module")
def char(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("char")))


def records(count: int) -> list[dict[str, Any]]:
    """Every fifth is too long; values that JSON lacks come with `typed`."""
    return [{"prompt": "1" * (9 if n % 5 == 0 else 1 + n % 4), "answer": n, "meta": {"n": n}} for n in range(count)]


def typed(count: int) -> list[dict[str, Any]]:
    day = datetime.datetime(2026, 1, 1)
    extra = [{"at": day + datetime.timedelta(n), "price": decimal.Decimal(n) / 4, "raw": bytes([n % 256])} for n in range(count)]
    return [{**one, **more} for one, more in zip(records(count), extra)]


def write_jsonl(file: Path, lines: list[dict[str, Any]]) -> str:
    file.write_text("\n".join(json.dumps(one) + "\n" for one in lines))  # blank lines between them
    return str(file)


def write_parquet(file: Path, lines: list[dict[str, Any]]) -> str:
    table = pyarrow.Table.from_pylist(lines)
    labels = pyarrow.array(["a" if n % 2 else "b" for n in range(len(lines))]).dictionary_encode()
    parquet.write_table(table.append_column("label", labels), file, row_group_size=50)
    return str(file)


def prompts(spec: str, tokenizer: Tokenizer, root: Path, rules: PromptRules = RULES) -> PromptSet:
    return prompts_of(open_source(spec), tokenizer, rules, Cache(root))


def held_against(built: PromptSet, spec: str, lines: list[dict[str, Any]], tokenizer: Tokenizer, has_lines: bool) -> None:
    kept = [n for n in range(len(lines)) if n % 5]
    assert [p.id for p in built.prompts] == [f"{spec}#{n}" for n in kept]
    assert [p.tokens for p in built.prompts] == [tuple(tokenizer.encode_prompt(lines[n]["prompt"])) for n in kept]
    assert [p.text for p in built.prompts] == [lines[n]["prompt"] for n in kept]
    assert [p.answer for p in built.prompts] == [str(n) for n in kept]
    assert [p.line for p in built.prompts] == [2 * n + 1 if has_lines else None for n in kept]
    assert (built.num_records, built.num_overlong) == (len(lines), len(lines) - len(kept))
    in_memory = PromptSet(tuple(built.prompts), built.num_records, built.num_overlong, 6)
    assert in_memory.identities() == built.identities()


def test_prompts_of_jsonl_are_those_of_its_records(tmp_path: Path, char: Tokenizer) -> None:
    lines = records(200)
    spec = write_jsonl(tmp_path / "a.jsonl", lines)
    for _ in range(2):
        built = prompts(spec, char, tmp_path / "cache")
        held_against(built, spec, lines, char, has_lines=True)
        assert [p.record for p in built.prompts] == [one for n, one in enumerate(lines) if n % 5]


def test_prompts_of_parquet_keep_the_types_of_their_records(tmp_path: Path, char: Tokenizer) -> None:
    lines = typed(200)
    spec = write_parquet(tmp_path / "a.parquet", lines)
    for _ in range(2):
        built = prompts(spec, char, tmp_path / "cache")
        held_against(built, spec, lines, char, has_lines=False)
        labelled = [{**one, "label": "a" if n % 2 else "b"} for n, one in enumerate(lines)]
        assert [p.record for p in built.prompts] == [one for n, one in enumerate(labelled) if n % 5]


def test_prompts_are_indexed_as_a_tuple_is(tmp_path: Path, char: Tokenizer) -> None:
    built = prompts(write_jsonl(tmp_path / "a.jsonl", records(9)), char, tmp_path / "cache").prompts
    whole = tuple(built)
    assert (built[0], built[-1], list(built[1:3])) == (whole[0], whole[-1], list(whole[1:3])) and len(built) == len(whole)
    assert built[0] in built and list(reversed(built)) == list(reversed(whole))
    for index in (len(built), -len(built) - 1):
        with pytest.raises(IndexError):
            built[index]


def count_tokenising(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done, encode = [], prompt_rows.encode_prompt
    monkeypatch.setattr(prompt_rows, "encode_prompt", lambda *a: done.append(a[-1]) or encode(*a))
    return done


def test_prompts_are_tokenised_again_when_anything_that_decides_them_changes(
    tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, root = count_tokenising(monkeypatch), tmp_path / "cache"
    spec = write_jsonl(tmp_path / "a.jsonl", records(9))
    prompts(spec, char, root)
    other = load_tokenizer(train_tokenizer(tmp_path / "other", "0123456789+-*=x"))
    suffix = PromptRules("prompt", "answer", PromptFormat(chat_template=False, prompt_suffix="="), 6)
    longer, fewer = PromptRules("prompt", "answer", PLAIN, 7), PromptRules("prompt", "answer", PLAIN, 6, limit=2)
    changed: list[tuple[Tokenizer, PromptRules]] = [(other, RULES), (char, suffix), (char, longer), (char, fewer)]
    for tokenizer, rules in changed:
        for is_first in (True, False):
            done.clear()
            prompts(spec, tokenizer, root, rules)
            assert bool(done) == is_first, rules
    done.clear()
    moved = (tmp_path / "b.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes()) and str(tmp_path / "b.jsonl")
    assert prompts(moved, char, root)[0].id == f"{moved}#1" and not done  # the same content elsewhere
    write_jsonl(tmp_path / "a.jsonl", records(10))
    assert prompts(spec, char, root).num_records == 10 and done
    done.clear()
    monkeypatch.setattr("megappo.data.rows.hash_of_modules", lambda *_: "edited")
    prompts(spec, char, root)
    assert done


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    file, encode = tmp_path / "a.jsonl", prompt_rows.encode_prompt
    write_jsonl(file, records(9))

    def appending(*arguments: Any) -> list[int]:
        with file.open("a") as more:
            more.write("\n")
        return encode(*arguments)

    monkeypatch.setattr(prompt_rows, "encode_prompt", appending)
    with pytest.raises(ValueError, match="a.jsonl was changed while it was read"):
        prompts(str(file), char, tmp_path / "cache")


def test_a_refused_source_is_refused_again(tmp_path: Path, char: Tokenizer) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "1", "answer": "2"}\n{"prompt": null, "answer": "2"}\n')
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a.jsonl#1 \(line 2\) holds null"):
            prompts(str(file), char, tmp_path / "cache")


def test_a_dataset_is_kept_by_its_files_and_its_choice_of_rows(
    tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    datasets.Dataset.from_list(records(100)).save_to_disk(tmp_path / "saved")
    whole = datasets.Dataset.load_from_disk(str(tmp_path / "saved"))
    slices = {"train": whole, "train[10%]": whole.select(range(10))}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split: slices[split])
    for split, count in (("train", 100), ("train[10%]", 10), ("train", 100)):
        built = prompts(f"name::{split}", char, tmp_path / "cache")
        assert built.num_records == count and [p.record for p in built.prompts] == [
            r for n, r in enumerate(records(count)) if n % 5
        ]
    assert len(list((tmp_path / "cache").glob("data/*/facts.json"))) == 2


def test_a_template_that_writes_the_day_is_tokenised_each_day(tmp_path: Path) -> None:
    folder = write_hf_tokenizer(tmp_path / "t")
    assert "day" not in load_tokenizer(folder).identity()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config["chat_template"] = "{{ strftime_now('%d') }}{{ messages[0].content }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).identity()["day"] == str(datetime.date.today())


def test_the_same_files_beside_another_model_are_another_tokenizer(tmp_path: Path) -> None:
    """transformers takes the class from config.json, and Qwen2's splits numbers into digits whatever the files say."""
    made = {}
    for kind in ("qwen2", "qwen3", "llama"):
        folder = write_hf_tokenizer(tmp_path / kind)
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        made[kind] = load_tokenizer(folder)
    text = "now 12345"
    assert made["qwen2"].encode(text) != made["qwen3"].encode(text) == made["llama"].encode(text)
    assert made["qwen2"].fingerprint == made["qwen3"].fingerprint
    assert made["qwen2"].identity() != made["qwen3"].identity() == made["llama"].identity()


def test_demonstrations_are_read_again_from_their_rows(tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"prompt": "1" * (1 + n % 3), "answer": "2" * (1 + n % 2)} for n in range(20)]
    spec, rules = write_jsonl(tmp_path / "a.jsonl", lines), DemonstrationRules("prompt", "answer", PLAIN, 6)
    first = demonstrations_of(open_source(spec), char, rules, Cache(tmp_path / "cache"))
    monkeypatch.setattr("megappo.data.texts.encode_prompt", None)
    second = demonstrations_of(open_source(spec), char, rules, Cache(tmp_path / "cache"))
    assert [second[i] for i in range(len(second))] == [first[i] for i in range(len(first))]
    assert first[3].tokens == (*char.encode_prompt("1"), *char.encode("22"), char.eos_id) and first[3].prompt_length == 2
    with pytest.raises(IndexError):
        first[len(first)]
