"""Conversations to learn from: chat messages as the tokenizer's template writes them, and the tokens that the assistant says.
With generation markers in the template ({% generation %}) those are what the markers enclose; otherwise an assistant's turn is what
the template adds to the messages before it, up to the end-of-sequence id that ends the turn."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from megappo.data.prompts import require_text
from megappo.data.tokenizers import HuggingFaceTokenizer, Tokenizer

Turns = Literal["all", "last"]
ASSISTANT = "assistant"


def messages_of(value: Any, option: str, name: str) -> list[dict[str, Any]]:
    """Check the messages of a record: a list of mappings with a role, and a text or tool calls; the last one is the assistant's.
    Keys that are null are dropped, as columns of parquet have them. Raises ValueError with the record's name."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{option}: {name} holds no list of chat messages (role, content)")
    found = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{option}: message {number} of {name} is no chat message (role, content)")
        kept = {key: one for key, one in message.items() if one is not None}
        content = kept.get("content", "" if kept.get("tool_calls") else None)
        if not isinstance(content, str):
            raise ValueError(f"{option}: message {number} of {name} has neither a text as content nor tool_calls")
        if kept["role"] == ASSISTANT and not content and not kept.get("tool_calls"):
            raise ValueError(f"{option}: message {number} of {name}, of the assistant, is empty; remove the record")
        require_text(content, f"message {number}", name)
        found.append({**kept, "content": content})
    if found[-1]["role"] != ASSISTANT:
        raise ValueError(
            f"{option}: {name} ends with a message of the {found[-1]['role']}, after which nothing is learned; remove it"
        )
    return found


def learned_tokens(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, turns: Turns, tokenizer: Tokenizer
) -> tuple[list[int], list[int]]:
    """Return (token ids of a conversation, spans [begin, end) of the assistant's tokens, one after the other). turns: of the
    assistant that are learned. Raises ValueError without a chat template, if the template refuses the messages, or if it writes a
    turn otherwise once others follow."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.conversation([])  # raises: there is no template
        raise AssertionError("only Hugging Face tokenizers have chat templates")
    if (marked := tokenizer.marked(messages, tools)) is not None:
        ids, mask = marked
        borders = spans_of_mask(mask)
        spans = list(zip(borders[::2], borders[1::2]))
    else:
        ids, spans = _turns_by_prefix(messages, tools, turns, tokenizer)
    if not spans:
        raise ValueError("the chat template marks no token of the assistant in it")
    return ids, [border for span in (spans if turns == "all" else spans[-1:]) for border in span]


def spans_of_mask(mask: Sequence[int]) -> list[int]:
    """Return the spans [begin, end) of the ones in a mask of 0 and 1, one after the other."""
    return [place for place, (one, other) in enumerate(pairwise((0, *mask, 0))) if one != other]


def _turns_by_prefix(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, turns: Turns, tokenizer: HuggingFaceTokenizer
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return (ids, spans of the turns) of a template without markers."""
    whole = tokenizer.text_of(messages, tools)
    places = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    borders: list[int] = []
    for place in places if turns == "all" else places[-1:]:
        before, after = tokenizer.text_of(messages[:place], tools, for_answer=True), tokenizer.text_of(messages[: place + 1], tools)
        end = len(os.path.commonprefix([after, whole]))
        # Some templates close a whole conversation, as Phi-3's does with an end-of-sequence piece.
        if not (whole.startswith(before) and len(before) < end and whole.endswith(after[end:])):
            last = place == places[-1]
            fix = "the message before it does not stay as it was asked" if last else "set data.turns to last"
            raise ValueError(f"the chat template writes message {place} otherwise once others follow; {fix}")
        borders += [len(before), end]
    ids, cuts = tokenizer.encode_cut(whole, borders)
    return ids, [_ended(ids, begin, end, tokenizer.eos_ids) for begin, end in zip(cuts[::2], cuts[1::2])]


def _ended(ids: Sequence[int], begin: int, end: int, eos_ids: Sequence[int]) -> tuple[int, int]:
    """Cut a turn behind the first id that ends a response: what follows is the template's, such as a line break."""
    return begin, next((place + 1 for place in range(begin, end) if ids[place] in eos_ids), end)
