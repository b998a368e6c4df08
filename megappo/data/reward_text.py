"""Token ids of a prompt with its response as a reward model reads them, in its own template and tokenizer.
The policy's ids are never used, even if both have one tokenizer: a sampled response need not be the ids that its text has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megappo.data.images import IMAGE_BASE, PromptImages
from megappo.data.prompts import Prompt, PromptFormat, question_field
from megappo.data.tokenizers import Message, Tokenizer


@dataclass(frozen=True)
class RewardText:
    """Format of the text that a reward model scores."""

    tokenizer: Tokenizer
    """The reward model's, as is chat_template."""
    chat_template: bool
    prompt_key: str
    prompt_format: PromptFormat
    """Format and key of the prompts (section `data`, or their evaluation): the model sees the same messages as the policy."""
    pad_id: int | None
    """Id in the model's config.json; None if it has none."""
    max_tokens: int
    """Positions of the model."""
    images: PromptImages | None = None
    """Of the prompts, in the places that the model's own checkpoint gives them; None: it sees text alone."""

    def encode(self, prompt: Prompt, response: str) -> list[int]:
        """Ids of the whole text; transformers reads the score at the last one.
        Raises ValueError, without the prompt's name: messages that the template refuses, or messages without a template, or no
        ids."""
        has_images = self.images is not None
        question = question_field(prompt.record, self.prompt_key, "data.prompt_key", prompt.id, has_images=has_images)
        return self.of_question(question, response, () if self.images is None else self.images.shown_in(prompt.tokens))

    def of_question(self, question: str | list[Message], response: str | Sequence[Message], shown: Sequence[int] = ()) -> list[int]:
        """Ids as of `encode`, of a question that a record may lack and of a response that may be several messages. shown: numbers
        of the question's images."""
        if self.images is None:
            return self._ids_of(question, response)
        return self.images.encoded(question, shown, lambda marked: self._ids_of(marked, response), is_answered=bool(response))

    def _ids_of(self, question: str | list[Message], response: str | Sequence[Message]) -> list[int]:
        if self.chat_template:
            messages = self.prompt_format.messages(question)
            answer = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
            ids = self.tokenizer.conversation([*messages, *answer])
        elif isinstance(question, str) and isinstance(response, str):
            ids = self.tokenizer.encode_prompt(question + self.prompt_format.prompt_suffix + response)
        else:
            what = "the prompt is" if not isinstance(question, str) else "a response is"
            raise ValueError(f"{what} a list of chat messages, which needs reward_model.chat_template=true")
        # transformers skips last tokens with the id of padding, even where they are not padding (pad = eos). Tokens after the
        # scored one do not change its score.
        end = len(ids)
        while end > 1 and ids[end - 1] == self.pad_id:
            end -= 1
        if not ids:
            raise ValueError("the text has no tokens for the reward model")
        return ids[:end]

    def fitted(self, ids: list[int]) -> list[int]:
        """Drop ids at the front that exceed the model's positions, and what is left of an image there: the response and its end
        stay."""
        start = max(0, len(ids) - self.max_tokens)
        while 0 < start < len(ids) and ids[start] >= IMAGE_BASE and ids[start] == ids[start - 1]:
            start += 1
        return ids[start:]
