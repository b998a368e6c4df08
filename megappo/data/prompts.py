"""Prompts of a run: records -> token ids, the overlong filter, and the resumable order of visits.

`sources.py` reads files. Every rank builds the same PromptSet and the same loader, so nothing is communicated.
"""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megappo.data.tokenizers import Message, Tokenizer

Record = Mapping[str, Any]


@dataclass(frozen=True)
class PromptFormat:
    """Format of a prompt; the fields are the keys of the same name under `data`."""

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
        """Messages of a question, with the suffix behind the last one and the system message in front."""
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        completed = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + self.prompt_suffix}]
        if self.system_prompt is None:
            return completed
        if messages[0]["role"] == "system":
            raise ValueError("the question has a system message of its own: unset data.system_prompt")
        return [{"role": "system", "content": self.system_prompt}, *completed]


@dataclass(frozen=True)
class Prompt:
    """One question. id: `source#row` (row counts from 0, before filtering). text: the question without template and suffix.
    line: of the record in its file, from 1; None if it has none."""

    id: str
    tokens: tuple[int, ...]
    text: str
    answer: str
    record: Record
    line: int | None = None

    @property
    def place(self) -> str:
        """The id, with the line in the file where there is one: `train.jsonl#2 (line 3)`."""
        return self.id if self.line is None else f"{self.id} (line {self.line})"


@dataclass(frozen=True)
class PromptSet:
    """Prompts of at most max_prompt_tokens tokens, in the order of the records. source_sha256: of the source's content."""

    prompts: tuple[Prompt, ...]
    num_records: int
    num_overlong: int
    max_prompt_tokens: int
    source_sha256: str = ""

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def identities(self) -> dict[str, str]:
        """SHA-256 of the choice of records (`kept`), which gives the loader's cursor its meaning, and of their token ids and
        answers (`tokens`), in order."""
        kept, tokens = hashlib.sha256(), hashlib.sha256()
        for prompt in self.prompts:
            kept.update(prompt.id.rpartition("#")[2].encode() + b"\n")  # the row: the file may have moved
            answer = prompt.answer.encode("utf-8", "surrogatepass")
            tokens.update(f"{len(prompt.tokens)} {len(answer)}\n".encode() + array("q", prompt.tokens).tobytes() + answer)
        return {"kept": kept.hexdigest(), "tokens": tokens.hexdigest()}

    def summary(self) -> str:
        text = f"kept {len(self):,} of {self.num_records:,} prompts"
        if self.num_overlong:
            text += f"; {self.num_overlong:,} longer than data.max_prompt_tokens={self.max_prompt_tokens}"
        return text


def build_prompts(
    records: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    source: str,
    prompt_key: str,
    answer_key: str,
    prompt_format: PromptFormat,
    max_prompt_tokens: int,
    overlong: Literal["filter", "error"] = "filter",
    limit: int | None = None,
    lines: Sequence[int] | None = None,
) -> PromptSet:
    """Tokenise every record once (GSM8K: 1 s). `source` names the data in ids and messages, `lines` the records' lines in its file;
    `limit` bounds the number of prompts.

    ValueError, one line: a key that a record lacks (its keys are listed), a question or an answer of the wrong type, a prompt
    without tokens, a prompt longer than max_prompt_tokens with overlong="error", or nothing left.
    """
    kept: list[Prompt] = []
    overlong_prompts: list[tuple[str, int]] = []
    for row, record in enumerate(records):
        if limit is not None and len(kept) == limit:
            break
        name = record_name(source, row, lines)
        question = question_field(record, prompt_key, "data.prompt_key", name)
        answer = answer_field(record, answer_key, name)
        tokens = encode_question(question, tokenizer, prompt_format, name)
        if len(tokens) > max_prompt_tokens:
            overlong_prompts.append((name, len(tokens)))
        else:
            text = question if isinstance(question, str) else question[-1]["content"]
            kept.append(Prompt(f"{source}#{row}", tuple(tokens), text, answer, record, None if lines is None else lines[row]))
    seen = len(kept) + len(overlong_prompts)
    built = PromptSet(tuple(kept), seen, len(overlong_prompts), max_prompt_tokens)
    if overlong_prompts and overlong == "error":
        name, length = max(overlong_prompts, key=lambda pair: pair[1])
        raise ValueError(
            f"{len(overlong_prompts):,} of {seen:,} prompts are longer than data.max_prompt_tokens={max_prompt_tokens} "
            f"(longest: {name}, {length} tokens): raise it, or set data.overlong=filter to leave them out"
        )
    if not kept:
        raise ValueError(f"no prompts are left of {source}: {built.summary()}")
    return built


