"""Text of an error in one line, for the messages of all parts. Imports nothing of megappo."""

from __future__ import annotations


def first_line(error: BaseException, *, kind: bool = False) -> str:
    """First line with text of the error's message, its kind where there is none. kind: put it in front: `OSError: disk full`."""
    name = type(error).__name__
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if not text:
        return name
    return f"{name}: {text}" if kind else text
