"""Worker process of `symbolic.py`. Only that process imports this file: with math-verify it takes 0.3 s."""

from __future__ import annotations

import logging
import re
import resource
import signal
from collections.abc import Mapping
from functools import partial
from typing import Any

from math_verify import parse, verify

from megappo.runtime.helper_process import Answerer

# math-verify annotates int, and takes None for no limit of its own, which would need SIGALRM.
_NO_TIMEOUT: Any = None
_DELIMITER = re.compile(r"(?<!\\)\$")
_DELIMITERS = re.compile(r"^\$+|(?<!\\)\$+$")
_MIXED_PERCENT = re.compile(r"(\d\s*\\[dt]?frac\{\d+\}\{\d+\})\s*\\%")
_MEMORY_LIMIT = 4 << 30  # bytes of address space; only big integers come near it


def answering(cpu_limit_s: float) -> Answerer:
    """Prepare this process and return its answerer, which takes {"answer"}, {"answer", "response"} or {"responses"}."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel acts on it, even while Python is inside C code
    _limit_memory()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    return partial(_answer, cpu_limit_s)


def _answer(cpu_limit_s: float, question: Mapping[str, Any]) -> tuple[str, dict[str, object]]:
    signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # CPU time: a busy machine decides no differently
    reply = _compare(question["answer"], question.get("response")) if "answer" in question else _classes(question["responses"])
    signal.setitimer(signal.ITIMER_PROF, 0)
    return "compared", reply


def _compare(answer: str, response: str | None) -> dict[str, object]:
    """Read the answer, and compare the response with it if there is one. `usable`: the answer is an expression."""
    gold = parse(_boxed(_plain(answer)), parsing_timeout=_NO_TIMEOUT)
    if not gold or response is None:
        return {"usable": bool(gold)}
    found = parse(_plain(response), parsing_timeout=_NO_TIMEOUT)
    return {"usable": True, "equal": bool(verify(gold, found, timeout_seconds=_NO_TIMEOUT))}


def _classes(responses: list[str]) -> dict[str, object]:
    """Number the answers in the order in which they appear; equal ones, as `_compare` compares, have one number."""
    first: list[Any] = []  # of every class
    numbers: list[int | None] = []
    for response in responses:
        found = parse(_plain(response), parsing_timeout=_NO_TIMEOUT)
        same = (number for number, other in enumerate(first) if verify(other, found, timeout_seconds=_NO_TIMEOUT))
        number = next(same, len(first)) if found else None
        if number == len(first):
            first.append(found)
        numbers.append(number)
    return {"classes": numbers}


def _boxed(answer: str) -> str:
    """Put a bare answer, or one between dollar signs, into a box, so that math-verify reads all of it; keep other texts."""
    # `\$` is money and delimits no mathematics.
    bare = _DELIMITERS.sub("", answer.strip())
    return answer if "\\boxed" in bare or _DELIMITER.search(bare) else f"\\boxed{{{bare}}}"


def _plain(text: str) -> str:
    # math-verify reads `33\frac{1}{3}\%` as 33 / 300, and `3\text{:}30` as 3.
    return _MIXED_PERCENT.sub(r"\1", text).replace("\\text{:}", ":")


def _limit_memory() -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_LIMIT), hard))
