"""Preferences between responses, as rows of a cache: pairs, lists from best to worst, and single responses with a label. For a
policy a sequence has the tokens of a rollout, as a demonstration of `texts.py` has; for a reward model those that it scores
(`reward_text.py`). All sequences of a record are one example, so they stay together."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple

import torch

from megappo.data.cache import Cache
from megappo.data.conversations import ASSISTANT, learned_tokens, messages_of
from megappo.data.examples import Examples, Overlong, fits, require_some
from megappo.data.images import PromptImages, key_of_images, with_markers
from megappo.data.packing import PackedBatch, pack
from megappo.data.prompts import (
    PromptFormat,
    Record,
    encode_question,
    is_messages,
    question_field,
    record_field,
    require_text,
    shorten,
)
from megappo.data.reward_text import RewardText
from megappo.data.rows import Recipe, rows_of
from megappo.data.sources import Joined, Source
from megappo.data.texts import ended
from megappo.data.tokenizers import Message, Tokenizer


@dataclass(frozen=True)
class PairKeys:
    """Fields of a chosen and a rejected response; of a number by which their scores should differ at least; and of a truth value
    that says that neither is better."""

    unit: ClassVar = "pair"
    chosen: str
    rejected: str
    margin: str | None = None
    tie: str | None = None


@dataclass(frozen=True)
class ListKeys:
    """Field of a list of responses, from best to worst."""

    unit: ClassVar = "list"
    responses: str


@dataclass(frozen=True)
class LabelKeys:
    """Fields of a response and of its label: true or 1 if it is desirable, false or 0 if not."""

    unit: ClassVar = "labelled response"
    response: str
    label: str


Keys = PairKeys | ListKeys | LabelKeys
Response = str | list[dict[str, Any]]
"""Text of a response, or its messages if it has several: turns of the assistant, and between them others, such as tools'."""


@dataclass(frozen=True)
class PreferenceRules:
    """Keys of `data` that turn records into preferences. scored: tokens as a reward model reads them, whose config.json has pad_id
    (`RewardText`)."""

    keys: Keys
    prompt_key: str
    format: PromptFormat
    max_tokens: int
    overlong: Overlong = "filter"
    scored: bool = False
    pad_id: int | None = None


class _Preference(NamedTuple):
    """A row's value. lengths: tokens of each sequence. spans: of each, [begin, end) of its response's tokens, or of the assistant's
    turns in it, one after the other. places: of each, 0 is best, equal ones are tied."""

    lengths: list[int]
    spans: list[list[int]]
    places: list[int]
    margin: float
    label: int


