"""The runtime's own functions, by ctypes: what a kernel touches, counters of memory and copies."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

_library = ctypes.CDLL(None)
_library.host_cuda_reason.restype = ctypes.c_char_p
_library.host_cuda_counter.restype = ctypes.c_int64
_library.host_cuda_begin.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int]
_library.host_cuda_queue_copy.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
_library.host_cuda_wait.argtypes = [ctypes.c_int, ctypes.c_void_p]
COUNTERS = (
    "allocated_bytes",
    "peak_bytes",
    "allocations",
    "pinned_bytes",
    "pinned_peak_bytes",
    "copies",
    "copied_bytes",
    "async_copies",
    "async_copied_bytes",
    "refused_launches",
    "waits",
)
_Watcher = ctypes.CFUNCTYPE(None)


class RaceError(RuntimeError):
    """Two operations touch the same memory on two streams, one of them writes, and neither waits for the other."""


def current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def begin(device: int, stream: int, name: str, ranges: Sequence[int]) -> None:
    """The stream catches up before a kernel computes. ranges: start, bytes, 1 if written, and so on. Raises RaceError."""
    packed = array.array("Q", ranges)
    if _library.host_cuda_begin(device, stream, name.encode(), packed.buffer_info()[0], len(packed) // 3):
        raise RaceError(_library.host_cuda_reason().decode())


def queue_copy(device: int, stream: int, target: torch.Tensor, source: torch.Tensor) -> None:
    """source (contiguous, on the host) into target, when the stream comes to it. Raises RaceError."""
    size = target.numel() * target.element_size()
    if size and _library.host_cuda_queue_copy(device, stream, target.data_ptr(), source.data_ptr(), size):
        raise RaceError(_library.host_cuda_reason().decode())


def wait(device: int, stream: int) -> None:
    """The host waits for the stream."""
    _library.host_cuda_wait(device, stream)


@contextmanager
def races_let_through() -> Iterator[None]:
    """Inside, a race is no error: it gives the numbers that it would give where copies are late."""
    before = _library.host_cuda_watch_races(0)
    try:
        yield
    finally:
        _library.host_cuda_watch_races(before)


@contextmanager
def waits_noticed(notice: Callable[[], None]) -> Iterator[None]:
    """Inside, `notice` is called at each wait of the host for a device, by the thread that waits."""
    watcher = _Watcher(notice)
    _library.host_cuda_watch_waits(watcher)
    try:
        yield
    finally:
        _library.host_cuda_watch_waits(None)


def counters(device: int = 0) -> dict[str, int]:
    """Bytes and numbers since the process began; peaks since `reset_peak`."""
    return {name: _library.host_cuda_counter(device, index) for index, name in enumerate(COUNTERS)}


def reset_peak(device: int = 0) -> None:
    _library.host_cuda_reset_peak(device)


def live_blocks(device: int = 0) -> list[int]:
    """Sizes in bytes of what the runtime has allocated and not freed; device -1: page-locked memory."""
    number = _library.host_cuda_blocks(device, None, 0)
    sizes = (ctypes.c_int64 * number)()
    _library.host_cuda_blocks(device, sizes, number)
    return sorted(sizes)
