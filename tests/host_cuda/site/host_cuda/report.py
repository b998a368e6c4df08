"""At the end of a process: what each device held at most, what is left, how torch's allocator used it, as JSON.

HOST_CUDA_REPORT names the file; {rank} and {pid} in it are replaced.
"""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path

import torch

from host_cuda import runtime


def at_exit() -> None:
    path = os.environ.get("HOST_CUDA_REPORT")
    if path:
        atexit.register(_write, path.format(rank=os.environ.get("RANK", "0"), pid=os.getpid()))


def _write(path: str) -> None:
    if torch.cuda.is_initialized():
        devices = {device: of_device(device) for device in range(torch.cuda.device_count())}
        Path(path).write_text(json.dumps(devices, indent=1) + "\n")


def of_device(device: int) -> dict:
    """Counters of the runtime and of torch's allocator. Fragmentation: bytes that it holds and has not given out."""
    stats = torch.cuda.memory_stats(device)
    held, given = (stats.get(f"{kind}_bytes.all.current", 0) for kind in ("reserved", "allocated"))
    return {
        **runtime.counters(device),
        "live_blocks": len(runtime.live_blocks(device)),
        "torch_peak_bytes": stats.get("allocated_bytes.all.peak", 0),
        "torch_allocated_bytes": given,
        "torch_reserved_bytes": held,
        "fragmented_bytes": held - given,
    }
