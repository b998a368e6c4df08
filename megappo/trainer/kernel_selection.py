"""Selects the ops' implementations for a run, checks them on a GPU and logs the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megappo.ops import dispatch
from megappo.ops.implementations import Kernels
from megappo.ops.selfcheck import require_right
from megappo.parallel.consensus import on_every_rank, raised_by_all
from megappo.telemetry.runlog import RunLog


def select_kernels(kernels: Kernels, device: torch.device, log: RunLog) -> None:
    """Select the kernels and log the choice for each op, with reasons for those left out. Collective over the world. Errors as
    `choose_kernels`."""
    choose_kernels(kernels, device)
    for line in described(device):
        log.note(line)


def choose_kernels(kernels: Kernels, device: torch.device) -> None:
    """Select the kernels in this process and, on a GPU, compare them with their references. Collective over the world.
    ValueError, one line, if a kernel named by the user is missing, one is wrong or raises, or ranks choose different ones."""
    # Only GPU kernels are checked: they depend on the GPU, its driver and Triton's compiler. CPU kernels depend on the
    # build alone, which the tests cover.
    dispatch.select(kernels, device.type)
    if device.type != "cuda" or kernels == "reference":
        return
    if not dist.is_initialized():
        require_right(device)
        return
    require_same(on_every_rank("choosing the kernels", lambda: dispatch.selected(device.type)))
    raised_by_all(lambda: require_right(device), ValueError)


def require_same(choices: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks chose the implementations of rank 0, as roles must compute the same numbers; ValueError if not.
    choices: by rank, op -> implementation."""
    for rank, choice in enumerate(choices):
        for op, implementation in choice.items():
            if implementation != choices[0][op]:
                raise ValueError(
                    f"kernels: rank {rank} takes {implementation} for {op}, and rank 0 {choices[0][op]}; install the same megappo "
                    "on all nodes, or use kernels=triton or kernels=reference"
                )


def described(device: torch.device) -> list[str]:
    """Return the log lines: `kernels on cuda: triton: policy_loss, ...`, then reasons why `auto` left out better ones."""
    by_implementation: dict[str, list[str]] = {}
    for op, chosen in dispatch.selected(device.type).items():
        by_implementation.setdefault(chosen, []).append(op)
    line = "; ".join(f"{chosen}: {', '.join(ops)}" for chosen, ops in by_implementation.items())
    return [f"kernels on {device.type}: {line}", *(f"kernels left out: {one}" for one in dispatch.unavailable(device.type))]
