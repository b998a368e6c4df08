"""A fake GPU that answers queries and computes nothing, for libraries that query one while they build modules."""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class Handle:
    """A stream or an event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def pretend_gpu(name: str = "NVIDIA H100 80GB HBM3", capability: tuple[int, int] = (9, 0), gib: int = 80) -> None:
    """Make torch.cuda answer as on a machine of eight such GPUs, for the rest of the process."""
    properties = SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        total_memory=gib << 30,
        multi_processor_count=132,
        is_integrated=False,
        uuid="GPU-0",
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 8
    torch.cuda.get_device_name = lambda *args: name
    torch.cuda.get_device_capability = lambda *args: capability
    torch.cuda.get_device_properties = lambda *args: properties
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = torch.cuda.manual_seed = lambda *args, **kwargs: None


def pretend_driver(users: Sequence[Path]) -> str:
    """Make a driver library (libcuda.so.1) loadable that has what `users` want of it, and no device; returns what was done.

    users: shared libraries that are linked to it, which do not load without. A real one is taken where there is one.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
        return "the driver's libcuda.so.1"
    except OSError:
        pass
    listed = subprocess.run(["nm", "-D", "--undefined-only", *map(str, users)], capture_output=True, text=True, check=True).stdout
    names = sorted(set(re.findall(r" U (cu[A-Z]\w*)", listed)))
    folder = Path(tempfile.mkdtemp())
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    # 100: CUDA_ERROR_NO_DEVICE
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names))
    flags = ("-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    subprocess.run(["g++", *flags, "-o", str(library), str(source)], check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    return f"no driver: one with {len(names)} functions stands in"
