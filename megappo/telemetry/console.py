"""Standard output and error of a command: they take any character, and survive a reader that leaves or a full disk. A training
(`keep_console`) drops what cannot be printed, as its numbers are in files. Any other command (`open_console`) ends, and tells
this loss from other failed writes by `lost_output`. Of many ranks, rank 0 informs and the others only warn. Imports nothing of
megappo."""

from __future__ import annotations

import codecs
import io
import logging
import os
import sys
from typing import TextIO


def configure_logging(rank: int, world_size: int, stream: TextIO | None = None) -> None:
    """Set up this process's `megappo` logger, and no other; a second call replaces the first. stream: None for stderr. Lines are
    `12:34:56 rank 3 WARNING megappo.engine: text`, without the rank in a world of one process."""
    logger = logging.getLogger("megappo")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    who = f"rank {rank} " if world_size > 1 else ""
    handler.setFormatter(logging.Formatter(f"%(asctime)s {who}%(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False  # or a library's handler of the root logger prints every line again


logger = logging.getLogger("megappo.console")


class Console(io.TextIOWrapper):
    """A text stream over a `_Descriptor`."""


class _Descriptor(io.FileIO):
    """File descriptor that notes a failed write. kept: a failed write counts as done and is noted once. failure: of one that is
    not."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._title, self._noted = name, False
        self.kept = False
        self.failure: OSError | None = None

    def write(self, data) -> int | None:  # the base class's annotations differ between versions of Python
        try:
            return super().write(data)
        except OSError as error:
            if not self.kept:
                self.failure = error
                raise
            self._note(error)
            return memoryview(data).nbytes

    def drop(self) -> None:
        self.kept = self._noted = True

    def _note(self, error: OSError) -> None:
        # Not for standard error, to which the note itself would go.
        if not self._noted and self._title == "stdout":
            self._noted = True
            logger.warning("standard output is lost (%s): rows and notes are dropped from now on, the run goes on", error.strerror)


def open_console() -> None:
    """Make standard output and error take any character and note failed writes. A second call changes nothing."""
    _fill_closed()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # A stream that somebody has put there (pytest) is theirs; None stands for a closed descriptor.
        if stream is None or stream is not getattr(sys, f"__{name}__") or isinstance(stream, Console):
            continue
        stream.flush()
        raw = _Descriptor(stream.fileno(), name)
        console = Console(
            raw if stream.write_through else io.BufferedWriter(raw),  # python -u has no buffer
            # An ASCII locale is never a choice, and a configuration that a shell's > writes is read as UTF-8.
            encoding="utf-8" if codecs.lookup(stream.encoding).name == "ascii" else stream.encoding,
            errors="backslashreplace",  # names of files need not be text, and models sample anything
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, console)


def keep_console() -> None:
    """Make standard output and error survive the loss of their reader. A second call changes nothing."""
    open_console()
    for stream in (sys.stdout, sys.stderr):
        if (raw := _descriptor_of(stream)) is not None:
            raw.kept = True


def flush_output() -> None:
    """Write what waits for standard output. OSError if that fails."""
    if sys.stdout is not None:
        sys.stdout.flush()


def lost_output(error: OSError) -> bool:
    """True if the error is the failed write of standard output; then everything printed from now on is dropped."""
    raw = _descriptor_of(sys.stdout)
    if raw is None or raw.failure is not error:  # another file, or a pipe to a helper process
        return False
    raw.drop()  # or Python would fail again when it closes the stream
    return True


def _fill_closed() -> None:
    """Open /dev/null where standard input, output or error is closed (`>&-`)."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # or the next file would get its number, and with it what libraries and child processes print
            os.open(os.devnull, os.O_RDWR)


def _descriptor_of(stream: object) -> _Descriptor | None:
    if not isinstance(stream, Console):
        return None
    raw = getattr(stream.buffer, "raw", stream.buffer)
    return raw if isinstance(raw, _Descriptor) else None
