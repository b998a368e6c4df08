"""Reward code of the user in a process of its own (`own_worker.py`): several at once, and one that takes too long can be ended."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.resilience.helpers import deaf_to_stop
from megappo.rewards.base import RewardError, RewardInput, UnusableAnswer, describe

_WORKER = Path(__file__).with_name("own_worker.py")
HEADER = 8  # bytes of a message's length, big-endian

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnCode:
    """Place of a function, with the bytes of its file as they were hashed; those of an installed package are imported again."""

    name: str
    path: str | None
    function: str | None
    source: bytes | None
    entry_point: str | None
    args: Mapping[str, Any]


class OwnProcess:
    """Worker of a pool. timeout_s: wall-clock limit of one call; after it the process is ended and the sample is undecided (None).

    RewardError: the function raised, or its process died. The process ends with the thread that calls, and with this object.
    """

    def __init__(self, code: OwnCode, timeout_s: float | None) -> None:
        self._code, self._timeout_s = code, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._closed, self._undecided = False, 0
        # The rank's own: processes also start while an engine generates, which sets variables for itself.
        self._environment = dict(os.environ)

    def __call__(self, sample: RewardInput) -> Any:
        try:
            if self._process is None:
                self._start()
            self._send(sample)
            state, value = self._receive(self._timeout_s)
        except TimeoutError:
            self._undecided += 1
            text = "%s: no result for %s within %g s, scored 0 (%d so far in this worker)"
            logger.warning(text, self._code.name, sample.sample_id, self._timeout_s, self._undecided)
            self._end()
            return None
        except (EOFError, BrokenPipeError):
            raise RewardError(f"the worker of reward rule {self._code.name} {self._fate()}; {describe(sample)}") from None
        if state == "unusable":
            raise UnusableAnswer(value)
        if state != "scored":
            raise RewardError(f"reward rule {self._code.name} {value}; {describe(sample)}")
        return value

    def close(self) -> None:
        """End the process, also while it works for another thread."""
        self._closed = True
        if (process := self._process) is not None:
            _kill(process)
            process.wait()

    def _start(self) -> None:
        # -P: the worker's folder must not be searched for modules. In a session of its own, what it starts can be ended with it.
        command = [sys.executable, "-P", str(_WORKER)]
        with deaf_to_stop():
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=self._environment
            )
        # The kernel ends it with this thread, which lives as long as the pool.
        self._send({"sys_path": sys.path, "parent": os.getpid(), "code": vars(self._code)})
        state, value = self._receive(None)
        if state != "ready":
            raise RewardError(f"reward rule {self._code.name} {value}")

    def _send(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        body = pickle.dumps(message)
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
