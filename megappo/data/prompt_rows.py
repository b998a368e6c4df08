"""Prompts of a source as rows of a cache: tokenised, filtered and checked once, then made of their row on access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, overload

from megappo.config.run_directory import apply_permissions
from megappo.config.run_sections import RunConfig
from megappo.config.schema import DataConfig
from megappo.config.supervised import PairDataConfig, SftDataConfig
from megappo.data.cache import Cache
from megappo.data.images import PromptImages, key_of_images
from megappo.data.prompts import (
    Identities,
    Prompt,
    PromptFormat,
    PromptSet,
    Record,
    answer_or_none,
    encode_prompt,
    question_field,
    record_name,
)
from megappo.data.rows import Recipe, Row, Rows, rows_of
from megappo.data.sources import Joined, Source, open_sources
from megappo.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class PromptRules:
    """Keys of `data` that turn records into prompts."""

    prompt_key: str
    answer_key: str
    format: PromptFormat
    max_prompt_tokens: int
    overlong: Literal["filter", "error"] = "filter"
    limit: int | None = None
    """Most prompts to take."""


def prompts_of(
    source: Source | Joined, tokenizer: Tokenizer, rules: PromptRules, cache: Cache, images: PromptImages | None = None
) -> PromptSet:
    """Tokenise the prompts of a source by these rules, or take them from the cache. images: of its records, if they have some.
    Raises ValueError, one line: a key of the question that a record lacks (its keys are listed), one of the wrong type, a prompt
    without tokens, a prompt longer than max_prompt_tokens with overlong="error", or nothing left."""
    recipe = Recipe(partial(_encode, tokenizer, rules, images), "string", partial(_checked, source, rules), rules.limit)
    rows, fingerprint = rows_of(source, tokenizer, {"prompts": asdict(rules), **key_of_images(images)}, cache, recipe)
    facts = rows.facts
    return PromptSet(
        StoredPrompts(rows, rules, has_images=images is not None),
        facts["num_records"],
        facts["num_overlong"],
        rules.max_prompt_tokens,
        source_sha256=facts["source_sha256"],
        fingerprint=fingerprint,
        hashes=facts["identities"],
        unanswered=rows.without_value,
    )


def _encode(
    tokenizer: Tokenizer, rules: PromptRules, images: PromptImages | None, record: Record, name: str
) -> Iterator[tuple[list[int], str | None]]:
    """Yield (token ids, answer or None) of a record; nothing if it is too long and overlong prompts are filtered."""
    tokens = encode_prompt(record, rules.prompt_key, tokenizer, rules.format, images, name)
    if len(tokens) <= rules.max_prompt_tokens or rules.overlong == "error":
        yield tokens, answer_or_none(record, rules.answer_key)


def _checked(source: Source | Joined, rules: PromptRules, rows: Rows, num_records: int) -> Mapping[str, Any]:
    # Records beyond the limit are not counted.
    if rules.limit is not None and len(rows) == rules.limit:
        num_records = rows[len(rows) - 1].record + 1
    num_overlong = num_records - len(rows)
    if rules.overlong == "error" and (num_overlong := int((rows.lengths > rules.max_prompt_tokens).sum())):
        longest = rows[int(rows.lengths.argmax())]
        name = record_name(*rows.place_of(longest), rows.record_of(longest)[1])
        raise ValueError(
            f"{num_overlong:,} of {num_records:,} prompts are longer than data.max_prompt_tokens={rules.max_prompt_tokens} "
            f"(longest: {name}, {len(longest.tokens)} tokens): raise it, or set data.overlong=filter to leave them out"
        )
    if not len(rows):
        nothing = PromptSet((), num_records, num_overlong, rules.max_prompt_tokens)
        raise ValueError(f"no prompts are left of {source.spec}: {nothing.summary()}")
    identities = Identities()
    for row in rows:
        identities.add(row.record, row.tokens, row.value or "")
    return {"num_records": num_records, "num_overlong": num_overlong, "identities": identities.hexdigests()}


class StoredPrompts(Sequence[Prompt]):
    """Prompts of mapped rows. Each access makes a new one."""

    def __init__(self, rows: Rows, rules: PromptRules, *, has_images: bool = False) -> None:
        self._rows, self._rules, self._has_images = rows, rules, has_images

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        chosen = range(len(self))[index]  # IndexError, and negative numbers, as of a list
        return self._make(self._rows[chosen]) if isinstance(chosen, int) else [self._make(self._rows[one]) for one in chosen]

    def __iter__(self) -> Iterator[Prompt]:
        return map(self._make, self._rows)

    def _make(self, row: Row) -> Prompt:
        record, line = self._rows.record_of(row)
        question = question_field(record, self._rules.prompt_key, "data.prompt_key", "", has_images=self._has_images)
        text = question if isinstance(question, str) else question[-1]["content"]
        return Prompt(record_name(*self._rows.place_of(row), None), tuple(row.tokens), text, row.value or "", record, line)


def format_of(data: DataConfig | SftDataConfig | PairDataConfig) -> PromptFormat:
    return PromptFormat(data.chat_template, data.system_prompt, data.prompt_suffix)


def open_cache(run: RunConfig) -> Cache:
    """Open the cache of prepared data, with the file permissions of the run."""
    apply_permissions(run.permissions)
    return Cache()


def load_prompts(
    data: DataConfig,
    source: str | Sequence[str],
    tokenizer: Tokenizer,
    cache: Cache,
    limit: int | None = None,
    images: PromptImages | None = None,
) -> PromptSet:
    """Load the prompts of a source or of several, formatted and filtered by the keys of `data`. ValueError as `prompts_of`."""
    rules = PromptRules(data.prompt_key, data.answer_key, format_of(data), data.max_prompt_tokens, data.overlong, limit)
    return prompts_of(open_sources(source), tokenizer, rules, cache, images)
