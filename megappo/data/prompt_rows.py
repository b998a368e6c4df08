"""Prompts of a source as rows of a cache: tokenised, filtered and checked once, made of their row when they are asked for.

What a row keeps is the token ids and the record; text and answer are fields of the record and are read from it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import megappo.data
from megappo.data.cache import Cache, Key, digest, hash_of_modules, signature
from megappo.data.encoding import encode_all, usable_processes
from megappo.data.prompts import (
    Identities,
    Prompt,
    PromptFormat,
    PromptSet,
    answer_field,
    encode_question,
    question_field,
    record_name,
)
from megappo.data.sources import Record, RecordBlock, Source
from megappo.data.token_rows import Block, RowWriter, TokenRows
from megappo.data.tokenizers import Message, Tokenizer


@dataclass(frozen=True)
class PromptRules:
    """Keys of `data` that make prompts of records. limit: on the number of prompts."""

    prompt_key: str
    answer_key: str
    format: PromptFormat
    max_prompt_tokens: int
    overlong: Literal["filter", "error"] = "filter"
    limit: int | None = None


def prompts_of(source: Source, tokenizer: Tokenizer, rules: PromptRules, cache: Cache) -> PromptSet:
    """Prompts of a source by these rules; tokenised if the cache has them not.

    ValueError, one line: a key that a record lacks (its keys are listed), a question or an answer of the wrong type, a prompt
    without tokens, a prompt longer than max_prompt_tokens with overlong="error", or nothing left.
    """
    rows, fingerprint = rows_of(source, tokenizer, {"prompts": asdict(rules)}, cache, partial(_write, source, tokenizer, rules))
    facts = rows.facts
    return PromptSet(
        StoredPrompts(rows, source, rules),
        facts["num_records"],
        facts["num_overlong"],
        rules.max_prompt_tokens,
        source_sha256=facts["source_sha256"],
        fingerprint=fingerprint,
        hashes=facts["identities"],
    )


def rows_of(
    source: Source, tokenizer: Tokenizer, rules: Key, cache: Cache, write: Callable[[RowWriter], None]
) -> tuple[TokenRows, str]:
    """(rows of a source by these rules, fingerprint of all that decides them and their names); `write` makes them and closes the
    writer, if the cache has them not. ValueError as `write`, or if the files change meanwhile."""
    before = signature(source.files)
    key = {
        "content": cache.content_of(source.files) if source.files else _content_in_memory(source),
        "kind": type(source).__name__,
        "choice": source.choice,
        "tokenizer": tokenizer.identity(),
        "code": hash_of_modules(megappo.data),
        **rules,
    }

    def build(folder: Path) -> None:
        with RowWriter(folder) as writer:
            write(writer)
        if signature(source.files) != before:
            raise ValueError(f"{source.spec} was changed while it was read; start again when nobody writes to it")

    rows = cache.rows(key, build)
    rows.source = source.spec
    return rows, digest({"rows": key, "spec": source.spec})


def _content_in_memory(source: Source) -> str:
    for _ in source.blocks():  # its records are its only identity
        pass
    return source.sha256


def _write(source: Source, tokenizer: Tokenizer, rules: PromptRules, writer: RowWriter) -> None:
    """Tokenise every record once and write the rows; errors as `prompts_of`."""
    identities = Identities()
    num_kept, num_overlong, longest = 0, 0, ("", 0)
    block, place = None, None
    # With a limit one after the other: nobody may complain of records beyond it, and their tokens say where it is.
    processes = usable_processes() if rules.limit is None else 1
    with closing(encode_all(_questions(source, rules, lambda: num_kept), partial(_encode, rules), tokenizer, processes)) as encoded:
        for record, tokens in encoded:
            if len(tokens) > rules.max_prompt_tokens:
                num_overlong += 1
                longest = max(longest, (record.name, len(tokens)), key=lambda pair: pair[1])
                continue
            if block is not record.block or place is None:
                block, place = record.block, writer.add_block(record.block.content)
            writer.add(tokens, (record.row, record.block.line or 0, record.position, *place))
            identities.add(record.row, tokens, record.answer)
            num_kept += 1
    seen = num_kept + num_overlong
    if num_overlong and rules.overlong == "error":
        raise ValueError(
            f"{num_overlong:,} of {seen:,} prompts are longer than data.max_prompt_tokens={rules.max_prompt_tokens} "
            f"(longest: {longest[0]}, {longest[1]} tokens): raise it, or set data.overlong=filter to leave them out"
        )
    if not num_kept:
        nothing = PromptSet((), seen, num_overlong, rules.max_prompt_tokens)
        raise ValueError(f"no prompts are left of {source.spec}: {nothing.summary()}")
    writer.close(
        {
            "num_records": seen,
            "num_overlong": num_overlong,
            "source_sha256": source.sha256,
            "identities": identities.hexdigests(),
        }
    )


class _Place(NamedTuple):
    """A record on its way to a row. row: from 0, in the source; position: in its block."""

    row: int
    block: RecordBlock
    position: int
    name: str
    answer: str


def _questions(source: Source, rules: PromptRules, num_kept: Callable[[], int]) -> Iterator[tuple[_Place, tuple[Any, str]]]:
    """(place, (question, name)) of every record up to the limit."""
    row = -1
    for block in source.blocks():
        for position, record in enumerate(block.records):
            row += 1
            if rules.limit is not None and num_kept() >= rules.limit:
                continue  # read all the same: a bad line and the hash are of the whole source
            name = record_name(source.spec, row, block.line)
            question = question_field(record, rules.prompt_key, "data.prompt_key", name)
            yield _Place(row, block, position, name, answer_field(record, rules.answer_key, name)), (question, name)


def _encode(rules: PromptRules, tokenizer: Tokenizer, item: tuple[Any, str]) -> array[int]:
    question, name = item
    return array("i", encode_question(question, tokenizer, rules.format, name))


class StoredPrompts(Sequence[Prompt]):
    """Prompts of mapped rows: a prompt is made anew each time. DamagedRows if its row is not as it was written."""

    def __init__(self, rows: TokenRows, source: Source, rules: PromptRules) -> None:
        self._rows, self._source, self._rules = rows, source, rules

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        chosen = range(len(self))[index]  # IndexError, and negative numbers, as of a list
        return self._make(chosen) if isinstance(chosen, int) else [self._make(one) for one in chosen]

    def __iter__(self) -> Iterator[Prompt]:
        return map(self._make, range(len(self)))

    def _make(self, index: int) -> Prompt:
        tokens, (row, line, position, *place) = self._rows.read(index)
        record = self._source.decode(self._rows.read_block(Block(*place), index), position)
        question, answer = _fields(record, self._rules)
        text = question if isinstance(question, str) else question[-1]["content"]
        return Prompt(f"{self._source.spec}#{row}", tokens, text, answer, record, line or None)


def _fields(record: Record, rules: PromptRules) -> tuple[str | list[Message], str]:
    question = question_field(record, rules.prompt_key, "data.prompt_key", "")
    return question, answer_field(record, rules.answer_key, "")
