"""Worker process of `own_process.py`: load the user's code once, then answer each sample with its result.

Run as a file. A message is its length in 8 bytes and a pickle. What the code prints goes to the rank's standard error.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

HEADER = 8  # as in own_process.py, which cannot be imported before the first message


def main() -> None:
    questions, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # nothing but replies may reach the pipe
    setup = _read(questions)
    assert setup is not None
    sys.path[:] = setup["sys_path"]
    from megappo.resilience.helpers import end_with
    from megappo.rewards.base import UnusableAnswer
    from megappo.rewards.own import OwnRule, load_from_entry_point, load_from_file

    end_with(setup["parent"])
    code = setup["code"]
    how = {"batch": False, "args": code["args"]}
    try:
        if code["path"] is not None:
            rule = load_from_file(code["name"], code["path"], code["function"], source=code["source"], **how)
        else:
            rule = load_from_entry_point(code["name"], code["entry_point"], **how)
    except ValueError as error:
        _write(replies, ("failed", f"cannot be loaded in a worker: {error}"))
        return
    _write(replies, ("ready", None))

    def answer(rule: OwnRule, sample: Any) -> tuple[str, Any]:
        try:
            return "scored", rule.call(sample)
        except UnusableAnswer as error:
            return "unusable", str(error)
        except (Exception, SystemExit) as error:  # the rank names the sample, and stops the run
            return "failed", f"raised {type(error).__name__}: {error}{rule.place(error)}"

    _serve(questions, replies, lambda sample: answer(rule, sample))


def _serve(questions: BinaryIO, replies: BinaryIO, answer: Callable[[Any], tuple[str, Any]]) -> None:
    while (sample := _read(questions)) is not None:
        reply = answer(sample)
        try:
            _write(replies, reply)
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # as pickle refuses a function
            _write(replies, ("failed", f"returned {type(reply[1]).__name__}, which cannot be sent to the rank: {error}"))


def _read(stream: BinaryIO) -> Any:
    """Next message; None at the end of the input."""
    header = stream.read(HEADER)
    return pickle.loads(stream.read(int.from_bytes(header, "big"))) if header else None


def _write(stream: BinaryIO, message: Any) -> None:
    body = pickle.dumps(message)
    stream.write(len(body).to_bytes(HEADER, "big") + body)
    stream.flush()


if __name__ == "__main__":
    main()
