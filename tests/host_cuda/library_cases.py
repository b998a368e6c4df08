"""Kernels of other libraries on the device: operations that are registered for CUDA in Python, Triton's, interpreted, and the
stand-ins for TransformerEngine's optimizers.

Processes need TRITON_INTERPRET=1 and HOST_CUDA_FUSED_OPTIMIZERS=1 from their start.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
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
    """Result of a kernel, and the error if it meets another stream's work without a wait."""
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


def error_of(what: Callable[[], Any]) -> str:
    try:
        what()
    except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


def steps_from_fp64(make: Callable[..., torch.optim.Optimizer], exact: type[torch.optim.Optimizer]) -> float:
    """Largest difference of the parameters after three steps from the same steps in fp64 on the host."""
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    torch.manual_seed(0)
    start = [torch.randn(7, 5), torch.randn(SIZE)]
    mine = [x.cuda().requires_grad_() for x in start]
    right = [x.double().requires_grad_() for x in start]
    optimizers = make([{"params": mine}, {"params": []}], **settings), exact(right, **settings)
    for _ in range(3):
        for a, b in zip(mine, right):
            b.grad = torch.randn(b.shape).double()
            a.grad = b.grad.float().cuda()
        for optimizer in optimizers:
            optimizer.step()
    return max(float((a.detach().cpu() - b.detach()).abs().max()) for a, b in zip(mine, right))


def bytes_of_a_step(make: Callable[..., torch.optim.Optimizer]) -> int:
    """Allocated meanwhile at most, when the moments exist."""
    parameter = torch.ones(1 << 16, device="cuda", requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    return torch.cuda.max_memory_allocated() - before


def fused_optimizers(rank: int) -> dict[str, Any]:
    """Differences from fp64, numbers of the overflow flag, what a step allocates, what is refused, a missing wait."""
    from transformer_engine.pytorch.optimizers import (
        FusedAdam,
        FusedSGD,
        multi_tensor_applier,
        multi_tensor_l2norm,
        multi_tensor_scale,
    )

    torch.cuda.synchronize()
    flag = torch.zeros(1, dtype=torch.int, device="cuda")
    tensors = [torch.randn(33, device="cuda"), torch.randn(4, 8, device="cuda").bfloat16()]
    exact = [x.double().cpu() for x in tensors]
    norm, each = multi_tensor_applier(multi_tensor_l2norm, flag, [tensors], True)
    scaled = [torch.empty_like(x, dtype=torch.float32) for x in tensors]
    multi_tensor_applier(multi_tensor_scale, flag, [tensors, scaled], 0.3)
    errors = {
        "AdamW": steps_from_fp64(FusedAdam, torch.optim.AdamW),
        "Adam": steps_from_fp64(partial(FusedAdam, adam_w_mode=False), torch.optim.Adam),
        "norm": float((norm.cpu() - torch.cat([x.flatten() for x in exact]).norm()).abs()) / 8,
        "norms": float((each.cpu() - torch.stack([x.norm() for x in exact])).abs().max()) / 8,
        "scale": max(float((x.cpu() - 0.3 * y).abs().max()) for x, y in zip(scaled, exact)),
    }
    overflow = [int(flag)]
    for operation, lists in ((multi_tensor_l2norm, 1), (multi_tensor_scale, 2)):
        infinite = torch.full((3,), torch.inf, device="cuda")
        multi_tensor_applier(operation, flag.zero_(), [[infinite]] * lists, *([1.0] if lists == 2 else []))
        overflow.append(int(flag))
    infinite = torch.full((3,), 3e38, device="cuda")  # its norm is finite in fp64 only, and each number is finite
    multi_tensor_applier(multi_tensor_scale, flag.zero_(), [[infinite], [infinite]], 1.0)
    overflow.append(int(flag))

    def beside_a_kernel() -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            tensors[0].mul_(2.0)
        multi_tensor_applier(multi_tensor_l2norm, flag, [tensors])

    norm_of = partial(multi_tensor_applier, multi_tensor_l2norm, flag)
    found = {
        "errors": errors,
        "without bias correction": steps_from_fp64(partial(FusedAdam, bias_correction=False), torch.optim.AdamW),
        "overflow": overflow,
        "grown": bytes_of_a_step(FusedAdam),
        "grown, torch's": bytes_of_a_step(torch.optim.AdamW),
        "not contiguous": error_of(lambda: norm_of([[torch.ones(3, 4, device="cuda").t()]])),
        "on the host": error_of(lambda: norm_of([[torch.ones(3)]])),
        "other sizes": error_of(lambda: multi_tensor_applier(multi_tensor_scale, flag, [scaled, scaled[::-1]], 1.0)),
        "sgd": error_of(lambda: FusedSGD([torch.ones(3, device="cuda")])),
        "absent": [
            name
            for name in ("transformer_engine", "transformer_engine.pytorch")
            if error_of(partial(importlib.import_module, name))
        ],
        "race": error_of(beside_a_kernel),
    }
    torch.cuda.synchronize()
    return found
