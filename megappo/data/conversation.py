"""Token ids that continue a conversation after a turn of the policy: what an environment says, up to the next turn."""

from __future__ import annotations

from megappo.data.tokenizers import Message, Tokenizer

_QUESTION: Message = {"role": "user", "content": "?"}
_ANSWER: Message = {"role": "assistant", "content": "."}


class Conversation:
    """Format of the messages after a turn: the chat template's, or the bare text.
    Turns are never encoded again: a sampled response need not be the ids that its text has. Raises ValueError, one line, for a
    template that does not end an answer by an id that ends a response."""

    def __init__(self, tokenizer: Tokenizer, chat_template: bool) -> None:
        self._tokenizer, self._chat = tokenizer, chat_template
        if chat_template:
            self._begin = tokenizer.chat([_QUESTION])
            self.follow(_QUESTION, ended=True)

    def follow(self, message: Message, *, ended: bool) -> list[int]:
        """Ids of a message that follows a turn, and of the start of the next one.
        ended: the turn's last token ends a response; if not, as after a stop string, the template's end of an answer comes
        first. Raises ValueError, one line, for a message that the template refuses."""
        if not self._chat:
            return self._tokenizer.encode(message["content"])
        ids = self._tokenizer.chat([_QUESTION, _ANSWER, message])
        end = self._end_of_answer(ids)
        return ids[end + 1 :] if ended else ids[end:]

    def ended(self, turn: list[int]) -> list[int]:
        """Ids of a turn, with the template's end of an answer if it was cut before one."""
        if not self._chat or (turn and turn[-1] in self._tokenizer.eos_ids):
            return turn
        ids = self._tokenizer.chat([_QUESTION, _ANSWER, _QUESTION])
        return [*turn, ids[self._end_of_answer(ids)]]

    def cut(self, text: str, max_tokens: int | None) -> str:
        """Cut the text after so many tokens; None cuts nothing."""
        ids = [] if max_tokens is None else self._tokenizer.encode(text)
        if max_tokens is None or len(ids) <= max_tokens:
            return text
        return self._tokenizer.decode(ids[:max_tokens]).rstrip("\ufffd")  # the cut may lie in a character

    def _end_of_answer(self, ids: list[int]) -> int:
        # A template may begin a new answer in another way than it shows an earlier one, for example with an open thought.
        same = next((i for i, (a, b) in enumerate(zip(self._begin, ids)) if a != b), len(self._begin))
        end = next((i for i in range(same, len(ids)) if ids[i] in self._tokenizer.eos_ids), None)
        if end is None:
            raise ValueError(
                f"the chat template of {self._tokenizer.path} ends no answer by one of the ids that end a response "
                f"({', '.join(map(str, self._tokenizer.eos_ids))}); add its id to eos_token_id of generation_config.json"
            )
        return end
