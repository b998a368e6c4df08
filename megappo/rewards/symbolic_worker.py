"""Worker process of `symbolic.py`: answer each question, one JSON object per line, with one line; end with the input.

Run as a file, not imported: it needs nothing of megappo, so it starts in the time that math-verify takes to import (0.3 s).
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import resource
import signal
import sys
from typing import Any

from math_verify import parse, verify

# math-verify annotates int, and takes None for no limit of its own, which would need SIGALRM.
_NO_TIMEOUT: Any = None
_DELIMITER = re.compile(r"(?<!\\)\$")
_DELIMITERS = re.compile(r"^\$+|(?<!\\)\$+$")
_MIXED_PERCENT = re.compile(r"(\d\s*\\[dt]?frac\{\d+\}\{\d+\})\s*\\%")
_MEMORY_LIMIT = 4 << 30  # bytes of address space; only big integers come near it


def main() -> None:
    cpu_limit_s = float(sys.argv[1])
    _prepare_signals()
    _end_with(int(sys.argv[2]))
    _limit_memory()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing but replies may reach the pipe
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # CPU time: a busy machine decides no differently
        reply = _compare(question["answer"], question.get("response")) if "answer" in question else _classes(question["responses"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _compare(answer: str, response: str | None) -> dict[str, object]:
    """Read the answer, and compare the response with it if there is one. `usable`: if the answer is an expression."""
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
    """Put a bare answer, or one between dollar signs, into a box, so that math-verify reads all of it; keep other texts.

    `\\$` is money and delimits no mathematics.
    """
    bare = _DELIMITERS.sub("", answer.strip())
    return answer if "\\boxed" in bare or _DELIMITER.search(bare) else f"\\boxed{{{bare}}}"


def _plain(text: str) -> str:
    """Rewrite notation that math-verify misreads: `33\\frac{1}{3}\\%`, to it 33 / 300, and the colon of `3\\text{:}30`, to it 3."""
    return _MIXED_PERCENT.sub(r"\1", text).replace("\\text{:}", ":")


def _limit_memory() -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_LIMIT), hard))


def _prepare_signals() -> None:
    """Let SIGPROF end the process, and ignore requests to stop, which are the parent's business."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel acts on it, even while Python is inside C code
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)


def _end_with(parent: int) -> None:
    """`resilience.helpers.end_with`, which cannot be imported here."""
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


if __name__ == "__main__":
    main()
