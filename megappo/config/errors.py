"""Errors in the configuration. The command line prints their one line and exits with code 2."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

from megappo.config.redaction import hide_secrets

SHOWN_CHARACTERS = 240  # long enough for a path, which is useless without its end


class ConfigError(ValueError):
    """A mistake in the configuration: one line that names the key, the value and the fix, with secrets hidden."""

    def __init__(self, text: str) -> None:
        super().__init__(hide_secrets(text))


class ConfigErrors(ConfigError):
    """Independent mistakes in the configuration: one line each, printed together, so that a user mends them at once."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(map(hide_secrets, lines))


@contextmanager
def about(key: str, value: Any) -> Iterator[None]:
    """Raise a ValueError of the body, whose text is reason and fix, as a ConfigError that names the key and the value."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(problem(key, value, str(error))) from error


def show(value: Any) -> str:
    """Write a value on one line in YAML's flow style, cut to SHOWN_CHARACTERS."""
    text = json.dumps(value, ensure_ascii=False, default=_plain)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def problem(key: str, value: Any, fix: str) -> str:
    """Format a message about a key: `policy.parallel.tp = 0: must be >= 1`."""
    return f"{key} = {show(value)}: {fix}"
