"""Helper processes of a rank: the one way to start, ask, limit and end them. `HelperProcess` starts this file as a program, which
answers one question after another and prints to the rank's standard error. Requests to stop reach the whole process group but
concern the rank alone, so helpers block them. Imports nothing of megappo, and no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any

# TERM and USR1 ask for a checkpoint and the end; INT and HUP come from the terminal and are the launcher's; USR2 asks the ranks
# for their stacks (`kill.DUMP_SIGNAL`).
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2})
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextlib.contextmanager
def deaf_to_stop() -> Iterator[None]:
    """Context in which to start processes that no request to stop may end: they inherit the block from their first instruction. A
    signal that arrives meanwhile waits for the end of the context."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay_deaf() -> None:
    """Ignore INT and TERM for good in a process that was started deaf to them. Call it before anything else handles one of them."""
    # Python's resource tracker, which multiprocessing's shared memory starts (vLLM's ranks have some), lets both through again.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for number in {signal.SIGINT, signal.SIGTERM} & blocked:
        signal.signal(number, signal.SIG_IGN)


def parent_to_follow() -> int:
    """Return the process id for `end_with` of a helper that is started here; 0 if the helper must not follow."""
    # The kernel follows the thread that starts a helper, and only the main thread lives as long as the rank.
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0


def end_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends; at once if it has ended. Does nothing for 0."""
    if not parent or sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


Answerer = Callable[[Any], tuple[str, Any]]
"""Answers a question with a word, which names the outcome, and a value. It reports errors by FAILED and raises none."""

FAILED = "failed"
"""Word of an answer whose value is the reason of a failure, one line."""

_READY = "ready"
_LAST_S = 5.0  # for the exit of a process that has closed its end


class HelperDied(RuntimeError):
    """The process ended in the middle of a question. The message says how: `was ended by SIGSEGV`. code: as subprocess gives it."""

    def __init__(self, code: int, how: str) -> None:
        super().__init__(how)
        self.code = code


class CannotSend(ValueError):
    """A value that cannot be pickled for a pipe. The message says why."""


def packed(value: Any) -> bytes:
    """Pickle a value for a pipe. CannotSend if that fails."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # as pickle refuses a function
        raise CannotSend(str(error)) from error


class HelperProcess:
    """A process that answers questions. It starts with the first question and ends with this object and with the rank.

    name: as `ps` shows it. make: picklable, called once in the process. timeout_s: wall-clock limit of an answer to a call, None
    for no limit. follow: the kernel follows the thread that starts the process (os.getpid), or the rank if that is the main thread
    (parent_to_follow).
    """

    def __init__(
        self, name: str, make: Callable[[], Answerer], timeout_s: float | None = None, follow: Callable[[], int] = os.getpid
    ) -> None:
        self._name = name
        self._make, self._timeout_s, self._follow = make, timeout_s, follow
        self._process: subprocess.Popen[bytes] | None = None
        self._made: tuple[str, Any] | None = None  # the process's word on `make`
        self._closed = False
        # The environment as it is now: processes also start while an engine generates, which sets variables for itself.
        self._environment = dict(os.environ)

    @property
    def pid(self) -> int | None:
        """Process id, None before the first start and after an end."""
        return None if self._process is None else self._process.pid

    def __call__(self, question: Any) -> tuple[str, Any]:
        """Answer a question, or say by FAILED why `make` failed. CannotSend if the question cannot be sent. After HelperDied, and
        after TimeoutError, which ends the process with all that it started, the next question gets a new process."""
        body = packed(question)
        self.start()
        self._send(body)
        return self.receive(self._timeout_s)

    def start(self) -> None:
        """Start the process, unless it runs. OSError if the system cannot."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = Pipe()
        # -P: this file's folder must not be searched for modules. In a session of its own, what it starts can be ended with it.
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), self._name]
        with theirs, deaf_to_stop():
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                env=self._environment,
            )
        self._channel, self._made, self._closed = ours, None, False
        self._end = weakref.finalize(self, _end, self._process)
        self._send(pickle.dumps({"sys_path": sys.path, "parent": self._follow()}))
        self._send(pickle.dumps(self._make))

    def send(self, question: Any) -> None:
        """Ask without waiting: `poll` until true, then `receive`, which reports a process that has died."""
        self._send(packed(question))

    def poll(self, timeout_s: float | None = 0) -> bool:
        """True if `receive` would return at once. Waits at most `timeout_s` seconds; None: until then."""
        try:
            return self._has_made(timeout_s) and self._channel.poll(timeout_s)
        except (EOFError, ConnectionError):
            return True

    def receive(self, timeout_s: float | None = None) -> tuple[str, Any]:
        """Wait for the answer to what was sent; errors as of a call."""
        try:
            self._has_made(None)
            if self._made is not None and self._made[0] == FAILED:
                reply = self._made
                self.close()
                return reply
            if not self._channel.poll(timeout_s):
                raise TimeoutError
            return self._channel.recv()
        except (EOFError, ConnectionError):
            raise self._death() from None
        except BaseException:  # a late answer must not be taken for that of the next question
            self.close()
            raise

    def close(self) -> None:
        """End the process with all that it started; callable from any thread. The next question starts another."""
        self._closed = True
        if self._process is not None:
            self._end()
        self._process = None

    def _has_made(self, timeout_s: float | None) -> bool:
        if self._made is None and self._channel.poll(timeout_s):
            self._made = self._channel.recv()
        return self._made is not None

    def _send(self, body: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # it has died; `receive` says of what
            self._channel.send_bytes(body)

    def _death(self) -> HelperDied:
        process = self._process
        if self._closed or process is None:
            return HelperDied(-signal.SIGKILL, "was closed")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_S)
        self.close()
        code = process.returncode
        return HelperDied(code, f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # of its session: it may be waiting for a disk that hangs
    process.wait()


# ------------------------------------------------------------------------------------------------------------ the process


def main(descriptor: int) -> None:
    """Make what answers, then answer each question until the rank is gone."""
    stay_deaf()
    os.set_inheritable(descriptor, False)
    channel = Connection(descriptor)
    setup = channel.recv()
    sys.path[:] = setup["sys_path"]
    end_with(setup["parent"])
    make = channel.recv()
    try:
        answer = make()
    except ValueError as error:
        channel.send((FAILED, f"cannot be loaded in a worker: {error}"))
        return
    channel.send((_READY, None))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            reply = answer(channel.recv())
            try:
                body = packed(reply)
            except CannotSend as error:
                body = pickle.dumps((FAILED, f"returned {type(reply[1]).__name__}, which cannot be sent to the rank: {error}"))
            channel.send_bytes(body)


if __name__ == "__main__":
    main(int(sys.argv[1]))
