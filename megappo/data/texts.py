"""Plain texts for a language-modelling loss, as rows of a cache: tokenised once, cut into sequences of at most so many tokens.

A text starts as a prompt does and ends with the end-of-sequence id. `demonstrations.py` has the texts of prompt and response.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial

import numpy
import torch
from torch import Tensor

from megappo.data.cache import Cache
from megappo.data.encoding import encode_all, usable_processes
from megappo.data.packing import PackedBatch, pack
from megappo.data.prompt_rows import rows_of
from megappo.data.prompts import record_field, record_name, require_text
from megappo.data.sources import Source
from megappo.data.token_rows import RowWriter, TokenRows
from megappo.data.tokenizers import Tokenizer

_SHORTEST = 2  # the first token of a sequence has no prefix, so a sequence of one teaches nothing


@dataclass(frozen=True)
class TextRules:
    """Keys of `algorithm.ptx` that make sequences of records."""

    text_key: str
    max_tokens: int


@dataclass(frozen=True)
class TextSet:
    """Sequences of 2 to `max_tokens` tokens, in the order of the records and of their text; made when they are asked for."""

    rows: TokenRows
    source: str

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int(numpy.sum(self.rows.lengths, dtype=numpy.int64))

    @property
    def source_sha256(self) -> str:
        return str(self.rows.facts["source_sha256"])

    def summary(self) -> str:
        return f"{len(self):,} sequences, {self.num_tokens:,} tokens of {self.rows.facts['num_records']:,} texts"

    def lengths(self, indices: Sequence[int]) -> Tensor:
        """[B] int64, tokens of these sequences, which are not read."""
        return torch.tensor([int(self.rows.lengths[i]) for i in indices], dtype=torch.long)

    def packed(self, indices: Sequence[int]) -> PackedBatch:
        """Pack these sequences, without fields."""
        return pack([self.rows.read(i)[0] for i in indices])


def texts_of(source: Source, tokenizer: Tokenizer, rules: TextRules, cache: Cache) -> TextSet:
    """Sequences of a source by these rules; tokenised if the cache has them not. A longer text becomes several sequences, each but
    the first without the tokens before it.

    ValueError, one line: a key that a record lacks (its keys are listed), a value of the wrong type, or no text at all.
    """
    rows, _ = rows_of(source, tokenizer, {"texts": asdict(rules)}, cache, partial(_write, source, tokenizer, rules))
    return TextSet(rows, source.spec)


def _write(source: Source, tokenizer: Tokenizer, rules: TextRules, writer: RowWriter) -> None:
    """Tokenise every record once and write the rows; errors as `texts_of`."""
    num_records = num_rows = 0
    with closing(encode_all(_texts(source, rules), _encode, tokenizer, usable_processes())) as encoded:
        for row, tokens in encoded:
            for start in range(0, len(tokens), rules.max_tokens):
                if len(piece := tokens[start : start + rules.max_tokens]) >= _SHORTEST:
                    writer.add(piece, (row,))
                    num_rows += 1
            num_records = row + 1
    if not num_rows:
        raise ValueError(f"{source.spec} has no text: {num_records:,} records")
    writer.close({"num_records": num_records, "source_sha256": source.sha256})


def _texts(source: Source, rules: TextRules) -> Iterator[tuple[int, str]]:
    """(row, text) of every record."""
    records = ((record, block.line) for block in source.blocks() for record in block.records)
    for row, (record, line) in enumerate(records):
        name = record_name(source.spec, row, line)
        text = record_field(record, rules.text_key, "algorithm.ptx.text_key", name)
        if not isinstance(text, str):
            raise ValueError(f"algorithm.ptx.text_key={rules.text_key}: {name} holds a {type(text).__name__}, not a string")
        yield row, require_text(text, "the text", name)


def _encode(tokenizer: Tokenizer, text: str) -> array[int]:
    return array("i", [*tokenizer.encode_prompt(text), tokenizer.eos_id])
