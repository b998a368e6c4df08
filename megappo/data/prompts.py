"""Prompts of a run: the fields of a record and their format. Every rank has the same PromptSet.
`sources.py` reads files, `prompt_rows.py` makes the prompts of a source, `loader.py` has the order of visits."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, TypeGuard

from megappo.data.images import PromptImages, with_markers
from megappo.data.sources import Written
from megappo.data.tokenizers import Message, Tokenizer

Record = Mapping[str, Any]


@dataclass(frozen=True)
class PromptFormat:
    """Format of a prompt, with keys named as under `data`. Raises ValueError for a system prompt without a chat template."""

    chat_template: bool = True
    system_prompt: str | None = None
    prompt_suffix: str = ""

    def __post_init__(self) -> None:
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("data.system_prompt needs data.chat_template=true: without a template there is no system message")

    def encode(self, question: Any, tokenizer: Tokenizer) -> list[int]:
        """Encode a string or a list of {role, content} messages up to the start of the response. Errors name no record."""
        if self.chat_template:
            return tokenizer.chat(self.messages(question))
        if not isinstance(question, str):
            raise ValueError("the question is a list of chat messages, which needs data.chat_template=true")
        return tokenizer.encode_prompt(question + self.prompt_suffix)

    def messages(self, question: str | Sequence[Message]) -> list[Message]:
        """Messages of a question, with the suffix after the last one and the system message in front. Raises ValueError for a last
        message of the assistant, and for two system messages."""
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                "the prompt ends with a message of the assistant, which the template would close before it opens the response: "
                "leave it out; the response of a demonstration belongs under data.response_key"
            )
        completed = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + self.prompt_suffix}]
        if self.system_prompt is None:
            return completed
        if messages[0]["role"] == "system":
            raise ValueError("the question has a system message of its own: unset data.system_prompt")
        return [{"role": "system", "content": self.system_prompt}, *completed]


@dataclass(frozen=True)
class Prompt:
    """Question of one record."""

    id: str
    """`source#row`; rows count from 0, before filtering."""
    tokens: tuple[int, ...]
    text: str
    """Question without template and suffix."""
    answer: str
    record: Record
    line: int | None = None
    """Line of the record in its file, from 1; None if it has none."""

    @property
    def place(self) -> str:
        """Id and, where there is one, line in the file: `train.jsonl#2 (line 3)`."""
        source, _, row = self.id.rpartition("#")
        return record_name(source, int(row), self.line)


@dataclass(frozen=True)
class PromptSet:
    """Prompts of at most max_prompt_tokens tokens, in the order of the records."""

    prompts: Sequence[Prompt]
    num_records: int
    num_overlong: int
    max_prompt_tokens: int
    source_sha256: str = ""
    """SHA-256 of the source's content."""
    fingerprint: str = ""
    """Hash of all that decides the prompts and their names in messages; "" if they are not of a source."""
    hashes: Mapping[str, str] | None = None
    """`identities`, if they are known."""
    unanswered: Sequence[int] = ()
    """Indices of the prompts whose record has no reference answer; their `answer` is ""."""

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def identities(self) -> dict[str, str]:
        """SHA-256 of the chosen records (`kept`), which the loader's cursor counts, and of their token ids and answers
        (`tokens`)."""
        if self.hashes is not None:
            return dict(self.hashes)
        identities = Identities()
        for prompt in self.prompts:
            identities.add(int(prompt.id.rpartition("#")[2]), prompt.tokens, prompt.answer)
        return identities.hexdigests()

    def summary(self) -> str:
        text = f"kept {len(self):,} of {self.num_records:,} prompts"
        if self.num_overlong:
            text += f"; {self.num_overlong:,} longer than data.max_prompt_tokens={self.max_prompt_tokens}"
        return text


class Identities:
    """Hashes of `PromptSet.identities`, prompt by prompt."""

    def __init__(self) -> None:
        self._kept, self._tokens = hashlib.sha256(), hashlib.sha256()

    def add(self, row: int, tokens: Sequence[int], answer: str) -> None:
        self._kept.update(b"%d\n" % row)  # not the source's name: the file may have moved
        text = answer.encode("utf-8", "surrogatepass")
        self._tokens.update(f"{len(tokens)} {len(text)}\n".encode() + array("q", tokens).tobytes() + text)

    def hexdigests(self) -> dict[str, str]:
        return {"kept": self._kept.hexdigest(), "tokens": self._tokens.hexdigest()}


