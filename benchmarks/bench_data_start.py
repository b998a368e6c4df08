#!/usr/bin/env python
"""Time the start of a run up to its first prompts: python benchmarks/bench_data_start.py [--prompts N,...] [--folder DIR]

For a .jsonl and a .parquet file of short sums: all records and prompts in memory, as every rank had them before the cache; the
first start with a cache, which tokenises; and the second. Each is a process of its own. memory: growth of what the process alone
holds; mapped: growth of the pages of files, which all ranks of a node share. Both are read after a step's prompts were made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megappo.data.cache import Cache
from megappo.data.loader import PromptLoader
from megappo.data.prompt_rows import PromptRules, prompts_of
from megappo.data.prompts import Prompt, PromptFormat, PromptSet, answer_field, encode_question, question_field
from megappo.data.sources import Record, open_source
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from megappo.telemetry.tables import table
from scripts.arithmetic import train_tokenizer

MODES = ("in memory", "first start", "second start")
RULES = PromptRules("prompt", "answer", PromptFormat(chat_template=False), max_prompt_tokens=64)
PROMPTS_PER_STEP = 1024
HEADER = ("prompts", "file", "start", "seconds", "memory MiB", "mapped MiB", "on disk MiB")
MIB = 1 << 20


def load_into_memory(spec: str, tokenizer: Tokenizer) -> PromptSet:
    """Every record and prompt as an object: what each rank did at each start before."""
    records, sha256 = _read_parquet(spec) if spec.endswith(".parquet") else _read_jsonl(spec)
    made = []
    for row, record in enumerate(records):
        question = question_field(record, "prompt", "data.prompt_key", spec)
        tokens = tuple(encode_question(question, tokenizer, RULES.format, spec))
        assert isinstance(question, str)
        made.append(Prompt(f"{spec}#{row}", tokens, question, answer_field(record, "answer", spec), record))
    return PromptSet(tuple(made), len(made), 0, RULES.max_prompt_tokens, sha256)


def _read_jsonl(spec: str) -> tuple[list[Record], str]:
    source = open_source(spec)
    return [record for batch in source.batches() for record, _ in source.records(spec, batch)], source.sha256


def _read_parquet(spec: str) -> tuple[list[Record], str]:
    """In one piece: small blocks, as the cache keeps them, would take longer."""
    import pyarrow
    from pyarrow import parquet

    content = Path(spec).read_bytes()
    return parquet.read_table(pyarrow.BufferReader(content)).to_pylist(), hashlib.sha256(content).hexdigest()


def load_by_cache(spec: str, tokenizer: Tokenizer) -> PromptSet:
    return prompts_of(open_source(spec), tokenizer, RULES, Cache())


def measure(spec: str, tokenizer_path: str, load: Callable[[str, Tokenizer], PromptSet]) -> dict[str, Any]:
    """Seconds and memory of one start in this process, and a digest of its first prompts."""
    if spec.endswith(".parquet"):
        from pyarrow import parquet  # noqa: F401  its import is no part of the start
    tokenizer, before = load_tokenizer(tokenizer_path), _resident()
    started = time.perf_counter()
    prompts = load(spec, tokenizer)
    identities = prompts.identities()
    loader = PromptLoader(len(prompts), PROMPTS_PER_STEP, True, 0)
    step = [prompts[index] for index in loader.next_step()]
    seconds, after = time.perf_counter() - started, _resident()
    growth = {name: (after[name] - before[name]) / MIB for name in before}
    return {"seconds": seconds, **growth, "same": [identities, [(p.id, p.tokens, p.answer) for p in step[:8]]]}


def _resident() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    return {name: int(re.findall(rf"Rss{name}:\s+(\d+)", status)[0]) * 1024 for name in ("Anon", "File")}


def write_data(file: Path, count: int) -> Path:
    """{prompt, answer, meta} records, as a file of its suffix."""
    step = 100_000
    records = lambda start: [  # noqa: E731
        {"prompt": f"{n}+{n % 97}=", "answer": str(n + n % 97), "meta": {"source": "sums", "n": n}}
        for n in range(start, min(count, start + step))
    ]
    if file.suffix == ".jsonl":
        with file.open("w") as out:
            for start in range(0, count, step):
                out.writelines(json.dumps(record) + "\n" for record in records(start))
        return file
    import pyarrow
    from pyarrow import parquet

    first = pyarrow.Table.from_pylist(records(0))
    with parquet.ParquetWriter(file, first.schema) as writer:
        for start in range(0, count, step):
            writer.write_table(pyarrow.Table.from_pylist(records(start), schema=first.schema))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", default="100000,1000000", help="comma-separated numbers of prompts")
    parser.add_argument("--folder", help="for the data and the cache, which are removed; default: a temporary one")
    parser.add_argument("--files", default="jsonl,parquet", help="comma-separated kinds of files")
    parser.add_argument("--only-cache", action="store_true", help="leave out the start in memory, which takes 1.2 KB a prompt")
    parser.add_argument("--child", nargs=3, metavar=("MODE", "SPEC", "TOKENIZER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        mode, spec, tokenizer = args.child
        in_memory = mode == MODES[0]
        print(json.dumps(measure(spec, tokenizer, load_into_memory if in_memory else load_by_cache)))
        return
    rows: list[tuple[str, ...]] = []
    for count in map(int, args.prompts.split(",")):
        for kind in args.files.split(","):
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                rows += _rows_of(Path(folder), kind, count, MODES[1:] if args.only_cache else MODES)
                print("\n".join(table(HEADER, rows, left=3)), flush=True)


def _rows_of(folder: Path, kind: str, count: int, modes: Sequence[str]) -> list[tuple[str, ...]]:
    file, tokenizer = write_data(folder / f"prompts.{kind}", count), train_tokenizer(folder)
    time.sleep(2.5)  # a younger file is hashed at every start
    environment = {**os.environ, "MEGAPPO_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    rows, same = [], None
    for mode in modes:
        command = [sys.executable, __file__, "--child", mode, str(file), str(tokenizer)]
        found = json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)
        same = same or found["same"]
        assert found["same"] == same, f"{mode}: other prompts than {modes[0]}"
        disk = sum(f.stat().st_size for f in (folder / "cache").rglob("*")) / MIB if mode == MODES[1] else 0.0
        figures = (f"{found['seconds']:.2f}", f"{found['Anon']:.0f}", f"{found['File']:.0f}", f"{disk:.0f}" if disk else "")
        rows.append((f"{count:,}", kind, mode, *figures))
    return rows


if __name__ == "__main__":
    main()
