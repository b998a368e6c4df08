"""The program in a response: its last fenced block of Python."""

from __future__ import annotations

import re

_OPENING = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+.-]*)[^`]*")
_LINE_END = re.compile(r"\r\n|\r|\n")
_PYTHON = ("python", "python3", "py")


def program_of(response: str) -> str | None:
    """Last block fenced as python, python3 or py; else the only block, if its fence names no language; else None.
    A block that the response does not close was cut, and is no program."""
    blocks = _blocks(response)
    named = [text for language, text in blocks if language in _PYTHON]
    if named:
        return named[-1]
    return blocks[0][1] if len(blocks) == 1 and not blocks[0][0] else None


def _blocks(response: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    fence, language, lines = "", "", []
    for line in lines_of(response):
        if not fence:
            if match := _OPENING.fullmatch(line):
                fence, language, lines = match[1], match[2].lower(), []
        elif line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            found.append((language, "\n".join(lines) + "\n"))
            fence = ""
        else:
            lines.append(line)
    return found


def lines_of(text: str) -> list[str]:
    """Lines as Python's source, Markdown and JSON's writers have them: str.splitlines also ends one at U+2028 within a string."""
    lines = _LINE_END.split(text)
    return lines if lines[-1] else lines[:-1]
