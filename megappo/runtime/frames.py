"""Where a thread of this process waits or works, read from its Python frames: costs nothing until asked. Imports no torch."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# Modules whose functions exchange something between ranks; the last waits for the GPU, whose queue may hold an exchange.
_EXCHANGES = ("torch.distributed", "megatron.core.pipeline_parallel.p2p_communication", "torch.cuda", "torch.accelerator")
# Other modules in which an exchange may wait.
_INSIDE_EXCHANGES = ("torch.", "contextlib")
_MEETING = "megappo.parallel.meeting"
# Wrappers of exchanges: the place that matters is their caller's.
_WRAPPERS = ("megappo.parallel.",)
# A method of an object of C++ has no frame of its own.
_WAITS_IN_LINE = (".wait(", ".synchronize(")


@dataclass(frozen=True)
class Place:
    """Where a thread is in the code."""

    waits_in: str | None
    """Name of the exchange that it waits in; None if it works."""
    at: str
    """Line of megappo, or of the code that it calls."""

    def __str__(self) -> str:
        return f"{self.waits_in} in {self.at}" if self.waits_in else f"not in an exchange, at {self.at}"


def main_thread_place() -> Place:
    """Return the place of the main thread, or, if that is in no exchange, of another thread that is in one (a backward pass)."""
    main = threading.main_thread().ident
    frames = sys._current_frames()
    place = place_of(frames[main]) if main in frames else Place(None, "(no frame)")
    if place.waits_in is None:
        for ident, frame in frames.items():
            other = place_of(frame)
            if ident != threading.get_ident() and other.waits_in is not None and not _is_watchdogs(frame):
                return other
    return place


def place_of(innermost: FrameType) -> Place:
    """Return a thread's place in the code, from its innermost frame."""
    stack = list(_outwards(innermost))
    waits_in, begin = None, 0
    for index, frame in enumerate(stack):
        name = _module(frame)
        if name == _MEETING and "point" in frame.f_locals:
            waits_in, begin = f"the meeting before {frame.f_locals['point'].work}", index
            break
        if name.startswith(_EXCHANGES):
            # The outermost of these functions is the one that the code calls: all_gather_object, not its all_gather.
            while index + 1 < len(stack) and _module(stack[index + 1]).startswith(_EXCHANGES):
                index += 1
            waits_in, begin = _function(stack, index), index + 1
            break
        if not name.startswith(_INSIDE_EXCHANGES):
            break  # work, even if an exchange has called it
    if waits_in is None and _module(innermost).startswith(("megatron.", "megappo.", "torch.")):
        line = linecache.getline(innermost.f_code.co_filename, innermost.f_lineno).strip()
        if any(wait in line for wait in _WAITS_IN_LINE):
            waits_in = line
    ours = [frame for frame in stack[begin:] if _module(frame).startswith("megappo.")]
    callers = [frame for frame in ours if not _module(frame).startswith(_WRAPPERS)]
    nearest = next(iter(callers or ours or stack[begin:]), innermost)
    at = _line(nearest)
    if waits_in is None and nearest is not innermost:
        at = f"{_line(innermost)}, called from {at}"
    return Place(waits_in, at)


def _function(stack: list[FrameType], index: int) -> str:
    # torch wraps its functions in `wrapper`
    while index > 0 and stack[index].f_code.co_name == "wrapper":
        index -= 1
    return stack[index].f_code.co_name


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_watchdogs(frame: FrameType) -> bool:
    return any(_module(each).startswith("megappo.runtime") for each in _outwards(frame))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} ({frame.f_code.co_name})"
