"""Reward models for tests: tiny classifiers of several families with tokenizers of their own, and the scores of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.data.tokenizer_files import TEMPLATE, write_hf_tokenizer
from tests.models.checkpoints import write_checkpoint

SYSTEM, SUFFIX = "Judge.", " Think."
# One conversation of several turns; the others are plain questions.
QUESTIONS: tuple[Any, ...] = (
    "What is 12 + 34?",
    [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "Twice as much."},
        {"role": "user", "content": "Clips?"},
    ],
    "Natalia sold clips to 48 of her friends in April.",
    "x",
    "How many?",
)
RESPONSES = ("The answer is 46.", "48", "", "#### 72\nNatalia sold clips to 48 of her friends", "12 12 12\n")
EOS_AT_END = TEMPLATE.replace(
    "{% if add_generation_prompt %}", "{% if not add_generation_prompt %}</s>{% endif %}" + "{% if False %}"
)
VOCAB_SIZE = 400


def write_reward_model(folder: Path, case: str, *, template: str | None = TEMPLATE, pad: int | None = 0, seed: int = 0) -> Path:
    """A classifier with one label and its tokenizer. pad: `pad_token_id` of config.json."""
    write_checkpoint(folder, case, head="SequenceClassification", seed=seed, num_labels=1, vocab_size=VOCAB_SIZE, pad_token_id=pad)
    return write_hf_tokenizer(folder, chat_template=template)


def messages_of(question: Any) -> list[dict[str, str]]:
    """The conversation as a user would write it: system message, suffix behind the last message."""
    turns = [{"role": "user", "content": question}] if isinstance(question, str) else [dict(turn) for turn in question]
    turns[-1]["content"] += SUFFIX
    return [{"role": "system", "content": SYSTEM}, *turns]


def scores_of_transformers(folder: Path, chats: Sequence[Any], responses: Sequence[str], dtype: Any = torch.float32) -> list[float]:
    """Scores one by one, without padding. chats: messages, or a text that needs no template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    scores = []
    for chat, response in zip(chats, responses):
        if isinstance(chat, str):
            ids = [tokenizer.bos_token_id, *tokenizer(chat + response, add_special_tokens=False)["input_ids"]]
        else:
            ids = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": response}], return_dict=False)
        with torch.no_grad():
            scores.append(float(model(torch.tensor([ids])).logits[0, 0]))
    return scores


def config_of(folder: Path, model: Path, parallel: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Configuration of a run whose reward model is `model`; changes are keys of its section."""
    section = {"model": str(model), "dtype": "fp32", "parallel": dict(parallel), "micro_batch_tokens": 64, **changes}
    return {
        "run": {"device": "cpu", "num_ranks": 2, "output_dir": str(folder / "runs")},
        "policy": {"model": str(folder / "policy")},
        "rollout": {"engine": "megatron", "max_response_tokens": 16},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 64, "system_prompt": SYSTEM, "prompt_suffix": SUFFIX},
        "reward": {"parts": [{"model": "reward_model"}, {"name": "has_eos", "weight": 0.1}]},
        "reward_model": section,
    }
