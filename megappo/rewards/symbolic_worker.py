"""Worker process of `symbolic.py`: answer each question, one JSON object per line, with one line; end with the input.

Run as a file, not imported: it needs nothing of megappo, so it starts in the time that math-verify takes to import (0.3 s).
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from typing import Any

from math_verify import parse, verify

# math-verify annotates int, and takes None for no limit of its own, which would need SIGALRM.
_NO_TIMEOUT: Any = None
_MEMORY_LIMIT = 4 << 30  # bytes of address space; only big integers come near it


def main() -> None:
    cpu_limit_s = float(sys.argv[1])
    _prepare_signals()
    _limit_memory()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing but replies may reach the pipe
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # CPU time: a busy machine decides no differently
        reply = _compare(question["answer"], question["response"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _compare(answer: str, response: str) -> dict[str, object]:
    gold = parse(_boxed(answer), parsing_timeout=_NO_TIMEOUT)
    if not gold:
        return {"error": f"the reference answer {answer[:80]!r} is no mathematical expression"}
    return {"equal": bool(verify(gold, parse(response, parsing_timeout=_NO_TIMEOUT), timeout_seconds=_NO_TIMEOUT))}


def _boxed(answer: str) -> str:
    """Put a bare answer, or one between dollar signs, into a box, so that math-verify reads all of it; keep other texts."""
    bare = answer.strip("$")
    return answer if "\\boxed" in bare or "$" in bare else f"\\boxed{{{bare}}}"


def _limit_memory() -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_LIMIT), hard))


def _prepare_signals() -> None:
    """Let SIGPROF end the process, and ignore Ctrl-C."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel acts on it, even while Python is inside C code
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process


if __name__ == "__main__":
    main()
