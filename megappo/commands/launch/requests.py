"""Signals to the process that started the ranks: requests to stop with a checkpoint, or to end at once."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from types import FrameType, TracebackType

_ASKING = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# timeout(1) and some supervisors signal a process and then its group: that is one request.
AGAIN_S = 1.0


class Requests:
    """Context in which USR1, TERM, INT and HUP are requests; if ranks are not stoppable, each signal ends them at once. stop: the
    first signal. end: a second one other than USR1, at least AGAIN_S later; the ranks are to be killed."""

    def __init__(self, *, stoppable: bool) -> None:
        self.stop: signal.Signals | None = None
        self.end: signal.Signals | None = None
        self._stoppable = stoppable
        self._insisting_at: float | None = None

    def __enter__(self) -> Requests:
        self._wake, write = os.pipe()
        for end in (self._wake, write):
            os.set_blocking(end, False)
        self._before_wake = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._write = write
        self._before = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda *_: None)}  # wakes `wait`
        for number in _ASKING:
            # nohup and shells ignore HUP and INT of the terminal on purpose; a job script USR1 and TERM until the ranks listen.
            if number in (signal.SIGINT, signal.SIGHUP) and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before_wake)
        os.close(self._wake)
        os.close(self._write)

    def wait(self, seconds: float, others: Sequence[int] = ()) -> None:
        """Sleep until a signal comes, a child ends, or one of the file descriptors `others` is readable."""
        select.select([self._wake, *others], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass

    def _received(self, number: int, frame: FrameType | None) -> None:
        received, now = signal.Signals(number), time.monotonic()
        if not self._stoppable:
            self.end = received
        elif number != signal.SIGUSR1 and self._insisting_at is not None and now - self._insisting_at >= AGAIN_S:
            self.end = received
        elif self.stop is None:
            self.stop = received
        if number != signal.SIGUSR1 and self._insisting_at is None:
            self._insisting_at = now
