"""Writes a small real Hugging Face tokenizer: byte-level BPE, bos in front of prompts, a ChatML template, two eos ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "What is 12 + 34? The answer is 46.",
    "Natalia sold clips to 48 of her friends in April.\n#### 72",
    "How many?  Twice as much.",
]


def write_hf_tokenizer(directory: Path, texts: Sequence[str] = TEXTS, vocab_size: int = 30000, **config: object) -> Path:
    """tokenizer.json, tokenizer_config.json (with these keys; None removes one) and generation_config.json.

    vocab_size: the most ids that training on `texts` may end with.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    default = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    settings = {key: value for key, value in {**default, **config}.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
    return directory
