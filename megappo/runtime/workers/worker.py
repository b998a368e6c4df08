"""Worker process of `process.py`: make what answers once, then answer each question.

Run as a file. A message is its length in 8 bytes and a pickle. What the code prints goes to the rank's standard error.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any, BinaryIO

HEADER = 8  # as in process.py, which cannot be imported before the first message


def main() -> None:
    questions, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # nothing but replies may reach the pipe
    setup = _read(questions)
    assert setup is not None
    sys.path[:] = setup["sys_path"]
    from megappo.runtime.helpers import end_with
    from megappo.runtime.workers.process import CannotSend, packed

    end_with(setup["parent"])
    make = _read(questions)
    try:
        answer = make()
    except ValueError as error:
        _write(replies, ("failed", f"cannot be loaded in a worker: {error}"))
        return
    _write(replies, ("ready", None))
    while (question := _read(questions)) is not None:
        reply = answer(question)
        try:
            _send(replies, packed(reply))
        except CannotSend as error:
            _write(replies, ("failed", f"returned {type(reply[1]).__name__}, which cannot be sent to the rank: {error}"))


def _read(stream: BinaryIO) -> Any:
    """Next message; None at the end of the input."""
    header = stream.read(HEADER)
    return pickle.loads(stream.read(int.from_bytes(header, "big"))) if header else None


def _write(stream: BinaryIO, message: Any) -> None:
    _send(stream, pickle.dumps(message))


def _send(stream: BinaryIO, body: bytes) -> None:
    stream.write(len(body).to_bytes(HEADER, "big") + body)
    stream.flush()


if __name__ == "__main__":
    main()