def record_name(source: str, row: int, lines: Sequence[int] | None) -> str:
    """Name of a record in messages: `train.jsonl#2 (line 3)`, or without the line where the source has none."""
    return f"{source}#{row}" + (f" (line {lines[row]})" if lines is not None else "")


def encode_question(question: Any, tokenizer: Tokenizer, prompt_format: PromptFormat, name: str) -> list[int]:
    """Encode one question. ValueError with the record's name, or without it for a missing chat template."""
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


def record_field(record: Record, key: str, option: str, name: str) -> Any:
    """record[key], or the nested value of a key `a.b`. ValueError lists the record's keys."""
    if key in record:  # a key may itself contain a dot
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(f"{option}={key}: {name} has no such key; it has {', '.join(map(str, record))}")
        value = value[part]
    return value


def question_field(record: Record, key: str, option: str, name: str) -> str | list[Message]:
    """Question of a record: a string, or a non-empty list of messages with string role and content. ValueError otherwise."""
    value = record_field(record, key, option, name)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_message(m) for m in value):
        return value
    raise ValueError(f"{option}={key}: {name} holds {_shorten(value)}, not a string or a list of chat messages (role, content)")


def answer_field(record: Record, key: str, name: str) -> str:
    """Reference answer of a record: a string, or the text of a number or truth value. ValueError otherwise."""
    value = record_field(record, key, "data.answer_key", name)
    # The text of null would be None, that of a list Python's notation: no response would ever equal it.
    if value is None or isinstance(value, (Mapping, list, bytes)) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"data.answer_key={key}: {name} holds {_shorten(value)}, not a string or a number")
    return require_text(str(value), "the answer", name)


def require_text(text: str, part: str, name: str) -> str:
    """The text itself. ValueError if it holds half of a surrogate pair, which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("ascii", "backslashreplace").decode()
        raise ValueError(f"{name}: {part} holds {half} at character {error.start}, half of a surrogate pair; correct it") from None
    return text


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _shorten(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class PromptLoader:
    """Prompts of each step: an endless, resumable walk through seeded permutations, one per epoch.

    No prompt is dropped: a step at the end of an epoch takes the rest from the next one. So every prompt is visited exactly once
    per epoch, and only a step across an epoch's end can hold a prompt twice. The permutation of an epoch depends on
    (seed, epoch) alone; without shuffle it is the order of the data.
    """

    def __init__(self, num_prompts: int, prompts_per_step: int, shuffle: bool, seed: int) -> None:
        if prompts_per_step > num_prompts:
            raise ValueError(
                f"data.prompts_per_step={prompts_per_step} is more than the {num_prompts:,} prompts: lower it or add data"
            )
        self.num_prompts = num_prompts
        self.prompts_per_step = prompts_per_step
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.index = 0
        self._order = self._permutation(0)

    def num_steps(self, epochs: int = 1) -> int:
        """Fewest steps that visit every prompt `epochs` times: ceil(epochs * num_prompts / prompts_per_step)."""
        # The last step may reach into the next epoch.
        return -(-epochs * self.num_prompts // self.prompts_per_step)

    @property
    def epochs_done(self) -> int:
        """Whole passes over the prompts so far."""
        return self.epoch + (self.index == self.num_prompts)

    @property
    def steps_per_epoch(self) -> int:
        return self.num_steps(1)

    def next_step(self) -> list[int]:
        """Advance the cursor; returns [prompts_per_step] indices of prompts."""
        chosen: list[int] = []
        while len(chosen) < self.prompts_per_step:
            if self.index == self.num_prompts:
                self.epoch, self.index = self.epoch + 1, 0
                self._order = self._permutation(self.epoch)
            taken = self._order[self.index : self.index + self.prompts_per_step - len(chosen)]
            self.index += len(taken)
            chosen += taken
        return chosen

    def state_dict(self) -> dict[str, int]:
        """Cursor, and the settings that it is valid for. JSON-compatible."""
        return {
            "epoch": self.epoch,
            "index": self.index,
            "num_prompts": self.num_prompts,
            "shuffle": int(self.shuffle),
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the saved run's last prompt. prompts_per_step may differ; ValueError if data, shuffle or seed do."""
        for name, option in (("num_prompts", "data.train"), ("shuffle", "data.shuffle"), ("seed", "run.seed")):
            mine = int(getattr(self, name))
            if state[name] != mine:
                raise ValueError(
                    f"cannot resume: {option} changed ({name} was {state[name]}, is {mine}); restore it or start a new run"
                )
        self.epoch, self.index = state["epoch"], state["index"]
        self._order = self._permutation(self.epoch)

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(self.num_prompts))
        if self.shuffle:
            # Seeding by a string hashes all of it (SHA-512); random.Random keeps its sequence across Python versions.
            random.Random(f"prompts {self.seed} {epoch}").shuffle(order)
        return order
