"""The error of a user's mistake in the configuration. The command line prints its one line and leaves with exit code 2."""

from __future__ import annotations

import json
from typing import Any

SHOWN_CHARACTERS = 240  # a path is of no use without its end


class ConfigError(ValueError):
    """A mistake in the configuration: one line that names the key, the value and the fix."""


def show(value: Any) -> str:
    """A value on one line, as it would be written in YAML's flow style, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def problem(key: str, value: Any, fix: str) -> str:
    """The one form of every message about a key: `policy.parallel.tp = 0: must be >= 1`."""
    return f"{key} = {show(value)}: {fix}"
