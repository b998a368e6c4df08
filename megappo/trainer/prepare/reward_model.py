"""Checks a reward model checkpoint: one label, a head, a tokenizer. `reward_text.py` prepares its texts. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megappo.config.errors import ConfigError, problem
from megappo.config.role_sections import RewardModelConfig
from megappo.data.tokenizers import Tokenizer, find_tokenizer
from megappo.models.arch import ModelArch
from megappo.models.classifier import check_classifier, check_head

KEY = "reward_model"


def check_reward_model(path: str, arch: ModelArch, need_weights: bool) -> None:
    """ValueError, without the key, for a checkpoint that cannot score a sequence. need_weights: also look for its head."""
    check_classifier(path)
    if need_weights:
        check_head(path, arch.hidden_size)


def find_reward_tokenizer(settings: RewardModelConfig) -> Callable[[], Tokenizer]:
    """Return the reader of the reward model's tokenizer, as `find_tokenizer`. ConfigError, one line, if there is none."""
    return _in_words_of_role(settings, lambda: find_tokenizer(tokenizer_of(settings)[1]))


def load_reward_tokenizer(settings: RewardModelConfig) -> Tokenizer:
    """Load the reward model's tokenizer. ConfigError, one line, if there is none or it cannot be read."""
    return _in_words_of_role(settings, find_reward_tokenizer(settings))


def tokenizer_of(settings: RewardModelConfig) -> tuple[str, str]:
    """Return (key that names the tokenizer, path)."""
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
