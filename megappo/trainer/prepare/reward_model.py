"""Checks a reward model: its checkpoint has one label, a head and a tokenizer; its template takes the prompts, it knows the
tokenizer's ids, a response has room. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import megappo.data
import megappo.trainer.prepare
from megappo.config.errors import ConfigError, problem
from megappo.config.role_sections import RewardModelConfig
from megappo.config.schema import DataConfig, TrainConfig
from megappo.data.cache import Cache, hash_of_modules
from megappo.data.images import PromptImages, key_of_images
from megappo.data.prompt_rows import format_of
from megappo.data.prompts import PromptSet
from megappo.data.reward_text import RewardText
from megappo.data.tokenizers import Tokenizer, find_tokenizer
from megappo.models.families.registry import FAMILIES
from megappo.models.hf_config import arch_for, read_config, text_config
from megappo.models.hf_tensors import CheckpointReader
from megappo.models.vision_families import VISION_FAMILIES, places_of
from megappo.models.weight_map import VALUE_HEAD

HEAD = "SequenceClassification"
_BIAS = VALUE_HEAD.removesuffix("weight") + "bias"
_SHOWN = 4  # labels that a message names


def is_classifier(config: Mapping[str, Any]) -> bool:
    return str((config.get("architectures") or [""])[0]).endswith(f"For{HEAD}")


def check_classifier(path: str | Path) -> None:
    """Raise ValueError unless config.json is that of a sequence classifier with one label."""
    config = read_config(path)
    if not is_classifier(config):
        found = (config.get("architectures") or ["no architecture"])[0]
        known = ", ".join(
            [
                *(family.architecture(HEAD) for family in FAMILIES.values()),
                *dict.fromkeys(family.classifier for family in VISION_FAMILIES.values()),
            ]
        )
        raise ValueError(f"is a {found} and has no score of a sequence; use a checkpoint of {known}")
    labels = labels_of(config)
    if len(labels) != 1:
        shown = ", ".join(labels[:_SHOWN]) + (", ..." if len(labels) > _SHOWN else "")
        raise ValueError(f"has {len(labels)} labels ({shown}); a reward model has one (num_labels = 1 in config.json)")


def labels_of(config: Mapping[str, Any]) -> list[str]:
    """Names of the head's rows as transformers reads them: id2label, otherwise num_labels, 2 by default."""
    # num_labels is written by old versions only; transformers prefers it where it contradicts id2label.
    names, count = config.get("id2label") or {}, config.get("num_labels")
    if names and (count is None or count == len(names)):
        return [str(name) for name in names.values()]
    return [f"LABEL_{index}" for index in range(2 if count is None else int(count))]


def check_head(path: str | Path, hidden_size: int) -> None:
    """Raise ValueError unless the weight files hold the head `score.weight` [1, hidden_size], without a bias."""
    reader = CheckpointReader(path, headers_only=True)
    if reader.find(VALUE_HEAD) is None:
        raise ValueError(f"holds no {VALUE_HEAD}, the head that gives the score; export the whole classifier, not its base model")
    reader.slice(VALUE_HEAD, (1, hidden_size))  # raises, with both shapes
    if reader.find(_BIAS) is not None:
        raise ValueError(f"holds {_BIAS}, which transformers' sequence classifiers do not have; it would be left out")


def pad_id_of(path: str | Path) -> int | None:
    """Read `pad_token_id` of config.json: transformers takes the score at the last token that is not padding."""
    return text_config(read_config(path)).get("pad_token_id")


KEY = "reward_model"


def find_reward_tokenizer(config: TrainConfig) -> Callable[[], Tokenizer]:
    """Return the reader of the reward model's tokenizer, as `find_tokenizer`. ConfigError, one line, if there is none. Its template
    gets those of the run's `template_args` that it reads: it is another model's, or the policy's own."""
    settings, variables = config.reward_model, config.data.template_args
    path = tokenizer_of(settings)[1]
    return _in_words_of_role(settings, lambda: find_tokenizer(path, template_args=variables, leave_out_unread=True))


def tokenizer_of(settings: RewardModelConfig) -> tuple[str, str]:
    if settings.tokenizer is not None:
        return f"{KEY}.tokenizer", settings.tokenizer
    return f"{KEY}.model", str(settings.model)


