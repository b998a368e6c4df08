"""Plain texts for a language-modelling loss, as rows of a cache: tokenised once, cut into sequences of limited length.
A text starts as a prompt does and ends with the end-of-sequence id. `demonstrations.py` has texts of prompt and response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from megappo.data.cache import Cache
from megappo.data.packing import PackedBatch, pack
from megappo.data.prompts import Record, record_field, require_text
from megappo.data.rows import Recipe, Rows, rows_of
from megappo.data.sources import Source
from megappo.data.tokenizers import Tokenizer

_SHORTEST = 2  # the first token of a sequence has no prefix, so a sequence of one teaches nothing


@dataclass(frozen=True)
class TextRules:
    """Keys of `algorithm.ptx` that turn records into sequences."""

    text_key: str
    max_tokens: int


@dataclass(frozen=True)
class TextSet:
    """Sequences of 2 to `max_tokens` tokens, in the order of the records and of their text; made on access."""

    rows: Rows
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
        """Tokens of these sequences, [B] int64, without reading them."""
        return torch.tensor([int(self.rows.lengths[i]) for i in indices], dtype=torch.long)

    def packed(self, indices: Sequence[int]) -> PackedBatch:
        return pack([self.rows[i].tokens for i in indices])


def texts_of(source: Source, tokenizer: Tokenizer, rules: TextRules, cache: Cache) -> TextSet:
    """Tokenise the texts of a source by these rules, or take them from the cache.
    A longer text becomes several sequences, each without the tokens before it. Raises ValueError, one line: a key that a record
    lacks (its keys are listed), a value of the wrong type, or no text at all."""
    recipe = Recipe(partial(_encode, tokenizer, rules), "null", partial(_checked, source))
    rows, _ = rows_of(source, tokenizer, {"texts": asdict(rules)}, cache, recipe)
    return TextSet(rows, source.spec)


def _encode(tokenizer: Tokenizer, rules: TextRules, record: Record, name: str) -> Iterator[tuple[list[int], None]]:
    text = record_field(record, rules.text_key, "algorithm.ptx.text_key", name)
    if not isinstance(text, str):
        raise ValueError(f"algorithm.ptx.text_key={rules.text_key}: {name} holds a {type(text).__name__}, not a string")
    tokens = [*tokenizer.encode_prompt(require_text(text, "the text", name)), tokenizer.eos_id]
    for start in range(0, len(tokens), rules.max_tokens):
        if len(piece := tokens[start : start + rules.max_tokens]) >= _SHORTEST:
            yield piece, None


def _checked(source: Source, rows: Rows, num_records: int) -> Mapping[str, Any]:
    if not len(rows):
        raise ValueError(f"{source.spec} has no text: {num_records:,} records")
    return {}
