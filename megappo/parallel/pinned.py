"""Page-locked host memory outside torch's own allocator, which rounds sizes up to powers of two."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


def pin(owner: object, memory: Tensor) -> None:
    """Lock the pages of `memory` [n] uint8 until `owner` is collected: a GPU then copies at full speed, and beside other work."""
    runtime: Any = torch.cuda.cudart()  # a module, None to the type checker
    address = memory.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, 0))
    # Not at exit: the process frees everything then, in an order of its own.
    weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False
