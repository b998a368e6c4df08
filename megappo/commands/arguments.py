"""Types of command line arguments: parse a text into a value, or raise a one-line error with the expected form."""

from __future__ import annotations

import argparse
from typing import Literal


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
    """`METRIC=VALUE`, a number >= 0."""
    name, found, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not (found and name and 0 <= value < float("inf")):
        raise argparse.ArgumentTypeError(f"{text} is not METRIC=VALUE with a number >= 0, as in kl/per_token=0.001")
    return name, value
