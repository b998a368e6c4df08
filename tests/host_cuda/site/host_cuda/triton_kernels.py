"""Triton's kernels by its interpreter (TRITON_INTERPRET=1), as kernels of the current stream.

The interpreter would copy all arguments to the host and all of them back, which waits for the stream and writes what is only
read. Here a kernel reads the tensors that it is given, and writes the bytes that it changed.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from triton.runtime import interpreter

from host_cuda import runtime
from host_cuda.mode import extent


def install() -> None:
    """In this process, for kernels that are launched from now on."""
    interpreter.GridExecutor._init_args_hst = _read
    interpreter.GridExecutor._restore_args_dev = _write


def _read(executor: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[list, dict[str, Any]]:
    """The arguments with copies of their storages on the host."""
    tensors = list(_tensors([*args, *kwargs.values()]))
    executor.storages = {}
    executor.device = torch.cuda.current_device()
    executor.stream = runtime.current_stream(executor.device)
    ranges = [number for tensor in tensors for number in (*extent(tensor), 0)]
    runtime.begin(executor.device, executor.stream, executor.fn.__name__, ranges)
    for tensor in tensors:
        storage = tensor.untyped_storage()
        executor.storages.setdefault(storage.data_ptr(), _bytes(storage.data_ptr(), storage.nbytes()).clone())
    return [_copied(executor, value) for value in args], {name: _copied(executor, value) for name, value in kwargs.items()}


def _write(executor: Any, *args: Any) -> None:
    for start, after in executor.storages.items():
        before = _bytes(start, len(after))
        changed = (before != after).nonzero()
        if len(changed):
            first, end = int(changed[0]), int(changed[-1]) + 1
            runtime.begin(executor.device, executor.stream, executor.fn.__name__, (start + first, end - first, 1))
            before[first:end] = after[first:end]


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, tuple):
            yield from _tensors(value)
        elif isinstance(value, interpreter.TensorDescriptor):
            yield from _tensors([value.base])
        elif hasattr(value, "data_ptr"):
            yield interpreter._unwrap_tensor(value)


def _copied(executor: Any, value: Any) -> Any:
    if isinstance(value, tuple):
        return interpreter._tuple_create(value, [_copied(executor, part) for part in value])
    if isinstance(value, interpreter.TensorDescriptor):
        return dataclasses.replace(value, base=_copied(executor, value.base))
    if not hasattr(value, "data_ptr"):
        return value
    tensor = interpreter._unwrap_tensor(value)
    storage = executor.storages[tensor.untyped_storage().data_ptr()].untyped_storage()
    copy = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return interpreter._rewrap_tensor(copy, original_tensor=value)


def _bytes(start: int, size: int) -> torch.Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(start), dtype=torch.uint8)
