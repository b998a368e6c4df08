"""Kernels of other libraries on the device: operations that are registered for CUDA in Python, and Triton's, interpreted.

Processes need TRITON_INTERPRET=1 from their start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from host_cuda import triton_kernels

SIZE = 1 << 10


@triton.jit
def add_one(target, source, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size) + 1.0, mask=at < size)


def launch(target: torch.Tensor, source: torch.Tensor) -> None:
    add_one[(1,)](target, source, SIZE, BLOCK=SIZE)


def operation_in_python(rank: int) -> list[float]:
    library = torch.library.Library("host_cuda_test", "DEF")
    library.define("doubled(Tensor x, Tensor(a!) out) -> ()")

    def doubled(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 2.0)

    library.impl("doubled", doubled, "CUDA")
    x, out = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    torch.ops.host_cuda_test.doubled(x, out)
    return out.tolist()


def triton_kernel(rank: int) -> dict[str, Any]:
    """What a kernel computes, and what is raised where it meets another stream's work without a wait."""
    triton_kernels.install()
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    source, target = torch.zeros(SIZE, device="cuda"), torch.zeros(SIZE, device="cuda")
    side.wait_stream(main)

    def raised(first: Callable[[], Any], then: Callable[[], Any]) -> str:
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            first()
        try:
            then()
        except RuntimeError as error:
            return str(error)
        return ""

    kernel = lambda: launch(target, source)
    found = {
        "reads what is read": raised(lambda: source + 1.0, kernel),
        "is read beside it": raised(kernel, lambda: source + 1.0),
        "reads what is written": raised(lambda: source.fill_(1.0), kernel),
    }
    torch.cuda.synchronize()
    source.fill_(5.0)
    found["writes what is read"] = raised(lambda: target + 1.0, kernel)
    torch.cuda.synchronize()
    kernel()
    return {**found, "numbers": target.tolist()}
