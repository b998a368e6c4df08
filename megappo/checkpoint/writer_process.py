"""Process beside a rank that writes the files of a snapshot while training goes on. Imports no torch and starts in milliseconds.

`background.py` starts it, with the stop signals blocked, and sends a job at a time: where the files go, and which ranges of which
memory they are. It ends with its rank, at the latest.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megappo.checkpoint.files import sync_parents, write_file
from megappo.checkpoint.hashing import Fingerprint, cores_of_rank
from megappo.runtime.helpers import end_with

MESSAGE_BYTES = 1 << 18  # a message of the socket; a rank writes a few files
MAX_BUFFERS = 64
NICE = 10  # training goes first where cores are few


def main(descriptor: int, rank_pid: int) -> None:
    """Serve the rank of process `rank_pid`, on the socket `descriptor`, until either is gone."""
    # No polling: the kernel ends this process with the rank, also in the middle of a write to a disk that hangs.
    end_with(rank_pid)
    os.nice(NICE)
    threads = cores_of_rank()
    channel = socket.socket(fileno=descriptor)
    with ThreadPoolExecutor(threads) as pool:
        while True:
            message, buffers, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, MAX_BUFFERS)
            if not message:
                return
            channel.send(json.dumps(_answer(json.loads(message), buffers, pool, threads)).encode())


def _answer(job: dict[str, Any], buffers: list[int], pool: ThreadPoolExecutor, threads: int) -> dict[str, Any]:
    """{"files": name -> (bytes, hash)}, or {"errno", "text", "path"} of the OSError that stopped it."""
    try:
        maps = [_mapped(buffer) for buffer in buffers]
        written = {file["name"]: _write(job["place"], file, maps, pool, threads) for file in job["files"]}
        sync_parents(Path(job["place"]), written)
        return {"files": written}
    except OSError as error:
        return {"errno": error.errno, "text": error.strerror or str(error), "path": error.filename}


def _mapped(descriptor: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _write(place: str, file: dict[str, Any], maps: list[mmap.mmap], pool: ThreadPoolExecutor, threads: int) -> Fingerprint:
    content = memoryview(maps[file["buffer"]])[file["start"] : file["start"] + file["bytes"]]
    return write_file(Path(place, file["name"]), [content], pool, threads)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
