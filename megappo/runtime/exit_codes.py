"""Exit codes of megappo's commands, of its ranks and of its job scripts, and their words. Imports nothing heavy."""

from __future__ import annotations

import signal

DONE = 0
FAILED = 1  # ran and failed; a restart or a requeue may help
MISTAKE = 2  # of the user: nothing was computed
UNRECOVERABLE = 17  # would fail again in the same way (`resilience.faults.Unrecoverable`, no progress): never started again
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: asked to stop, has saved, can be resumed
INTERRUPTED = 128 + signal.SIGINT
KILLED = 128 + signal.SIGKILL


def describe_exit(exit_code: int) -> str:
    """Put an exit code into words. exit_code: of a subprocess (-9) or of a shell (137)."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    return f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {exit_code}"


def as_shell(exit_code: int) -> int:
    """Exit code of a subprocess (-9) as a shell gives it (137)."""
    return exit_code if exit_code >= 0 else 128 - exit_code
