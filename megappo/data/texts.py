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
from megappo.data.conversations import Turns, learned_tokens, messages_of, spans_of_mask
from megappo.data.examples import Examples, Overlong, fits, require_some
from megappo.data.images import PromptImages, key_of_images
from megappo.data.packing import PackedBatch, pack
from megappo.data.prompts import PromptFormat, Record, encode_prompt, record_field, require_text
from megappo.data.rows import SPANS, Recipe, Rows, rows_of
from megappo.data.sources import Joined, Source
from megappo.data.tokenizers import Tokenizer

_DEMONSTRATION = "demonstration"


@dataclass(frozen=True)
class Demonstration:
    """Token ids of a conversation. spans: [begin, end) of the tokens to learn, one span after the other."""

    id: str
    tokens: tuple[int, ...]
    spans: tuple[int, ...]

    @property
    def prompt_length(self) -> int:
        """Tokens before the first one to learn."""
        return self.spans[0]


@dataclass(frozen=True)
class DemonstrationRules:
    """Keys of `data` that turn records into demonstrations: conversations, token ids, or prompts with responses."""

    prompt_key: str
    response_key: str
    format: PromptFormat
    max_tokens: int
    overlong: Overlong = "filter"
    messages_key: str | None = None
    turns: Turns = "all"
    tools_key: str | None = None
    tokens_key: str | None = None
    mask_key: str | None = None


@dataclass(frozen=True)
class DemonstrationSet(Examples):
    """Demonstrations: examples of one sequence, with a mask of the tokens to learn."""

    @property
    def unit(self) -> str:
        return _DEMONSTRATION

    def __getitem__(self, index: int) -> Demonstration:
        number = range(len(self))[index]
        row = self.rows[number]
        return Demonstration(self.id(number), tuple(row.tokens), tuple(row.value))

    def packed(self, numbers: Sequence[int]) -> PackedBatch:
        """Pack these demonstrations, with `response_mask` [T] bool: true on tokens to learn."""
        chosen = [self[number] for number in numbers]
        masks = [torch.zeros(len(one.tokens), dtype=torch.bool) for one in chosen]
        for one, mask in zip(chosen, masks):
            for begin, end in zip(one.spans[::2], one.spans[1::2]):
                mask[begin:end] = True
        batch = pack([one.tokens for one in chosen])
        return batch.with_fields({"response_mask": torch.cat([torch.zeros(0, dtype=torch.bool), *masks])})


def demonstrations_of(
    source: Source | Joined, tokenizer: Tokenizer, rules: DemonstrationRules, cache: Cache, images: PromptImages | None = None
) -> DemonstrationSet:
    """Tokenise demonstrations of a source, or take them from the cache. Those beyond max_tokens are left out and counted, or
    refused (`rules.overlong`), never cut. images: of the prompts, if they have some.
    Raises ValueError, one line: a key that a record lacks (its keys are listed), a value of the wrong type, an empty response, or
    nothing left."""
    finish = partial(require_some, _DEMONSTRATION, rules.max_tokens, source.spec)
    recipe = Recipe(partial(_encode_demonstration, tokenizer, rules, images), SPANS, finish)
    rows, _ = rows_of(source, tokenizer, {"demonstrations": asdict(rules), **key_of_images(images)}, cache, recipe)
    return DemonstrationSet(rows, rules.max_tokens)


def _encode_demonstration(
    tokenizer: Tokenizer, rules: DemonstrationRules, images: PromptImages | None, record: Record, name: str
) -> Iterator[tuple[list[int], list[int]]]:
    if rules.messages_key is not None:
        tokens, spans = _from_messages(rules.messages_key, tokenizer, rules, record, name)
    elif rules.tokens_key is not None:
        tokens, spans = _from_tokens(rules.tokens_key, tokenizer, rules, record, name)
    else:
        tokens, spans = _from_response(tokenizer, rules, images, record, name)
    if fits([len(tokens)], rules.max_tokens, rules.overlong, name):
        yield tokens, spans


def _from_messages(
    key: str, tokenizer: Tokenizer, rules: DemonstrationRules, record: Record, name: str
) -> tuple[list[int], list[int]]:
    messages = messages_of(record_field(record, key, "data.messages_key", name), f"data.messages_key={key}", name)
    if rules.format.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": rules.format.system_prompt}, *messages]
    tools = None if rules.tools_key is None else record_field(record, rules.tools_key, "data.tools_key", name)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError(f"data.tools_key={rules.tools_key}: {name} holds no list of tools (JSON schemas)")
    try:
        return learned_tokens(messages, tools or None, rules.turns, tokenizer)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _from_tokens(
    key: str, tokenizer: Tokenizer, rules: DemonstrationRules, record: Record, name: str
) -> tuple[list[int], list[int]]:
    tokens = record_field(record, key, "data.tokens_key", name)
    if not isinstance(tokens, list) or not all(type(one) is int and 0 <= one < tokenizer.vocab_size for one in tokens):
        raise ValueError(f"data.tokens_key={key}: {name} holds no list of token ids from 0 to {tokenizer.vocab_size - 1}")
    mask = [1] * len(tokens)
    if rules.mask_key is not None:
        mask = record_field(record, rules.mask_key, "data.mask_key", name)
        if not isinstance(mask, list) or len(mask) != len(tokens) or not all(one in (0, 1) for one in mask):
            raise ValueError(f"data.mask_key={rules.mask_key}: {name} holds no list of {len(tokens)} numbers 0 and 1")
    spans = spans_of_mask([0, *mask[1:]])  # the first token has no prefix that it could be learned after
    if not spans:
        raise ValueError(f"data.tokens_key={key}: {name} has no token to learn; remove the record")
    return tokens, spans


def _from_response(
    tokenizer: Tokenizer, rules: DemonstrationRules, images: PromptImages | None, record: Record, name: str
) -> tuple[list[int], list[int]]:
    prompt = encode_prompt(record, rules.prompt_key, tokenizer, rules.format, images, name)
    response = record_field(record, rules.response_key, "data.response_key", name)
    if not isinstance(response, str):
        raise ValueError(f"data.response_key={rules.response_key}: {name} holds a {type(response).__name__}, not a string")
    require_text(response, "the response", name)
    if not response:
        raise ValueError(f"data.response_key={rules.response_key}: {name} has an empty response; remove the record")
    # Encoded on its own: merged with the prompt, the border's tokens would differ from those that the policy samples.
    tokens = [*prompt, *ended(tokenizer.encode(response), tokenizer)]
    return tokens, [len(prompt), len(tokens)]


def ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Append eos, unless the text ends with one already: a policy that learnt two would sample the second as the next response."""
    return ids if ids and ids[-1] in tokenizer.eos_ids else [*ids, tokenizer.eos_id]


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
    tokens = ended(tokenizer.encode_prompt(require_text(text, "the text", name)), tokenizer)
    for start in range(0, len(tokens), rules.max_tokens):
        if len(piece := tokens[start : start + rules.max_tokens]) >= _SHORTEST:
            yield piece, None


def _checked_texts(source: Source | Joined, rows: Rows, num_records: int) -> Mapping[str, Any]:
    if not len(rows):
        raise ValueError(f"{source.spec} has no text: {num_records:,} records")
    return {}
