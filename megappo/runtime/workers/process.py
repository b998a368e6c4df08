"""A helper process that answers questions, one at a time (`worker.py`): one that takes too long can be ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megappo.runtime.helpers import deaf_to_stop

_WORKER = Path(__file__).with_name("worker.py")
HEADER = 8  # bytes of a message's length, big-endian

Answerer = Callable[[Any], tuple[str, Any]]
"""Answers a question by a word, the name of what became of it, and a value. It raises nothing that the rank could read."""

FAILED = "failed"
"""The word of an answer that is a reason: what went wrong in the worker, one line."""


class WorkerDied(RuntimeError):
    """The process ended in the middle of a question. The message says how: `was ended by SIGSEGV`."""


class CannotSend(ValueError):
    """A value that does not go through a pipe. The message says why."""


def packed(value: Any) -> bytes:
    """The value as it goes through a pipe. CannotSend."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # as pickle refuses a function
        raise CannotSend(str(error)) from error


class WorkerProcess:
    """make: called in the process, once; picklable. timeout_s: wall-clock limit of an answer, None for no limit.

    The process starts with the first question, and ends with the thread that asks and with this object.
    """

    def __init__(self, make: Callable[[], Answerer], timeout_s: float | None) -> None:
        self._make, self._timeout_s = make, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        # The rank's own: processes also start while an engine generates, which sets variables for itself.
        self._environment = dict(os.environ)

    def __call__(self, question: Any) -> tuple[str, Any]:
        """Answer a question, or say by FAILED why `make` gave nothing that could. The next question gets another process after
        WorkerDied, and after TimeoutError: then timeout_s had passed, and the process was ended, with all that it had started.
        CannotSend for the question itself."""
        body = packed(question)
        try:
            if self._process is None and (reason := self._start()) is not None:
                self._end()
                return FAILED, reason
            self._send(body)
            return self._receive(self._timeout_s)
        except TimeoutError:
            self._end()
            raise
        except (EOFError, BrokenPipeError):
            raise WorkerDied(self._fate()) from None

    def close(self) -> None:
        """End the process, also while it works for another thread."""
        self._closed = True
        if (process := self._process) is not None:
            _kill(process)
            process.wait()

    def _start(self) -> str | None:
        """Start the process; None, or why it has no answerer."""
        # -P: the worker's folder must not be searched for modules. In a session of its own, what it starts can be ended with it.
        command = [sys.executable, "-P", str(_WORKER)]
        with deaf_to_stop():
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=self._environment
            )
        # The kernel ends it with this thread, which lives as long as the pool.
        self._send(pickle.dumps({"sys_path": sys.path, "parent": os.getpid()}))
        self._send(pickle.dumps(self._make))
        word, reason = self._receive(None)
        return None if word == "ready" else reason

    def _send(self, body: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(len(body).to_bytes(HEADER, "big") + body)
        self._process.stdin.flush()

    def _receive(self, timeout_s: float | None) -> tuple[str, Any]:
        """Next message; TimeoutError after timeout_s, EOFError if the process has ended."""
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        body = _read(descriptor, int.from_bytes(_read(descriptor, HEADER, deadline), "big"), deadline)
        return pickle.loads(body)

    def _fate(self) -> str:
        if self._closed:
            return "was closed"
        code = self._end(kill=False)
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def _end(self, *, kill: bool = True) -> int:
        """Exit code of the process, once it has ended; the next call starts another."""
        process, self._process = self._process, None
        assert process is not None and process.stdin is not None and process.stdout is not None
        if kill:
            _kill(process)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        return process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # of its session


def _read(descriptor: int, size: int, deadline: float | None) -> bytes:
    chunks = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while len(chunks) < size:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and (left <= 0 or not selector.select(left)):
                raise TimeoutError
            chunk = os.read(descriptor, size - len(chunks))
            if not chunk:
                raise EOFError
            chunks += chunk
    return chunks
