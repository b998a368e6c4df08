"""Selects the implementation of the ops for a run, and says once what each op runs."""

from __future__ import annotations

import torch

from megappo.ops import dispatch
from megappo.ops.kernels import Kernels
from megappo.telemetry.runlog import RunLog


def select_kernels(kernels: Kernels, device: torch.device, log: RunLog) -> None:
    """Before the first op of a run. ValueError where the requested implementation is missing."""
    dispatch.select(kernels)
    by_implementation: dict[str, list[str]] = {}
    for op, chosen in dispatch.selected(device.type).items():
        by_implementation.setdefault(chosen, []).append(op)
    log.note("kernels: " + "; ".join(f"{chosen}: {', '.join(ops)}" for chosen, ops in by_implementation.items()))
