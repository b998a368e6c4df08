"""Which implementation of an op runs: C++ on the CPU, CUDA or Triton on a GPU, or the reference in PyTorch.

Every op of ops/ is `torch.ops.megappo.NAME` with a schema, a fake kernel and a reference; `op` makes it one. A call runs what is
selected for the device of its first tensor:

    cpp        csrc/*/cpu.cpp         CPU tensors
    cuda       csrc/*/cuda.cu         CUDA tensors
    triton     ops/triton/FILE.py     CUDA tensors, and CPU tensors under TRITON_INTERPRET=1 (tests)
    reference  the op's own file      every device; and every fp64 input, which exists for gradient checks

`kernels: auto` takes cuda, then triton, then reference on a GPU; cpp, then reference on the CPU. A named implementation that is
missing is an error with the reason. The choice holds for the whole process, as roles must compute the same numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Callable, Iterator, Literal, Optional, get_args

import torch
from torch import Tensor
from torch.library import CustomOpDef

Kernels = Literal["auto", "cpp", "triton", "cuda", "reference"]
ORDER = {"cpu": ("cpp", "reference"), "cuda": ("cuda", "triton", "reference")}
LIBRARY = Path(__file__).parent.parent / "_native.so"


class _Selection:
    """The choice of this process and what it came to for each op and device."""

    def __init__(self) -> None:
        self.kernels: Kernels = "auto"
        self.native = "megappo_native"
        self.resolved: dict[tuple[str, str], tuple[str, Callable[..., Any]]] = {}


_selection = _Selection()
_references: dict[str, Callable[..., Any]] = {}


def op(reference: Callable[..., Any]) -> CustomOpDef:
    """Decorator: `reference` becomes `torch.ops.megappo.<its name>`, functional, with the schema of its annotations.

    The caller adds `register_fake` (and `register_autograd`). Implementations elsewhere have the same name and arguments.
    """
    name = reference.__name__.lstrip("_")
    _references[name] = reference

    def run(*args: Any) -> Any:
        return implementation(name, args)(*args)

    schema = torch.library.infer_schema(reference, mutates_args=())
    return torch.library.custom_op(f"megappo::{name}", run, mutates_args=(), schema=schema)


def implementation(name: str, args: tuple[Any, ...]) -> Callable[..., Any]:
    """What a call of the op with these arguments runs."""
    first = next(x for x in args if isinstance(x, Tensor))
    if first.dtype == torch.float64:
        return _references[name]
    return _resolve(name, first.device.type)[1]


def selected(device_type: str) -> dict[str, str]:
    """Op -> implementation on this kind of device ("cpu", "cuda"). Raises ValueError where the requested one is missing."""
    return {name: _resolve(name, device_type)[0] for name in sorted(_references)}


def select(kernels: Kernels) -> None:
    """Choose for the process; "auto" at the start. Takes effect with the next call."""
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels = {kernels}: use one of {', '.join(get_args(Kernels))}")
    _selection.kernels = kernels
    _selection.resolved.clear()


@contextmanager
def using(kernels: Kernels, *, native: Optional[str] = None) -> Iterator[None]:
    """`select` for a block. native: other namespace of the compiled ops (the tests' build of the CUDA kernels for the CPU)."""
    before = _selection.kernels, _selection.native
    try:
        _selection.native = native or _selection.native
        select(kernels)
        yield
    finally:
        _selection.native = before[1]
        select(before[0])


def _resolve(name: str, device_type: str) -> tuple[str, Callable[..., Any]]:
    key = name, device_type
    if key not in _selection.resolved:
        _selection.resolved[key] = _find(name, device_type)
    return _selection.resolved[key]


def _find(name: str, device_type: str) -> tuple[str, Callable[..., Any]]:
    wanted = _selection.kernels
    if device_type not in ORDER:
        return "reference", _references[name]
    for candidate in ORDER[device_type] if wanted == "auto" else (wanted,):
        reason = missing(candidate, device_type)
        found = None if reason else _lookup(candidate, name)
        if found is not None:
            return candidate, found
    raise ValueError(f"kernels = {wanted}: {reason or f'there is no such implementation of {name}'}; use kernels=auto")


def _lookup(candidate: str, name: str) -> Optional[Callable[..., Any]]:
    if candidate == "reference":
        return _references[name]
    if candidate == "triton":
        file = _references[name].__module__.rsplit(".", 1)[1]
        return getattr(importlib.import_module(f"megappo.ops.triton.{file}"), name, None)
    return getattr(getattr(torch.ops, _selection.native), name, None)


def missing(candidate: str, device_type: str) -> Optional[str]:
    """Why an implementation cannot run on this kind of device here; None where it can."""
    if candidate == "reference":
        return None
    if candidate == "triton":
        if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton kernels run on a GPU, and this run is on the CPU"
        return None if importlib.util.find_spec("triton") else "triton is not installed"
    if (candidate == "cpp") != (device_type == "cpu"):
        return f"{candidate} kernels run on {'the CPU' if candidate == 'cpp' else 'a GPU'}, and this run is on {device_type}"
    unavailable = _load_library()
    if unavailable or candidate == "cpp":
        return unavailable
    facts = json.loads(LIBRARY.with_suffix(".json").read_text())
    return None if facts["cuda"] else f"megappo was built without CUDA kernels ({facts['cuda_reason']})"


@cache
def _load_library() -> Optional[str]:
    """Load the compiled ops once; why there are none."""
    if not LIBRARY.exists():
        return "the compiled kernels are missing: install megappo with a C++ compiler (pip install --no-build-isolation -e .)"
    torch.ops.load_library(str(LIBRARY))
    return None