@dataclass(frozen=True)
class PreferenceSet(Examples):
    """Preferences as examples of one, two or more sequences. fingerprint: of all that decides them. keys: their form."""

    fingerprint: str
    keys: Keys

    @property
    def unit(self) -> str:
        return self.keys.unit

    def lengths(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(self._read(number)[1].lengths) for number in numbers]

    def packed(self, numbers: Sequence[int]) -> PackedBatch:
        """Pack the sequences of these examples.

        Token field `response_mask` [T] bool: response and eos, or all of a text for a reward model. Sequence fields [B]: `unit`
        (int64, number of the example in this batch from 1, so that padding has 0), `place` (int64), `margin` (fp32, against the
        sequences above it), `label` (fp32: 1 desirable, -1 not, 0 without labels), `length` (int64, without padding).
        """
        found = [self._read(number) for number in numbers]
        sequences = [part for tokens, one in found for part in _parts(tokens, one.lengths)]
        return _batch(sequences, [one for _, one in found])

    def mismatched(self, numbers: Sequence[int]) -> PackedBatch:
        """Pack the prompts of these labelled responses, each with the response that stands half the data further on, since
        neighbours often share a prompt. Fields as of `packed`. A response beyond max_tokens is cut: nothing learns these texts,
        which estimate how far a policy is from its reference."""
        sequences, found = [], []
        for number in numbers:
            (tokens, own), (others, its) = self._read(number), self._read((number + max(1, len(self) // 2)) % len(self))
            begin, other = own.spans[0][0], its.spans[0][0]
            sequences.append([*tokens[:begin], *others[other:]][: self.max_tokens])
            shifted = [min(place - other + begin, len(sequences[-1])) for place in its.spans[0]]
            found.append(own._replace(lengths=[len(sequences[-1])], spans=[shifted]))
        return _batch(sequences, found)

    def _read(self, number: int) -> tuple[Sequence[int], _Preference]:
        row = self.rows[range(len(self))[number]]
        return row.tokens, _Preference(*json.loads(row.value))


def num_preferences(batch: PackedBatch) -> int:
    """Return the number of examples in a batch of `PreferenceSet.packed`."""
    return batch["unit"].unique().numel()


def _parts(tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[Sequence[int]]:
    start = 0
    for length in lengths:
        yield tokens[start : start + length]
        start += length


def _batch(sequences: Sequence[Sequence[int]], found: Sequence[_Preference]) -> PackedBatch:
    batch = pack(sequences)
    sizes = torch.tensor([len(one.lengths) for one in found], dtype=torch.long)
    spans = [one for each in found for one in each.spans]
    borders = [start + place for start, places in zip(batch.cu_seqlens.tolist(), spans) for place in places]
    margins = [one.margin if place > 0 else 0.0 for one in found for place in one.places]
    steps = torch.zeros(batch.num_tokens + 1, dtype=torch.long)  # +1 where a span begins, -1 where it ends
    steps.index_add_(0, torch.tensor(borders, dtype=torch.long), torch.tensor([1, -1]).repeat(len(borders) // 2))
    return batch.with_fields(
        token_fields={"response_mask": steps.cumsum(0)[:-1] > 0},
        sequence_fields={
            "unit": torch.arange(1, len(found) + 1).repeat_interleave(sizes),
            "place": torch.tensor([place for one in found for place in one.places], dtype=torch.long),
            "margin": torch.tensor(margins, dtype=torch.float32),
            "label": torch.tensor([one.label for one in found], dtype=torch.float32).repeat_interleave(sizes),
            "length": batch.lengths,
        },
    )


def preferences_of(
    source: Source | Joined, tokenizer: Tokenizer, rules: PreferenceRules, cache: Cache, images: PromptImages | None = None
) -> PreferenceSet:
    """Tokenise the preferences of a source, or take them from the cache. images: of the prompts, if they have some.
    Raises ValueError, one line with the record's place: a field that a record lacks, or of the wrong type; an empty response; equal
    responses; a label, margin or tie out of range; a chat template that changes the prompt before one of the responses; a sequence
    beyond max_tokens with `overlong="error"`; or nothing left. Longer records are left out otherwise, and counted."""
    finish = partial(require_some, rules.keys.unit, rules.max_tokens, source.spec)
    recipe = Recipe(partial(_encode, tokenizer, rules, images), "string", finish)
    key = {"preferences": asdict(rules), "unit": rules.keys.unit, **key_of_images(images)}
    rows, fingerprint = rows_of(source, tokenizer, key, cache, recipe)
    return PreferenceSet(rows, rules.max_tokens, fingerprint, rules.keys)


def _encode(
    tokenizer: Tokenizer, rules: PreferenceRules, images: PromptImages | None, record: Record, name: str
) -> Iterator[tuple[list[int], str]]:
    marked = record if images is None else {key: with_markers(value, name) for key, value in record.items()}
    question, sides = _question_and_sides(rules, marked, name)
    shown = [] if images is None else images.of_record(record, name)
    if rules.scored:
        sequences = _scored_texts(tokenizer, rules, (images, shown), (question, sides), name)
        spans = [[0, len(one)] for one in sequences]
    else:
        encode = partial(encode_question, tokenizer=tokenizer, prompt_format=rules.format, name=name)
        prompt = encode(question) if images is None else images.encoded(question, shown, encode, name)
        if shown and not all(isinstance(side, str) for side in sides):
            raise ValueError(f"{name}: a response of several messages beside {len(shown)} images; only texts go with images")
        sequences, spans = zip(*(_learned(tokenizer, rules, question, prompt, side, name) for side in sides))
    if len(set(map(tuple, sequences))) < len(sides):
        raise ValueError(f"{name}: two of its responses are the same tokens, so neither can be the better one; leave it out")
    places, margin, label = _ranked(rules.keys, record, name, len(sides))
    if fits([len(one) for one in sequences], rules.max_tokens, rules.overlong, name):
        value = _Preference([len(one) for one in sequences], list(spans), places, margin, label)
        yield [token for one in sequences for token in one], json.dumps(value)


def _learned(
    tokenizer: Tokenizer, rules: PreferenceRules, question: str | list[Message], prompt: Sequence[int], side: Response, name: str
) -> tuple[list[int], list[int]]:
    """Return (ids of prompt and response, spans of the response's tokens): of a text, or of the assistant's turns in several
    messages. prompt: ids of the question as a rollout has them."""
    if isinstance(side, str):
        # Encoded on its own, as a demonstration's: the tokens at the border are those that the policy samples.
        tokens = [*prompt, *ended(tokenizer.encode(side), tokenizer)]
        return tokens, [len(prompt), len(tokens)]
    if not rules.format.chat_template:
        raise ValueError(f"{name}: a response of several messages needs data.chat_template=true")
    try:
        tokens, borders = learned_tokens([*rules.format.messages(question), *side], None, "all", tokenizer)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    turns = sum(message["role"] == ASSISTANT for message in side)
    if len(borders) // 2 < turns:
        raise ValueError(f"{name}: the chat template marks {len(borders) // 2} turns of the assistant, fewer than a response has")
    return tokens, borders[-2 * turns :]


def _scored_texts(
    tokenizer: Tokenizer,
    rules: PreferenceRules,
    seen: tuple[PromptImages | None, Sequence[int]],
    said: tuple[str | list[Message], Sequence[Response]],
    name: str,
) -> list[list[int]]:
    """Return the ids of question and response of each side. seen: images of the run, and the question's among them. said: question
    and sides."""
    (images, shown), (question, sides), chat = seen, said, rules.format.chat_template
    text = RewardText(tokenizer, chat, rules.prompt_key, rules.format, rules.pad_id, rules.max_tokens, images)

    def begin(question: str | list[Message]) -> list[int]:
        return tokenizer.conversation(rules.format.messages(question))

    try:
        sequences = [text.of_question(question, side, shown) for side in sides]
        before = [] if not chat else begin(question) if images is None else images.encoded(question, shown, begin)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    for side, tokens in zip(sides, sequences):
        if tokens[: len(before)] != before:
            fix = "so scores would compare prompts too; use another template, or data.chat_template=false"
            raise ValueError(f"{name}: the chat template changes the prompt before the response {shorten(side)}, {fix}")
    return sequences


def _ranked(keys: Keys, record: Record, name: str, count: int) -> tuple[list[int], float, int]:
    """Return (places, margin, label) of a record of `count` responses."""
    if isinstance(keys, ListKeys):
        return list(range(count)), 0.0, 0
    if isinstance(keys, LabelKeys):
        return [0], 0.0, 1 if _truth(record, keys.label, "data.label_key", name) else -1
    margin = 0.0
    if keys.margin is not None:
        margin = record_field(record, keys.margin, "data.margin_key", name)
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < math.inf:
            raise ValueError(f"data.margin_key={keys.margin}: {name} holds {shorten(margin)}, not a number of at least 0")
    tied = keys.tie is not None and _truth(record, keys.tie, "data.tie_key", name)
    return [0, 0 if tied else 1], float(margin), 0


def _truth(record: Record, key: str, option: str, name: str) -> bool:
    value = record_field(record, key, option, name)
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise ValueError(f"{option}={key}: {name} holds {shorten(value)}, not true or false (1 or 0)")
    return bool(value)


def _question_and_sides(rules: PreferenceRules, record: Record, name: str) -> tuple[str | list[Message], list[Response]]:
    """Return (prompt, responses) of a record. Where its responses are whole conversations, which the assistant does not begin, or
    texts beside no prompt, the prompt is what all of them begin with."""
    values, has_prompt = _responses(rules.keys, record, name), rules.prompt_key in record
    whole = all(is_messages(value) and len(value) > 1 and value[0]["role"] != ASSISTANT for value in values.values())
    texts = len(values) > 1 and not rules.format.chat_template and all(isinstance(value, str) for value in values.values())
    if whole or (texts and not has_prompt):
        question, sides = _split(values, name)
        if has_prompt and is_messages(given := record[rules.prompt_key]) and given != question:
            raise ValueError(f"data.prompt_key={rules.prompt_key}: {name} has a prompt with which its conversations do not begin")
    else:
        question = question_field(record, rules.prompt_key, "data.prompt_key", name)
        sides = {option: _response(value, option, name) for option, value in values.items()}
    for option, side in sides.items():
        if isinstance(side, str) and not require_text(side, "a response", name).strip():
            raise ValueError(f"{option}: {name} has an empty response; leave the record out")
    return question, list(sides.values())


def _responses(keys: Keys, record: Record, name: str) -> dict[str, Any]:
    """Return the values of a record's responses by the words that name them in a message."""
    if isinstance(keys, PairKeys):
        options = {"data.chosen_key": keys.chosen, "data.rejected_key": keys.rejected}
        return {f"{option}={key}": record_field(record, key, option, name) for option, key in options.items()}
    if isinstance(keys, LabelKeys):
        return {f"data.response_key={keys.response}": record_field(record, keys.response, "data.response_key", name)}
    listed, option = record_field(record, keys.responses, "data.responses_key", name), f"data.responses_key={keys.responses}"
    if not isinstance(listed, list) or len(listed) < 2 or is_messages(listed):
        raise ValueError(f"{option}: {name} holds {shorten(listed)}, not a list of two or more responses, the best one first")
    return {f"{option} (number {number})": one for number, one in enumerate(listed)}


def _split(values: Mapping[str, Any], name: str) -> tuple[str | list[Message], dict[str, Response]]:
    """Split conversations, or texts, into what they share and a response each."""
    first = next(iter(values.values()))
    if isinstance(first, str):
        shared = os.path.commonprefix(list(values.values()))
        shared = shared[: max(map(shared.rfind, " \n\t"), default=0)]  # not within a word, of which both have only the start
        if not shared.strip():
            raise ValueError(f"{' and '.join(values)}: {name} has no prompt, and no word with which all responses begin")
        return shared, {option: value[len(shared) :] for option, value in values.items()}
    shared = sum(1 for _ in takewhile(lambda parts: all(part == parts[0] for part in parts), zip(*values.values())))
    shared = min(shared, *(len(value) - 1 for value in values.values()))  # equal ones are refused by their tokens
    while shared and any(value[shared]["role"] != ASSISTANT for value in values.values()):
        shared -= 1
    if not shared:
        raise ValueError(
            f"{list(values)[-1]}: {name} has no prompt, and its conversations differ before the first message of the assistant"
        )
    return first[:shared], {option: _response(value[shared:], option, name) for option, value in values.items()}


def _response(value: Any, option: str, name: str) -> Response:
    """Return a response: a string, the text of one message of the assistant, or several messages that it begins and ends."""
    if isinstance(value, str):
        return value
    if is_messages(value) and value[0]["role"] == value[-1]["role"] == ASSISTANT:
        return value[0]["content"] if len(value) == 1 else messages_of(value, option, name)
    raise ValueError(f"{option}: {name} holds {shorten(value)}, not a string or messages that the assistant begins and ends")
