"""The parser of `megappo`, and how a command adds its own arguments to it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Literal, NoReturn, Protocol

from megappo.config.errors import ConfigError
from megappo.telemetry.console import flush_output


def positive_int(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an integer >= 1")
    return int(text)


def step_or_best(text: str) -> int | Literal["best"]:
    if text != "best" and (not text.isdigit() or int(text) < 1):
        raise argparse.ArgumentTypeError(f"{text} is neither an integer >= 1 nor best")
    return "best" if text == "best" else int(text)


def non_negative_int(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not an integer >= 0")
    return int(text)


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number > 0")
    return value


def limit(text: str) -> tuple[str, float]:
    """Parse `METRIC=VALUE` with a number >= 0. ArgumentTypeError for anything else."""
    name, found, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not (found and name and 0 <= value < float("inf")):
        raise argparse.ArgumentTypeError(f"{text} is not METRIC=VALUE with a number >= 0, as in kl/per_token=0.001")
    return name, value


Run = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line (ConfigError) and a help that fails if it cannot be written."""

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)
        flush_output()  # before argparse ends the process

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


class AddCommand(Protocol):
    """Add one command and return its parser. run: maps the arguments to the exit code. text, more: its help. config: how CONFIG and
    the overrides behind it are written; None for a command without them."""

    def __call__(self, name: str, run: Run, text: str, more: str = "", *, config: str | None = "CONFIG") -> Parser: ...
