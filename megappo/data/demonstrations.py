"""Demonstrations for supervised fine-tuning: prompt and response -> token ids, with a mask of the tokens to learn.

A demonstration has the tokens of a rollout with the same response: the prompt as `prompts.py` builds it, the response encoded on
its own, the end-of-sequence id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megappo.data.packing import PackedBatch, pack
from megappo.data.prompts import PromptFormat, encode_question, question_field, record_field, record_name, require_text
from megappo.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Demonstration:
    """tokens: prompt, response, eos. The loss covers all but the first `prompt_length`."""

    id: str
    tokens: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True)
class DemonstrationSet:
    """Demonstrations of at most max_tokens tokens, in the order of the records."""

    demonstrations: tuple[Demonstration, ...]
    num_records: int
    max_tokens: int

    def __len__(self) -> int:
        return len(self.demonstrations)

    def __getitem__(self, index: int) -> Demonstration:
        return self.demonstrations[index]

    @property
    def num_overlong(self) -> int:
        return self.num_records - len(self)

    def summary(self) -> str:
        text = f"kept {len(self):,} of {self.num_records:,} demonstrations"
        return text + (f"; {self.num_overlong:,} longer than data.max_tokens={self.max_tokens}" if self.num_overlong else "")

    def packed(self, indices: Sequence[int]) -> PackedBatch:
        """Pack these demonstrations, with `response_mask` [T] bool: true on response tokens and eos."""
        chosen = [self.demonstrations[i] for i in indices]
        batch = pack([d.tokens for d in chosen])
        mask = torch.cat([torch.arange(len(d.tokens)) >= d.prompt_length for d in chosen])
        return batch.with_fields(token_fields={"response_mask": mask})


def build_demonstrations(
    records: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    source: str,
    prompt_key: str,
    response_key: str,
    prompt_format: PromptFormat,
    max_tokens: int,
    lines: Sequence[int] | None = None,
) -> DemonstrationSet:
    """Tokenise every record once. Records longer than max_tokens are left out and counted, never cut. `lines`: of the records
    in the file `source`.

    ValueError, one line: a key that a record lacks (its keys are listed), a value of the wrong type, or nothing left.
    """
    kept: list[Demonstration] = []
    for row, record in enumerate(records):
        name = record_name(source, row, lines)
        question = question_field(record, prompt_key, "data.prompt_key", name)
        response = record_field(record, response_key, "data.response_key", name)
        if not isinstance(response, str):
            raise ValueError(f"data.response_key={response_key}: {name} holds a {type(response).__name__}, not a string")
        require_text(response, "the response", name)
        prompt = encode_question(question, tokenizer, prompt_format, name)
        # Encoded on its own: merged with the prompt, the border's tokens would differ from those that the policy samples.
        tokens = (*prompt, *tokenizer.encode(response), tokenizer.eos_id)
        if len(tokens) <= max_tokens:
            kept.append(Demonstration(f"{source}#{row}", tokens, len(prompt)))
    built = DemonstrationSet(tuple(kept), len(records), max_tokens)
    if not kept:
        raise ValueError(f"no demonstrations are left of {source}: {built.summary()}")
    return built
