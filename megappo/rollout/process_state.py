"""Settings of a process and its CUDA stream, which two owners use in turns: the trainer, and an engine inside its process.

vLLM sets torch's threads to one and its precision of fp32 products, and works on a CUDA stream of its own, which it makes the
current one and leaves so. Its compiled model relies on its settings, its communicators on its stream: both come back for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

# As they are before an engine replaces any.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
)


class OwnState:
    """What an engine on `device` has set, kept from one of its calls to the next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._settings: list[Any] | None = None
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The engine's settings and stream within, the caller's again after, also after an error."""
        with self._settings_in_place(), self._stream_in_place() if self.device.type == "cuda" else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _settings_in_place(self) -> Iterator[None]:
        before = _settings()
        _install(before if self._settings is None else self._settings)
        try:
            yield
        finally:
            self._settings = _settings()
            _install(before)

    @contextlib.contextmanager
    def _stream_in_place(self) -> Iterator[None]:
        """Work queued by the caller (pushed weights) comes before the engine's, and that before what the caller queues next.

        Streams are set through `torch.cuda.set_stream`, looked up each time: vLLM replaces it to know the stream for its NCCL.
        """
        current_device, callers = torch.cuda.current_device(), torch.cuda.current_stream(self.device)
        own = torch.cuda.Stream(self.device) if self._stream is None else self._stream
        own.wait_stream(callers)
        torch.cuda.set_stream(own)
        try:
            yield
        finally:
            self._stream = torch.cuda.current_stream(self.device)
            callers.wait_stream(self._stream)
            torch.cuda.set_stream(callers)
            torch.cuda.set_device(current_device)


def _settings() -> list[Any]:
    return [read() for read, _ in _SETTINGS]


def _install(values: list[Any]) -> None:
    for (read, write), value in zip(_SETTINGS, values, strict=True):
        if read() != value:
            write(value)
