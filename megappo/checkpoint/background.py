"""The rank's side of its writer process: start it, give it a snapshot to write, learn how it went.

One process per rank, started at the first asynchronous save and again after it died. Nothing here is collective.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import blake3

import megappo
from megappo.checkpoint.manifest import FileEntry
from megappo.checkpoint.writer_process import MESSAGE_BYTES
from megappo.runtime.helpers import deaf_to_stop

if TYPE_CHECKING:
    from megappo.checkpoint.shared_buffer import SharedBuffer  # with torch, which nothing here needs

_PATHS = [str(Path(file).resolve().parents[1]) for file in (megappo.__file__, blake3.__file__)]
"""Where a writer process finds what it imports."""


class SnapshotFile(NamedTuple):
    """A file, relative to the checkpoint, whose content lies in a buffer."""

    name: str
    buffer: SharedBuffer
    start: int
    nbytes: int


class BackgroundWriter:
    """Writer process of this rank. At most one job at a time: `submit`, then `is_done` until true, then `result`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._answer: Mapping | OSError | None = None
        self._end = weakref.finalize(self, int)  # replaced with every process

    @property
    def pid(self) -> int | None:
        """Process id, None before the first start."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process, unless it runs. OSError if the system cannot."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, (*_PATHS, os.environ.get("PYTHONPATH"))))
        # -S, -P: neither the start-up files of site-packages nor the working directory is needed.
        command = [sys.executable, "-S", "-P", "-m", f"{__package__}.writer_process", str(theirs.fileno()), str(os.getpid())]
        try:
            with deaf_to_stop():  # or a request to stop would cost the save in flight
                # Not a fork without exec: threads and connections of this process must not be there.
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": path},
                )
        finally:
            theirs.close()
        self._channel = ours
        self._end = weakref.finalize(self, _end, self._process, ours)

    def submit(self, place: Path, files: Sequence[SnapshotFile]) -> None:
        """Let the process write the files below `place`. A process that has died shows in `result`."""
        assert self._channel is not None, "start comes first"
        buffers = list({id(file.buffer): file.buffer for file in files}.values())
        job = {
            "place": str(place),
            "files": [
                {"name": file.name, "buffer": buffers.index(file.buffer), "start": file.start, "bytes": file.nbytes}
                for file in files
            ],
        }
        self._answer = None
        try:
            socket.send_fds(self._channel, [json.dumps(job).encode()], [buffer.descriptor for buffer in buffers])
        except ConnectionError:
            self._answer = self._death()

    def is_done(self, timeout_s: float | None = 0) -> bool:
        """True if the files are written or the process has failed. Waits for at most `timeout_s` seconds; None: until then."""
        if self._answer is None:
            assert self._channel is not None, "nothing was submitted"
            readable, _, _ = select.select([self._channel], [], [], timeout_s)
            if readable:
                self._answer = self._receive()
        return self._answer is not None

    def result(self) -> dict[str, FileEntry]:
        """Wait for the end; returns the entries of the files. OSError if one could not be written or the process died."""
        self.is_done(timeout_s=None)
        answer = self._answer
        if isinstance(answer, OSError):
            raise answer
        assert answer is not None
        if "files" not in answer:
            raise OSError(answer["errno"], answer["text"], answer["path"])
        return {name: FileEntry(*entry) for name, entry in answer["files"].items()}

    def close(self) -> None:
        """End the process; a file that it is writing stays torn. The next save starts another one."""
        self._end()
        self._process = self._channel = None

    def _receive(self) -> Mapping | OSError:
        assert self._channel is not None
        try:
            message = self._channel.recv(MESSAGE_BYTES)
        except ConnectionError:
            message = b""
        return json.loads(message) if message else self._death()

    def _death(self) -> OSError:
        assert self._process is not None
        code = self._process.wait()
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        return OSError(f"the writer process {how}")


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.kill()  # it may be waiting for a disk that hangs
    process.wait()