def record_name(source: str, row: int, line: int | None) -> str:
    """Name of a record in messages: `train.jsonl#2 (line 3)`, or without the line where the source has none."""
    return f"{source}#{row}" + (f" (line {line})" if line is not None else "")


def encode_question(question: Any, tokenizer: Tokenizer, prompt_format: PromptFormat, name: str) -> list[int]:
    """Encode one question. Raises ValueError with the record's name, or without it for a missing chat template."""
    if prompt_format.chat_template and not tokenizer.has_chat_template:
        return tokenizer.chat([])  # raises, with the fix; the fault is the tokenizer's, not this record's
    for part in (question,) if isinstance(question, str) else (message["content"] for message in question):
        require_text(part, "the prompt", name)
    try:
        tokens = prompt_format.encode(question, tokenizer)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not tokens:
        raise ValueError(f"{name}: the prompt is empty, it has no tokens that a response could follow")
    return tokens


def encode_prompt(
    record: Record, key: str, tokenizer: Tokenizer, prompt_format: PromptFormat, images: PromptImages | None, name: str
) -> list[int]:
    """Encode the question of a record, with its images if a run has some. key: `data.prompt_key`. ValueError names the record."""
    question = question_field(record, key, "data.prompt_key", name, has_images=images is not None)
    encode = partial(encode_question, tokenizer=tokenizer, prompt_format=prompt_format, name=name)
    return encode(question) if images is None else images.encoded(question, images.of_record(record, name), encode, name)


def record_field(record: Record, key: str, option: str, name: str) -> Any:
    """Value of record[key], or the nested value of a key `a.b`. Raises ValueError with the record's keys."""
    if key in record:  # a key may itself contain a dot
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(f"{option}={key}: {name} has no such key; it has {', '.join(map(str, record))}")
        value = value[part]
    return value


def question_field(record: Record, key: str, option: str, name: str, *, has_images: bool = False) -> str | list[Message]:
    """Question of a record: a string, or a non-empty list of messages with string role and content. Raises ValueError otherwise.
    has_images: contents may be lists of parts, of which those with an image become markers (`images.with_markers`)."""
    value = record_field(record, key, option, name)
    if has_images:
        value = with_markers(value, f"{option}={key}: {name}")
    if isinstance(value, str):
        return value
    if is_messages(value):
        return value
    raise ValueError(f"{option}={key}: {name} holds {shorten(value)}, not a string or a list of chat messages (role, content)")


def answer_field(record: Record, key: str, option: str, name: str) -> str:
    """Reference answer of a record: a string, or the text of a number or truth value. Raises ValueError otherwise.
    A number of JSON has its text there, and one of parquet its digits: 72 and not 72.0, since a missing value made it a double."""
    value = record_field(record, key, option, name)
    # The text of null would be None, that of a list Python's notation: no response would ever equal it.
    if value is None or isinstance(value, (Mapping, list, bytes)) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{option}={key}: {name} holds {shorten(value)}, not a string or a number")
    return require_text(_answer_text(value), "the answer", name)


def answer_or_none(record: Record, key: str) -> str | None:
    """Reference answer as `answer_field`; None for a record without one."""
    try:
        return answer_field(record, key, "", "")
    except ValueError:  # an error only where something reads it
        return None


def _answer_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"  # as JSON has them
    if isinstance(value, Written):
        return value.text
    if isinstance(value, float):
        import numpy  # a command with a wrong key ends before anything heavy is imported

        return numpy.format_float_positional(value, trim="-")
    return f"{value:f}" if isinstance(value, Decimal) else str(value)


def require_text(text: str, part: str, name: str) -> str:
    """Return the text. Raises ValueError if it holds half of a surrogate pair, which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("ascii", "backslashreplace").decode()
        raise ValueError(f"{name}: {part} holds {half} at character {error.start}, half of a surrogate pair; correct it") from None
    return text


def is_messages(value: Any) -> TypeGuard[list[Message]]:
    """True for a list of chat messages, at least one, with string role and content."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def shorten(value: Any) -> str:
    """Text of a value in a message, at most 80 characters."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
