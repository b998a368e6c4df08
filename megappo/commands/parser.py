"""The parser of `megappo`, and how a command adds its own arguments to it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from megappo.config.errors import ConfigError
from megappo.telemetry.console import flush_output

Run = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, whose help does not pass over a failed write."""

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)
        flush_output()  # before argparse ends the process

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


class AddCommand(Protocol):
    """Adds one command and returns its parser. run: takes the arguments and returns the exit code. text, more: its help.

    config: how CONFIG is written, with the overrides behind it; None for a command without.
    """

    def __call__(self, name: str, run: Run, text: str, more: str = "", *, config: str | None = "CONFIG") -> Parser: ...
