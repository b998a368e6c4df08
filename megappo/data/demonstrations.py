"""Demonstrations for supervised fine-tuning: prompt and response -> token ids, with a mask of the tokens to learn.

A demonstration has the tokens of a rollout with the same response: the prompt as `prompts.py` builds it, the response encoded on
its own, the end-of-sequence id.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial

import torch

from megappo.data.cache import Cache
from megappo.data.encoding import encode_all, usable_processes
from megappo.data.packing import PackedBatch, pack
from megappo.data.prompt_rows import rows_of
from megappo.data.prompts import (
    PromptFormat,
    encode_question,
    question_field,
    record_field,
    record_name,
    require_text,
)
from megappo.data.sources import Source
from megappo.data.token_rows import RowWriter, TokenRows
from megappo.data.tokenizers import Message, Tokenizer


@dataclass(frozen=True)
class Demonstration:
    """tokens: prompt, response, eos. The loss covers all but the first `prompt_length`."""

    id: str
    tokens: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True)
class DemonstrationRules:
    """Keys of `data` that make demonstrations of records."""

    prompt_key: str
    response_key: str
    format: PromptFormat
    max_tokens: int


@dataclass(frozen=True)
class DemonstrationSet:
    """Demonstrations of at most max_tokens tokens, in the order of the records; made when they are asked for."""

    rows: TokenRows
    source: str
    num_records: int
    max_tokens: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Demonstration:
        tokens, (row, prompt_length) = self.rows.read(range(len(self))[index])
        return Demonstration(f"{self.source}#{row}", tokens, prompt_length)

    def summary(self) -> str:
        return _summary(len(self), self.num_records, self.max_tokens)

    def packed(self, indices: Sequence[int]) -> PackedBatch:
        """Pack these demonstrations, with `response_mask` [T] bool: true on response tokens and eos."""
        chosen = [self[i] for i in indices]
        batch = pack([d.tokens for d in chosen])
        mask = torch.cat([torch.arange(len(d.tokens)) >= d.prompt_length for d in chosen])
        return batch.with_fields(token_fields={"response_mask": mask})


def demonstrations_of(source: Source, tokenizer: Tokenizer, rules: DemonstrationRules, cache: Cache) -> DemonstrationSet:
    """Demonstrations of a source by these rules; tokenised if the cache has them not. Records longer than max_tokens are left out
    and counted, never cut.

    ValueError, one line: a key that a record lacks (its keys are listed), a value of the wrong type, or nothing left.
    """
    key = {"demonstrations": asdict(rules)}
    rows, _ = rows_of(source, tokenizer, key, cache, partial(_write, source, tokenizer, rules))
    return DemonstrationSet(rows, source.spec, rows.facts["num_records"], rules.max_tokens)


def _write(source: Source, tokenizer: Tokenizer, rules: DemonstrationRules, writer: RowWriter) -> None:
    """Tokenise every record once and write the rows; errors as `demonstrations_of`."""
    num_records = num_kept = 0
    with closing(encode_all(_parts(source, rules), partial(_encode, rules), tokenizer, usable_processes())) as encoded:
        for row, (tokens, prompt_length) in encoded:
            if len(tokens) <= rules.max_tokens:
                writer.add(tokens, (row, prompt_length))
                num_kept += 1
            num_records = row + 1
    if not num_kept:
        raise ValueError(f"no demonstrations are left of {source.spec}: {_summary(0, num_records, rules.max_tokens)}")
    writer.close({"num_records": num_records})


_Parts = tuple[str | list[Message], str, str]  # question, response, name of the record


def _parts(source: Source, rules: DemonstrationRules) -> Iterator[tuple[int, _Parts]]:
    """(row, parts) of every record."""
    records = ((record, block.line) for block in source.blocks() for record in block.records)
    for row, (record, line) in enumerate(records):
        name = record_name(source.spec, row, line)
        question = question_field(record, rules.prompt_key, "data.prompt_key", name)
        response = record_field(record, rules.response_key, "data.response_key", name)
        if not isinstance(response, str):
            raise ValueError(f"data.response_key={rules.response_key}: {name} holds a {type(response).__name__}, not a string")
        yield row, (question, require_text(response, "the response", name), name)


def _encode(rules: DemonstrationRules, tokenizer: Tokenizer, parts: _Parts) -> tuple[array[int], int]:
    """(token ids, those of the prompt) of a record."""
    question, response, name = parts
    prompt = encode_question(question, tokenizer, rules.format, name)
    # Encoded on its own: merged with the prompt, the border's tokens would differ from those that the policy samples.
    return array("i", [*prompt, *tokenizer.encode(response), tokenizer.eos_id]), len(prompt)


def _summary(kept: int, num_records: int, max_tokens: int) -> str:
    overlong = f"; {num_records - kept:,} longer than data.max_tokens={max_tokens}" if kept < num_records else ""
    return f"kept {kept:,} of {num_records:,} demonstrations{overlong}"
