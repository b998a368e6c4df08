"""The rank's writer process, which writes the files of a snapshot while training goes on. Nothing here is collective. It starts at
the first asynchronous save, and again after it died, and imports no torch."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megappo.checkpoint.files import FileEntry, cores_of_rank, sync_parents, write_file
from megappo.runtime.helper_process import FAILED, Answerer, HelperDied, HelperProcess

if TYPE_CHECKING:
    from megappo.checkpoint.image import SharedBuffer  # with torch, which nothing here needs

NICE = 10  # training goes first where cores are few
_WRITTEN = "written"


class SnapshotFile(NamedTuple):
    """A file, relative to the checkpoint, whose content lies in a buffer."""

    name: str
    buffer: SharedBuffer
    start: int
    nbytes: int


class BackgroundWriter:
    """Writer process of this rank. At most one job at a time: `submit`, then `is_done` until true, then `result`."""

    def __init__(self) -> None:
        self._helper = HelperProcess("checkpoint writer", _writing)
        self._answer: tuple[str, Any] | OSError | None = None
        self._files: Sequence[SnapshotFile] = ()  # of the job: their buffers stay until they are written

    @property
    def pid(self) -> int | None:
        return self._helper.pid

    def start(self) -> None:
        """Start the process, unless it runs. OSError if the system cannot."""
        self._helper.start()

    def submit(self, place: Path, files: Sequence[SnapshotFile]) -> None:
        """Let the process write the files below `place`. If it has died, `result` says so."""
        self._answer, self._files = None, files
        # A memfd has no name of its own; /proc names it for the other process.
        buffer = f"/proc/{os.getpid()}/fd/{{}}".format
        self._helper.send((place, [(file.name, buffer(file.buffer.descriptor), file.start, file.nbytes) for file in files]))

    def is_done(self, timeout_s: float | None = 0) -> bool:
        """True if the files are written or the process has failed. Waits at most `timeout_s` seconds; None: until then."""
        if self._answer is None and self._helper.poll(timeout_s):
            try:
                self._answer = self._helper.receive()
            except HelperDied as died:
                self._answer = OSError(f"the writer process {died}")
            self._files = ()
        return self._answer is not None

    def result(self) -> dict[str, FileEntry]:
        """Wait for the end; return the entries of the files. OSError if one could not be written or the process died."""
        self.is_done(timeout_s=None)
        if isinstance(self._answer, OSError):
            raise self._answer
        assert self._answer is not None
        word, value = self._answer
        if word == FAILED:
            raise OSError(*value)
        return value

    def close(self) -> None:
        """End the process; a file that it is writing stays incomplete. The next save starts another process."""
        self._helper.close()


# -------------------------------------------------------------------------------------------------------- in the process


def _writing() -> Answerer:
    os.nice(NICE)
    threads = cores_of_rank()
    return partial(_answer, ThreadPoolExecutor(threads), threads)


def _answer(pool: ThreadPoolExecutor, threads: int, job: tuple[Path, list[tuple[str, str, int, int]]]) -> tuple[str, Any]:
    """Return the files' entries by name, or under FAILED errno, text and path of the OSError that stopped it."""
    place, files = job
    try:
        maps = {buffer: _mapped(buffer) for _, buffer, _, _ in files}
        written: Mapping[str, FileEntry] = {
            name: write_file(place / name, [memoryview(maps[buffer])[start : start + nbytes]], pool, threads)
            for name, buffer, start, nbytes in files
        }
        sync_parents(place, written)
        return _WRITTEN, written
    except OSError as error:
        return FAILED, (error.errno, error.strerror or str(error), error.filename)


def _mapped(buffer: str) -> mmap.mmap:
    with open(buffer, "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
