"""Encoding by several processes: what one process would give, in order, and one error for what goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megappo.data import demonstrations, encoding, prompt_rows
from megappo.data.arithmetic import train_tokenizer
from megappo.data.cache import Cache
from megappo.data.demonstrations import DemonstrationRules, demonstrations_of
from megappo.data.encoding import encode_all
from megappo.data.prompt_rows import PromptRules, prompts_of
from megappo.data.prompt_rows import _encode as encode
from megappo.data.prompts import PromptFormat
from megappo.data.sources import open_source
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from tests.data.test_prompt_rows import records, typed, write_jsonl, write_parquet
from tests.data.tokenizer_files import write_hf_tokenizer

ROOT = Path(__file__).parents[2]
COUNT = 150
PLAIN = PromptFormat(chat_template=False)
RULES = PromptRules("prompt", "answer", PLAIN, 6)
HALF = {"prompt": "\ud800", "answer": 1}  # refused when it is encoded, other faults when the record is read


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes from the 40th record on, seven batches and a part of one; tests are a module of the processes too."""
    monkeypatch.setattr(encoding, "ALONE", 40)
    monkeypatch.setattr(encoding, "BATCH", 15)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="module")
def char(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_tokenizer(tmp_path_factory.mktemp("char")))


def processes(monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Have prompts and demonstrations use so many; returns the ids of those that will be started."""
    started: list[int] = []
    for module in (prompt_rows, demonstrations):
        monkeypatch.setattr(module, "usable_processes", lambda: count)
    start = encoding._Process.__init__

    def noted(self: Any, *args: Any) -> None:
        start(self, *args)
        started.append(self._process.pid)

    monkeypatch.setattr(encoding._Process, "__init__", noted)
    return started


def files_of(root: Path) -> dict[str, bytes]:
    """Everything in the cache but times of use."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.glob("rows/*/*"))}


def conversations(count: int) -> list[dict[str, Any]]:
    return [{**one, "prompt": [{"role": "user", "content": one["prompt"]}]} for one in records(count)]


def prompts_into(root: Path, spec: str, tokenizer: Tokenizer, rules: PromptRules) -> None:
    prompts_of(open_source(spec), tokenizer, rules, Cache(root))


def demonstrations_into(root: Path, spec: str, tokenizer: Tokenizer, rules: DemonstrationRules) -> None:
    demonstrations_of(open_source(spec), tokenizer, rules, Cache(root))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", pytest.param("template", marks=pytest.mark.slow), "demonstrations"])
def test_several_processes_write_the_bytes_that_one_writes(
    tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    lines = [{**one, "response": "1" * (n % 3)} for n, one in enumerate(records(COUNT))]
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
    alone = processes(monkeypatch, 1)
    into(tmp_path / "one")
    assert not alone
    started = processes(monkeypatch, 2)
    into(tmp_path / "two")
    assert len(started) == 2
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two") and len(files_of(tmp_path / "one")) == 5


def test_small_files_and_limits_start_no_process(tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    started = processes(monkeypatch, 2)
    prompts_into(tmp_path, write_jsonl(tmp_path / "a.jsonl", records(40)), char, RULES)
    longer = records(60) + [{"prompt": 7, "answer": 1}]
    prompts_into(tmp_path, write_jsonl(tmp_path / "b.jsonl", longer), char, replace(RULES, limit=5))  # the bad one is beyond it
    assert not started


@pytest.mark.parametrize(
    "bad, message",
    [
        ({100: HALF, 101: HALF}, "#100 .* surrogate pair"),
        ({100: HALF, 149: {"answer": 1}}, "#100 .* surrogate pair"),
        ({100: {"prompt": "1"}, 149: HALF}, "data.answer_key=answer: .*#100 .* has no such key"),
    ],
)
def test_the_first_bad_record_is_the_one_that_is_told(
    tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch, bad: dict[int, Any], message: str
) -> None:
    """Whether it is seen here or in a process; nothing is left."""
    started = processes(monkeypatch, 2)
    lines = [bad.get(n, one) for n, one in enumerate(records(COUNT))]
    with pytest.raises(ValueError, match=message):
        prompts_into(tmp_path / "cache", write_jsonl(tmp_path / "a.jsonl", lines), char, RULES)
    assert not files_of(tmp_path / "cache") and len(started) == 2
    assert_ended(started)


def assert_ended(pids: list[int]) -> None:
    """In time: a process of this one that was waited for is gone at once."""
    ends = time.monotonic() + 20
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < ends, left
        time.sleep(0.05)


def killing(rules: PromptRules, tokenizer: Tokenizer, item: tuple[str, str]) -> Any:
    if item[0] == "1" * 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(rules, tokenizer, item)


def test_a_process_that_dies_is_one_error_and_leaves_no_entry(
    tmp_path: Path, char: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = processes(monkeypatch, 2)
    monkeypatch.setattr(prompt_rows, "_encode", killing)
    lines = records(COUNT)
    lines[120]["prompt"] = "1" * 5
    spec = write_jsonl(tmp_path / "a.jsonl", lines)
    with pytest.raises(RuntimeError, match=r"^data: process \d+, which encoded records, died of SIGKILL; .* start again$"):
        prompts_into(tmp_path / "cache", spec, char, RULES)
    assert not files_of(tmp_path / "cache") and not [f for f in (tmp_path / "cache" / "rows").iterdir() if f.is_dir()]
    assert_ended(started)
    monkeypatch.undo()
    prompts_into(tmp_path / "cache", spec, char, RULES)
    assert len(files_of(tmp_path / "cache")) == 5


def test_another_tokenizer_under_the_same_path_is_refused(tmp_path: Path, char: Tokenizer) -> None:
    class Other:
        path = char.path
        encode_prompt = char.encode_prompt

        def identity(self) -> dict[str, str]:
            return {"files": "others"}

    other: Any = Other()
    jobs = ((n, ("1", "name")) for n in range(COUNT))
    with pytest.raises(RuntimeError, match="ended with code 1: the tokenizer .* was changed while it was used"):
        list(encode_all(jobs, partial(encode, RULES), other, 2))


SLOW = """
import sys
from pathlib import Path
from megappo.data import encoding, prompt_rows
from megappo.data.tokenizers import load_tokenizer
from megappo.data.prompt_rows import _encode
from tests.data.test_encoding import RULES, endless
from functools import partial
encoding.ALONE, encoding.BATCH = 40, 15
start = encoding._Process.__init__
def noted(self, *args):
    start(self, *args)
    print(self._process.pid, flush=True)
encoding._Process.__init__ = noted
for n, _ in encoding.encode_all(endless(), partial(_encode, RULES), load_tokenizer(sys.argv[1]), 2):
    if n % 1000 == 0:
        print("at", n, flush=True)
"""


def endless() -> Iterator[tuple[int, tuple[str, str]]]:
    n = 0
    while True:
        n += 1
        yield n, ("1" * (1 + n % 4), "name")


def test_a_request_to_stop_ends_no_process_but_the_end_of_their_rank_does(char: Tokenizer) -> None:
    command = [sys.executable, "-c", SLOW, str(char.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as rank:
        assert rank.stdout is not None
        pids = [int(rank.stdout.readline()) for _ in range(2)]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        assert [rank.stdout.readline() for _ in range(3)] == ["at 1000\n", "at 2000\n", "at 3000\n"]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        rank.kill()
    assert_ended(pids)
