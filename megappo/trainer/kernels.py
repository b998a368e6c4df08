"""Selects the implementation of the ops for a run, says once what each op runs, and checks it on a GPU."""

from __future__ import annotations

import torch

from megappo.ops import dispatch
from megappo.ops.kernels import Kernels
from megappo.ops.selfcheck import require_sound
from megappo.telemetry.runlog import RunLog


def select_kernels(kernels: Kernels, device: torch.device, log: RunLog) -> None:
    """Before the first op of a run. ValueError where the requested implementation is missing; RuntimeError where a GPU's kernels
    compute something else than their references, which depends on the GPU, its driver and Triton's compiler, so every run looks.
    What the CPU runs depends on the build, and the tests have looked at it."""
    dispatch.select(kernels)
    by_implementation: dict[str, list[str]] = {}
    for op, chosen in dispatch.selected(device.type).items():
        by_implementation.setdefault(chosen, []).append(op)
    log.note("kernels: " + "; ".join(f"{chosen}: {', '.join(ops)}" for chosen, ops in by_implementation.items()))
    if device.type == "cuda":
        require_sound(device)
