"""Console of a training: standard output and error whose reader may leave (`| head`, a closed terminal) or be full (a log file).

What cannot be printed is dropped: the run's numbers are in its files. For the processes of a command, whatever prints in them; in a
program that calls the trainer itself, `side_work.py` covers the rows of the run. Imports nothing of megappo.
"""

from __future__ import annotations

import io
import logging
import sys

logger = logging.getLogger("megappo.console")


class Console(io.TextIOWrapper):
    """A text stream that never fails."""


class _Surviving(io.FileIO):
    """File descriptor whose failed writes count as done."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._title, self._noted = name, False

    def write(self, data) -> int | None:  # the base class's annotations differ between versions of Python
        try:
            return super().write(data)
        except OSError as error:
            self._note(error)
            return memoryview(data).nbytes

    def _note(self, error: OSError) -> None:
        # Not for standard error, to which the note itself would go.
        if not self._noted and self._title == "stdout":
            self._noted = True
            logger.warning("standard output is lost (%s): rows and notes are dropped from now on, the run goes on", error.strerror)


def keep_console() -> None:
    """Make standard output and error of this process survive the loss of their reader. A second call changes nothing."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # A stream that somebody has put there (pytest) is theirs; None stands for a closed descriptor.
        if stream is None or stream is not getattr(sys, f"__{name}__") or isinstance(stream, Console):
            continue
        stream.flush()
        raw = _Surviving(stream.fileno(), name)
        kept = Console(
            raw if stream.write_through else io.BufferedWriter(raw),  # python -u has no buffer
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, kept)


def is_kept() -> bool:
    """True if standard output cannot fail: a broken pipe is another one then."""
    return isinstance(sys.stdout, Console)
