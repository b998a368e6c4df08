"""Token ids of a prompt with its response as a reward model reads them: its own template and tokenizer, whatever the policy's are.

The policy's ids are never used, also where both have one tokenizer: a sampled response need not be the ids that its text has.
"""

from __future__ import annotations

from dataclasses import dataclass

from megappo.data.prompts import Prompt, PromptFormat, question_field
from megappo.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class RewardText:
    """Format of the scored text.

    tokenizer, chat_template: the reward model's. prompt_key, prompt_format: of the prompts (section `data`, or those of their
    evaluation): the model sees the same messages as the policy. pad_id: of the model's config.json, None without. max_tokens: the
    model's positions.
    """

    tokenizer: Tokenizer
    chat_template: bool
    prompt_key: str
    prompt_format: PromptFormat
    pad_id: int | None
    max_tokens: int

    def encode(self, prompt: Prompt, response: str) -> list[int]:
        """Ids of the whole text, whose last one is where transformers reads the score.

        ValueError, without the prompt's name: a template that refuses the messages, chat messages without template, no ids.
        """
        question = question_field(prompt.record, self.prompt_key, "data.prompt_key", prompt.id)
        if self.chat_template:
            messages = self.prompt_format.messages(question)
            ids = self.tokenizer.conversation([*messages, {"role": "assistant", "content": response}])
        elif isinstance(question, str):
            ids = self.tokenizer.encode_prompt(question + self.prompt_format.prompt_suffix + response)
        else:
            raise ValueError("the prompt is a list of chat messages, which needs reward_model.chat_template=true")
        # transformers passes over a last token that is the padding's id, also where it is none (pad = eos). What follows the
        # token of the score does not change it.
        end = len(ids)
        while end > 1 and ids[end - 1] == self.pad_id:
            end -= 1
        if not ids:
            raise ValueError("the text has no tokens for the reward model")
        return ids[:end]

    def fitted(self, ids: list[int]) -> list[int]:
        """The ids without those at the front that exceed the model's positions: the response and its end stay."""
        return ids[-self.max_tokens :]
