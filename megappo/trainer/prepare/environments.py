"""Loads the environment of a configuration, and tries its text format before a model is built."""

from __future__ import annotations

from megappo.config.errors import ConfigError, problem
from megappo.config.schema import TrainConfig
from megappo.data.conversation import Conversation
from megappo.data.tokenizers import Tokenizer
from megappo.rollout.environment import PreparedEnvironment
from megappo.rollout.turn import USE
from megappo.runtime.user_code import OwnCode

GROUP = "megappo.environments"
KEY = "rollout.environment"


def load_environment(config: TrainConfig, tokenizer: Tokenizer) -> PreparedEnvironment | None:
    """Load `rollout.environment`; None if it is not set. ConfigError, one line, if its code or the chat template cannot be used."""
    settings = config.rollout.environment
    if settings is None:
        return None
    code = OwnCode(GROUP, settings.path, settings.function, settings.entry_point, settings.args)
    key, value = ("path", settings.path) if settings.path is not None else ("entry_point", settings.entry_point)
    try:
        function = code.load(USE)
    except ValueError as error:
        raise ConfigError(problem(f"{KEY}.{key}", value, str(error))) from error
    try:
        conversation = Conversation(tokenizer, config.data.chat_template)
    except ValueError as error:
        fix = f"{error}; or set data.chat_template to false, and observations are bare text"
        raise ConfigError(problem(f"{KEY}.{key}", value, fix)) from error
    return PreparedEnvironment(settings, function, code.as_read(function), conversation)
