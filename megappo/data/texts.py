"""Texts to learn, as rows of a cache, tokenised once: plain ones for a language-modelling loss, cut into sequences of limited
length, and demonstrations for supervised fine-tuning with a mask of the tokens to learn. Demonstrations have the tokens of a
rollout: the prompt as `prompts.py` builds it, the response encoded on its own, the end-of-sequence id."""

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
from megappo.data.prompts import PromptFormat, Record, encode_question, question_field, record_field, record_name, require_text
from megappo.data.rows import Recipe, Rows, rows_of
from megappo.data.sources import Joined, Source
from megappo.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Demonstration:
    """Token ids of prompt, response and eos. The loss covers all but the first `prompt_length`."""

    id: str
    tokens: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True)
class DemonstrationRules:
    """Keys of `data` that turn records into demonstrations."""

    prompt_key: str
    response_key: str
    format: PromptFormat
    max_tokens: int


@dataclass(frozen=True)
class DemonstrationSet:
    """Demonstrations of at most max_tokens tokens, in the order of the records; made on access."""

    rows: Rows
    num_records: int
    max_tokens: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Demonstration:
        row = self.rows[range(len(self))[index]]
        return Demonstration(record_name(*self.rows.place_of(row), None), tuple(row.tokens), row.value)

    def summary(self) -> str:
        return _summary(len(self), self.num_records, self.max_tokens)

    def packed(self, indices: Sequence[int]) -> PackedBatch:
        """Pack these demonstrations, with `response_mask` [T] bool: true on response tokens and eos."""
        chosen = [self[i] for i in indices]
        batch = pack([d.tokens for d in chosen])
        mask = torch.cat([torch.arange(len(d.tokens)) >= d.prompt_length for d in chosen])
        return batch.with_fields(token_fields={"response_mask": mask})


def demonstrations_of(source: Source | Joined, tokenizer: Tokenizer, rules: DemonstrationRules, cache: Cache) -> DemonstrationSet:
    """Tokenise demonstrations of a source, or take them from the cache. Those beyond max_tokens are left out and counted, never
    cut.
    Raises ValueError, one line: a key that a record lacks (its keys are listed), a value of the wrong type, or nothing left."""
    recipe = Recipe(partial(_encode_demonstration, tokenizer, rules), "int32", partial(_checked_demonstrations, source, rules))
    rows, _ = rows_of(source, tokenizer, {"demonstrations": asdict(rules)}, cache, recipe)
    return DemonstrationSet(rows, rows.facts["num_records"], rules.max_tokens)


def _encode_demonstration(
    tokenizer: Tokenizer, rules: DemonstrationRules, record: Record, name: str
) -> Iterator[tuple[list[int], int]]:
    question = question_field(record, rules.prompt_key, "data.prompt_key", name)
    response = record_field(record, rules.response_key, "data.response_key", name)
    if not isinstance(response, str):
        raise ValueError(f"data.response_key={rules.response_key}: {name} holds a {type(response).__name__}, not a string")
    require_text(response, "the response", name)
    prompt = encode_question(question, tokenizer, rules.format, name)
    # Encoded on its own: merged with the prompt, the border's tokens would differ from those that the policy samples.
    tokens = [*prompt, *_ended(tokenizer.encode(response), tokenizer)]
    if len(tokens) <= rules.max_tokens:
        yield tokens, len(prompt)


def _ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Append eos, unless the text ends with one already: a policy that learnt two would sample the second as the next response."""
    return ids if ids and ids[-1] in tokenizer.eos_ids else [*ids, tokenizer.eos_id]


def _checked_demonstrations(source: Source | Joined, rules: DemonstrationRules, rows: Rows, num_records: int) -> Mapping[str, Any]:
    if not len(rows):
        raise ValueError(f"no demonstrations are left of {source.spec}: {_summary(0, num_records, rules.max_tokens)}")
    return {}


def _summary(kept: int, num_records: int, max_tokens: int) -> str:
    overlong = f"; {num_records - kept:,} longer than data.max_tokens={max_tokens}" if kept < num_records else ""
    return f"kept {kept:,} of {num_records:,} demonstrations{overlong}"


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


def texts_of(source: Source | Joined, tokenizer: Tokenizer, rules: TextRules, cache: Cache) -> TextSet:
    """Tokenise the texts of a source by these rules, or take them from the cache.
    A longer text becomes several sequences, each without the tokens before it. Raises ValueError, one line: a key that a record
    lacks (its keys are listed), a value of the wrong type, or no text at all."""
    recipe = Recipe(partial(_encode_text, tokenizer, rules), "null", partial(_checked_texts, source))
    rows, _ = rows_of(source, tokenizer, {"texts": asdict(rules)}, cache, recipe)
    return TextSet(rows)


def _encode_text(tokenizer: Tokenizer, rules: TextRules, record: Record, name: str) -> Iterator[tuple[list[int], None]]:
    text = record_field(record, rules.text_key, "algorithm.ptx.text_key", name)
    if not isinstance(text, str):
        raise ValueError(f"algorithm.ptx.text_key={rules.text_key}: {name} holds a {type(text).__name__}, not a string")
    tokens = _ended(tokenizer.encode_prompt(require_text(text, "the text", name)), tokenizer)
    for start in range(0, len(tokens), rules.max_tokens):
        if len(piece := tokens[start : start + rules.max_tokens]) >= _SHORTEST:
            yield piece, None


def _checked_texts(source: Source | Joined, rows: Rows, num_records: int) -> Mapping[str, Any]:
    if not len(rows):
        raise ValueError(f"{source.spec} has no text: {num_records:,} records")
    return {}
