"""How a command, a rank and a run end: exit codes, the line between a mistake and a fault, `ended.json`, and requests to stop at
the next step boundary: SIGUSR1 (Slurm, minutes before the time limit) and SIGTERM (preemption, `kill`). Slurm signals every
process of a job step, the ranks' children too. The ranks decide together to stop (`parallel/consensus.py`). Imports no torch: its
threads, started before `listen`, would not block USR1."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from megappo.config.redaction import hide_secrets
from megappo.config.run_directory import ENDED


class StopRequest:
    """Receiver of requests to stop. received: the first signal that asked this rank to stop, None without one."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def listen(self) -> None:
        """Handle both signals from now on. Call it once, in the main thread, before torch is imported."""
        signal.signal(signal.SIGTERM, self._on_term)
        # A launcher of ours (`commands/launch/processes.py`) blocks it until here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        # Children inherit the block and never notice USR1; `helper_process.py` keeps the other signals from them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        # The launcher may ignore USR1, so that it does not end a rank that is still importing; ignored, it would never arrive.
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        threading.Thread(target=self._wait_for_usr1, name="stop-request", daemon=True).start()

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.SIGTERM

    def _wait_for_usr1(self) -> None:
        while True:
            received = signal.Signals(signal.sigwait({signal.SIGUSR1}))
            self.received = self.received or received


DONE = 0
FAILED = 1  # ran and failed; a restart or a requeue may help
MISTAKE = 2  # of the user: nothing was computed
UNRECOVERABLE = 17  # would fail again in the same way (`Unrecoverable`, no progress): never started again
UNAVAILABLE = 69  # EX_UNAVAILABLE of sysexits.h: too few verdicts; has saved, can be resumed once the reward is mended
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: asked to stop, has saved, can be resumed
INTERRUPTED = 128 + signal.SIGINT
KILLED = 128 + signal.SIGKILL


def describe_exit(exit_code: int) -> str:
    """Put an exit code, of a subprocess (-9) or of a shell (137), into words."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    return f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {exit_code}"


def as_shell(exit_code: int) -> int:
    """Convert a subprocess's exit code (-9) to a shell's (137)."""
    return exit_code if exit_code >= 0 else 128 - exit_code


class Unrecoverable(RuntimeError):
    """A fault that the same start would meet again, as weights or gradients that are not finite. The command ends with exit code
    17, and launchers and job scripts neither restart nor requeue the run: a person must look at the cause."""


class Unavailable(RuntimeError):
    """A judge of the samples, a reward server for example, gives too few verdicts. The run has a checkpoint and can be
    resumed, though not at once, and no checkpoint is at fault: the command ends with exit code 69, and nothing starts it again."""


class ReplicaDrift(Unrecoverable):
    """Ranks that must hold the same weights hold different ones; the message names role, parameter and ranks."""


# Until a command has accepted its input, a ValueError of megappo is a mistake: one line that says what to change, exit code 2.
# After that the input is right, and a ValueError is a fault with its traceback, exit code 1.
_MARK = "_raised_on_accepted_input"


@contextlib.contextmanager
def input_accepted(*, unless: tuple[type[ValueError], ...] = ()) -> Iterator[None]:
    """Context of all work on accepted input: a ValueError out of it is a fault. unless: errors that still tell the user what to do,
    for example that none of a command's choices works."""
    try:
        yield
    except ValueError as error:
        if not isinstance(error, unless):
            setattr(error, _MARK, True)  # not another type: callers and readers of the traceback get the error as it was raised
        raise


def is_fault(error: ValueError) -> bool:
    """True if the error came out of `input_accepted`."""
    return hasattr(error, _MARK)


CONFIG = "config.yaml"  # resolved configuration of a run, in its directory from the start on

Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Ended:
    """One end of a run."""

    outcome: Outcome
    step: int
    """Last step of a run that finished or stopped; of a failed run that of its newest checkpoint, 0 without one."""
    code: int = 0
    """Exit code of the ranks."""
    message: str = ""
    """One line."""
    signals: Mapping[str, str] = field(default_factory=dict)
    """Rank -> name of the signal that asked it to stop."""
    time: float = 0.0
    """Seconds since the epoch."""


def record_end(run_dir: Path, end: Ended) -> None:
    """Write ended.json with the present time, atomically: a reader sees the old file or the whole new one."""
    content = {**asdict(end), "time": round(time.time(), 3), "message": hide_secrets(end.message)}
    temporary = run_dir / f".{ENDED}.{os.getpid()}"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, run_dir / ENDED)


def record_failure(run_dir: Path, end: Ended) -> None:
    """Record a failure, unless the run never began here or its end is known: a refused command changes nothing."""
    try:
        # On taking the directory, rank 0 removes ended.json and writes config.yaml.
        if (run_dir / CONFIG).is_file() and not (run_dir / ENDED).exists():
            record_end(run_dir, end)
    except OSError as error:  # a full or lost disk, perhaps the cause of the failure, whose exit code counts
        print(f"megappo: {run_dir / ENDED} cannot be written: {error.strerror}", file=sys.stderr)


def read_end(run_dir: Path) -> Ended | None:
    """Read how a run ended; None if it has not, or the file is not megappo's."""
    try:
        return Ended(**json.loads((run_dir / ENDED).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def is_stopped(run_dir: Path) -> bool:
    """True if the run was stopped on request, with a checkpoint, and not resumed since."""
    end = read_end(run_dir)
    return end is not None and end.outcome == "stopped"
