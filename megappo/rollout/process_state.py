"""Torch settings and CUDA stream of a process that trainer and rollout engine use in turns. vLLM sets torch's thread count to one,
changes the fp32 matmul precision and makes its own CUDA stream current. Its compiled model needs these settings and its
communicators that stream, so both are restored around each of its calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Bound here, before an engine replaces any of the functions.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
)


class EngineState:
    """Settings and stream of an engine on `device`, kept between its calls."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._settings: list[Any] | None = None
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
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
        """Make the engine's stream current, ordered after the caller's queued work and before its next."""
        current_device, callers = torch.cuda.current_device(), torch.cuda.current_stream(self.device)
        own = torch.cuda.Stream(self.device) if self._stream is None else self._stream
        own.wait_stream(callers)  # pushed weights
        # Looked up in torch at each call: vLLM replaces set_stream to know the stream for its NCCL.
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