def _in_words_of_role(settings: RewardModelConfig, read: Callable[[], Any]) -> Any:
    """Run `read`; raise a ValueError about a tokenizer as a ConfigError that names the role's key."""
    key, path = tokenizer_of(settings)
    try:
        return read()
    except ValueError as error:
        raise ConfigError(problem(key, path, str(error).replace("data.tokenizer", f"{KEY}.tokenizer"))) from error


@dataclass(frozen=True)
class ScoredTexts:
    """Text format of a run's reward model (None without one) and notes for the plan."""

    text: RewardText | None
    notes: tuple[str, ...] = ()


def load_reward_text(
    config: TrainConfig, sets: Mapping[str, tuple[PromptSet, DataConfig]], cache: Cache, images: PromptImages | None = None
) -> ScoredTexts:
    """Load the reward model's tokenizer and check it against the prompts that it scores, for the text format of the training's
    prompts. sets: key of the configuration -> (prompts, the `data` section that made them). images: of the run. ConfigError, one
    line, for a tokenizer that cannot be read, has ids that the model lacks, or no chat template, and for a prompt that the template
    refuses or that leaves no position for a response."""
    settings = config.reward_model
    if not sets or settings.model is None:
        return ScoredTexts(None)
    arch = arch_for(settings.model, settings.engine)
    key, path = tokenizer_of(settings)
    tokenizer = _in_words_of_role(settings, find_reward_tokenizer(config))
    if tokenizer.vocab_size > arch.vocab_size:
        fix = f"has {tokenizer.vocab_size} ids and {KEY}.model only {arch.vocab_size}; use the tokenizer of the model"
        raise ConfigError(problem(key, path, fix))
    if settings.chat_template and not tokenizer.has_chat_template:
        fix = f"the tokenizer {tokenizer.path} has none; set it to false for plain text, or name a tokenizer with a template"
        raise ConfigError(problem(f"{KEY}.chat_template", True, fix))
    seen = None if images is None else replace(images, places=places_of(settings.model, arch))
    how = {"pad_id": pad_id_of(settings.model), "max_tokens": arch.max_positions, **prompts_read(config.data), "images": seen}
    text = RewardText(tokenizer, settings.chat_template, **how)
    longest = max(_longest(replace(text, **prompts_read(data)), key, prompts, cache) for key, (prompts, data) in sets.items())
    return ScoredTexts(text, _length_notes(longest, config.rollout.max_response_tokens, arch.max_positions))


def prompts_read(data: DataConfig) -> dict[str, Any]:
    """Return the fields of a `RewardText` that depend on a set's prompts; evaluations may have other keys."""
    return {"prompt_key": data.prompt_key, "prompt_format": format_of(data)}


def _longest(text: RewardText, key: str, prompts: PromptSet, cache: Cache) -> int:
    """Return the most tokens of a prompt with an empty response, cached with the prepared data."""
    if not prompts.fingerprint:
        return _read_longest(text, key, prompts)
    facts = {**vars(text), "tokenizer": text.tokenizer.identity(), "prompt_format": asdict(text.prompt_format)}
    facts["images"] = key_of_images(text.images)
    decided_by = {"longest": prompts.fingerprint, "text": facts, "code": hash_of_modules(megappo.data, megappo.trainer.prepare)}
    return cache.value(decided_by, lambda: _read_longest(text, key, prompts))


def _read_longest(text: RewardText, key: str, prompts: PromptSet) -> int:
    longest = 0
    for prompt in prompts.prompts:
        try:
            tokens = len(text.encode(prompt, ""))
        except ValueError as error:
            raise ConfigError(f"{KEY}: {error}; {prompt.place} of {key}") from error
        if tokens >= text.max_tokens:
            fix = "none is left for a response; lower data.max_prompt_tokens, or use a model of more positions"
            place = f"{prompt.place} of {key} takes {tokens} of the {text.max_tokens} positions of the reward model"
            raise ConfigError(f"{KEY}: {place}, {fix}")
        longest = max(longest, tokens)
    return longest


def _length_notes(prompt_tokens: int, response_tokens: int, positions: int) -> tuple[str, ...]:
    if prompt_tokens + response_tokens <= positions:
        return ()
    total = f"the longest prompt has {prompt_tokens} of its tokens, with {response_tokens} of a response"
    return (f"{KEY}: {total} more than its {positions} positions; the front of a longer text is cut, and counted",)
