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


def select_kernels(kernels: Kernels, device: torch.device, log: RunLog, host_ops: Sequence[str] = ()) -> None:
    """Select the kernels and log the choice for each op, with reasons for those left out. Collective over the world.
    host_ops: ops that the run calls on host tensors on any device. Errors as `choose_kernels`."""
    choose_kernels(kernels, device)
    for line in described(device, host_ops):
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


def described(device: torch.device, host_ops: Sequence[str]) -> list[str]:
    """Return the log lines: `kernels on cuda: triton: policy_loss, ...`, then reasons why `auto` left out better ones."""
    on_host = set(host_ops) if device.type != "cpu" else set()
    lines = [_line(device.type, [op for op in dispatch.selected(device.type) if op not in on_host])]
    if on_host:
        lines.append(_line("cpu", sorted(on_host)))
    kinds = [device.type, "cpu"] if on_host else [device.type]
    reasons = dict.fromkeys(reason for kind in kinds for reason in dispatch.unavailable(kind))
    return lines + [f"kernels left out: {reason}" for reason in reasons]


def _line(device_type: str, ops: Sequence[str]) -> str:
    by_implementation: dict[str, list[str]] = {}
    selected = dispatch.selected(device_type)
    for op in ops:
        by_implementation.setdefault(selected[op], []).append(op)
    return f"kernels on {device_type}: " + "; ".join(f"{chosen}: {', '.join(of)}" for chosen, of in by_implementation.items())
