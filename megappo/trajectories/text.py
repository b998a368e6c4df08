"""A record of a trajectory as Markdown, for trackers that show texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LONGEST = 4000  # characters of a prompt or a response


def as_markdown(record: Mapping[str, Any], longest: int = LONGEST) -> str:
    """Render one record of `trainer/trajectories.py`: its facts, prompt and response as code, which nothing in them can end. A
    longer text is cut in the middle, and says so."""
    tokens = len(record.get("response_tokens", ()))
    end = {"length": "cut by the length limit", "window": "goes on"}.get(str(record.get("finish")), "stop")
    facts = [f"**score {_figure(record.get('score'))}**"]
    facts += [f"{_plain(name)} {_figure(value)}" for name, value in record.get("parts", {}).items()]
    facts += [f"{tokens} tokens", end, f"sample {record.get('sample', '?')} of `{_plain(record.get('id', '?'))}`"]
    answer = str(record.get("answer", ""))
    blocks = [", ".join(facts), "Prompt:", _code(str(record.get("prompt", "")), longest)]
    blocks += ["Response:", _code(str(record.get("response", "")), longest)]
    if answer:
        blocks += ["Answer:", _code(answer, longest)]
    return "\n\n".join(blocks) + "\n"


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:g}"


def _plain(text: object) -> str:
    """A name on one line, without the characters that would end its place in the line."""
    return re.sub(r"[\s`*<>\[\]|]+", " ", str(text)).strip()


def _code(text: str, longest: int) -> str:
    text = text.encode("utf-8", "replace").decode()  # half a surrogate pair has no UTF-8
    if len(text) > longest:
        left = longest // 2
        text = f"{text[:left]}\n[... {len(text) - 2 * left:,} characters left out ...]\n{text[-left:]}"
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
