"""Rows by several processes: what one process would make, in order, and one error for what goes wrong."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from megappo.data import prompt_rows, rows, sources
from megappo.data.cache import Cache
from megappo.data.prompt_rows import PromptRules, prompts_of
from megappo.data.prompt_rows import _encode as encode
from megappo.data.prompts import PromptFormat
from megappo.data.rows import Rows
from megappo.data.sources import open_source
from megappo.data.texts import DemonstrationRules, demonstrations_of
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from scripts.arithmetic import train_tokenizer
from tests.data.test_prompt_rows import records, typed, write_jsonl, write_parquet
from tests.data.tokenizer_files import write_hf_tokenizer

ROOT = Path(__file__).parents[2]
COUNT = 150
PLAIN = PromptFormat(chat_template=False)
RULES = PromptRules("prompt", "answer", PLAIN, 6)
HALF = {"prompt": "\ud800", "answer": 1}  # refused when it is encoded, other faults when the record is read


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes from 41 records on, fifteen batches of ten; tests are a module of the processes too."""
    monkeypatch.setattr(rows, "ALONE", 40)
    monkeypatch.setattr(sources, "BLOCK", 10)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="module")
def char(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("char")))


def processes(monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Have rows made by so many, 0 for this one; returns a number for each time that others are started."""
    started, elsewhere = [], rows._encode_elsewhere
    monkeypatch.setattr(rows, "ALONE", 40 if count else 10**9)
    monkeypatch.setattr(rows, "usable_processes", lambda: count)
    monkeypatch.setattr(rows, "_encode_elsewhere", lambda *job: started.append(count) or elsewhere(*job))
    return started


def rows_in(root: Path) -> list[Any]:
    """All rows of the one entry, with their records, and its facts."""
    [folder] = [file.parent for file in root.glob("data/*/facts.json")]
    source = open_source(str(next(root.parent.glob("a.*"))))
    found = Rows(folder, source)
    assert [found[i]._replace(tokens=list(found[i].tokens)) for i in range(len(found))] == list(found)
    return [(row, found.record_of(row)) for row in found] + [found.lengths.tolist(), found.facts]


def conversations(count: int) -> list[dict[str, Any]]:
    return [{**one, "prompt": [{"role": "user", "content": one["prompt"]}]} for one in records(count)]


def prompts_into(root: Path, spec: str, tokenizer: Tokenizer, rules: PromptRules) -> None:
    prompts_of(open_source(spec), tokenizer, rules, Cache(root))


def demonstrations_into(root: Path, spec: str, tokenizer: Tokenizer, rules: DemonstrationRules) -> None:
    demonstrations_of(open_source(spec), tokenizer, rules, Cache(root))


@pytest.mark.parametrize(
    "kind", ["jsonl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("parquet", "template", "demonstrations"))]
)
def test_several_processes_make_the_rows_that_one_makes(
    tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    lines = [{**one, "response": "1" * (n % 3 or 1)} for n, one in enumerate(records(COUNT))]
    into: Callable[[Path], None] = partial(prompts_into, spec="", tokenizer=char, rules=RULES)
    if kind == "parquet":
        into = partial(into, spec=write_parquet(tmp_path / "a.parquet", typed(COUNT)))
    elif kind == "template":
        rules = replace(RULES, format=PromptFormat(), max_prompt_tokens=40)
        tokenizer = load_tokenizer(write_hf_tokenizer(tmp_path / "hf"))
        into = partial(into, spec=write_jsonl(tmp_path / "a.jsonl", conversations(COUNT)), tokenizer=tokenizer, rules=rules)
    elif kind == "demonstrations":
        rules = DemonstrationRules("prompt", "response", PLAIN, 9)
        into = partial(demonstrations_into, spec=write_jsonl(tmp_path / "a.jsonl", lines), tokenizer=char, rules=rules)
    else:
        into = partial(into, spec=write_jsonl(tmp_path / "a.jsonl", lines))
    counts = (0, 1, 2) if kind == "jsonl" else (0, 2)
    for count in counts:
        started = processes(monkeypatch, count)
        into(tmp_path / str(count))
        assert started == [count] * bool(count)
    expected = rows_in(tmp_path / "0")
    assert len(expected) > COUNT / 2 and all(rows_in(tmp_path / str(count)) == expected for count in counts)


def test_small_files_and_limits_start_no_process(tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    started = processes(monkeypatch, 2)
    prompts_into(tmp_path, write_jsonl(tmp_path / "a.jsonl", records(40)), char, RULES)
    longer = records(60) + [{"prompt": 7, "answer": 1}]
    prompts_into(tmp_path, write_jsonl(tmp_path / "b.jsonl", longer), char, replace(RULES, limit=5))  # the bad one is beyond it
    assert not started


def helpers() -> list[psutil.Process]:
    """Processes that prepare data, of this one: others are of a server that forks ranks for other tests."""
    return [
        child for child in psutil.Process().children(recursive=True) if any("helper_process" in word for word in child.cmdline())
    ]


@pytest.mark.parametrize(
    "bad, message",
    [
        ({100: HALF, 101: HALF}, "#100 .* surrogate pair"),
        ({100: HALF, 149: {"answer": 1}}, "#100 .* surrogate pair"),
        ({60: {"answer": "1"}, 149: HALF}, "data.prompt_key=prompt: .*#60 .* has no such key"),
    ],
)
@pytest.mark.slow
def test_the_first_bad_record_is_the_one_that_is_told(
    tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch, bad: dict[int, Any], message: str
) -> None:
    """Whichever process sees it; nothing is left."""
    started = processes(monkeypatch, 2)
    lines = [bad.get(n, one) for n, one in enumerate(records(COUNT))]
    with pytest.raises(ValueError, match=message):
        prompts_into(tmp_path / "cache", write_jsonl(tmp_path / "a.jsonl", lines), char, RULES)
    assert not [path for path in tmp_path.glob("cache/data/*") if path.is_dir()] and started
    assert not helpers()


def killing(tokenizer: Tokenizer, rules: PromptRules, images: None, record: Any, name: str) -> Any:
    if record["prompt"] == "1" * 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(tokenizer, rules, images, record, name)


@pytest.mark.slow
def test_a_process_that_dies_is_one_error_and_leaves_no_entry(
    tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_rows, "_encode", killing)
    lines = records(COUNT)
    lines[120]["prompt"] = "1" * 5
    spec = write_jsonl(tmp_path / "a.jsonl", lines)
    for count in (1, 2):
        processes(monkeypatch, count)
        with pytest.raises(RuntimeError, match=r"^data: .*(SIGKILL|died).*; start again$"):
            prompts_into(tmp_path / "cache", spec, char, RULES)
        assert not [path for path in tmp_path.glob("cache/data/*") if path.is_dir()]
        assert not helpers()
    monkeypatch.undo()
    prompts_into(tmp_path / "cache", spec, char, RULES)


SLOW = """
import sys
from functools import partial
from pathlib import Path
from megappo.data import prompt_rows, rows, sources
from megappo.data.tokenizers import load_tokenizer
from tests.data.test_rows import RULES, prompts_into, waiting
rows.ALONE, sources.BLOCK, prompt_rows._encode, rows.usable_processes = 40, 10, waiting, lambda: 2
prompts_into(Path(sys.argv[1]), sys.argv[2], load_tokenizer(sys.argv[3]), RULES)
"""


def waiting(tokenizer: Tokenizer, rules: PromptRules, images: None, record: Any, name: str) -> Any:
    time.sleep(600)
    return encode(tokenizer, rules, images, record, name)


@pytest.mark.slow
def test_processes_end_with_their_rank(tmp_path: Path, char: Tokenizer) -> None:
    spec = write_jsonl(tmp_path / "a.jsonl", records(COUNT))
    rank = psutil.Popen([sys.executable, "-c", SLOW, str(tmp_path / "cache"), spec, str(char.path)], cwd=ROOT)
    ends = time.monotonic() + 60
    while len(others := rank.children(recursive=True)) < 4:  # the one that divides, its two, and their queue's
        assert time.monotonic() < ends and rank.poll() is None
        time.sleep(0.05)
    rank.kill()
    rank.wait()
    assert not psutil.wait_procs(others, timeout=60)[1]
