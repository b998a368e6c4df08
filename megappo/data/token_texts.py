"""Text of sampled tokens: of a response for rewards and environments, and of every single token for logs and pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megappo.data.tokenizers import Tokenizer

# Tokens that wait for the end of a character before the whole start is decoded again. UTF-8 has at most 4 bytes, and a token at
# least one; only decoders that look further ahead get there.
LONGEST_WAIT = 8


def response_text(tokens: Sequence[int], tokenizer: Tokenizer, stop: Sequence[str] = ()) -> str:
    """Text of a response without the end-of-sequence token, up to the first of the stop strings."""
    ids = list(tokens)
    if ids and ids[-1] in tokenizer.eos_ids:
        ids.pop()
    text = tokenizer.decode(ids)
    ends = [end for string in stop if (end := text.find(string)) >= 0]
    return text[: min(ends)] if ends else text


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """One text per id, special tokens by name; joined they are `tokenizer.decode_all(ids)`.
    A character whose bytes are spread over several tokens is the text of the last of them, and the others have ""."""
    whole = tokenizer.decode_all(ids)
    texts: list[str] = []
    # whole[:told] is the text of ids[:settled]; decoding starts at `start` before it, as some decoders drop a leading space.
    start = settled = told = shown = 0
    for index in range(len(ids)):
        new = tokenizer.decode_all(ids[start : index + 1])[len(tokenizer.decode_all(ids[start:settled])) :]
        same = told + _common_prefix(new, whole, told)
        if same - told == len(new):
            start, settled, told = settled, index + 1, same
        elif index - settled >= LONGEST_WAIT:
            same = _common_prefix(tokenizer.decode_all(ids[: index + 1]), whole, 0)
            start, settled, told = settled, index + 1, max(told, same)
        end = max(shown, same)
        texts.append(whole[shown:end])
        shown = end
    if texts:
        texts[-1] += whole[shown:]
    return texts


def special_ids(ids: Iterable[int], tokenizer: Tokenizer) -> list[int]:
    """Ids among these that stand for no text: ends of sequences, starts of turns, padding. Ascending, without repetition."""
    return sorted(one for one in set(ids) if not tokenizer.decode([one]) and tokenizer.decode_all([one]))


def _common_prefix(text: str, other: str, start: int) -> int:
    if other.startswith(text, start):
        return len(text)
    return next(i for i, character in enumerate(text) if other[start + i : start + i + 1] != character)
