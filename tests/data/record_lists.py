"""A source of records that a test wrote down, and its prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megappo.data.cache import Cache
from megappo.data.prompt_rows import PromptRules, prompts_of
from megappo.data.prompts import PromptFormat, PromptSet
from megappo.data.sources import JsonLines, line_batch
from megappo.data.tokenizers import Tokenizer


class Records(JsonLines):
    """Records as if they were the lines of a file; lines: their numbers, None for a source without."""

    def __init__(self, records: Sequence[Any], spec: str, lines: Sequence[int] | None = None) -> None:
        self.spec, self._records = spec, list(records)
        self.files: Sequence[Path] = ()
        self._lines: list[int | None] = [None] * len(self._records) if lines is None else list(lines)
        self.sha256 = hashlib.sha256(repr((self._records, lines)).encode("utf-8", "surrogatepass")).hexdigest()

    def batches(self) -> Iterator[Any]:
        if self._records:
            yield line_batch([json.dumps(record).encode() for record in self._records], self._lines)

    @staticmethod
    def records(spec: str, batch: Any) -> Iterator[tuple[Any, int | None]]:
        return zip(map(json.loads, batch.column("line").to_pylist()), batch.column("number").to_pylist())


def prompts_of_records(
    records: Sequence[Any],
    tokenizer: Tokenizer,
    prompt_format: PromptFormat,
    *,
    source: str = "t.jsonl",
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    lines: Sequence[int] | None = None,
    root: Path | None = None,
    **options: Any,
) -> PromptSet:
    """Prompts of these records through the cache (at `root`); options: further fields of PromptRules."""
    rules = PromptRules(prompt_key, answer_key, prompt_format, **{"max_prompt_tokens": 6, **options})
    return prompts_of(Records(records, source, lines), tokenizer, rules, Cache(root))
