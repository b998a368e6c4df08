"""Selection of the ops' implementations for a run, without kernels that fail their check on a GPU, and its lines in the log."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
import torch.distributed as dist

from megappo.ops import dispatch, verdicts
from megappo.ops.implementations import ORDER, Kernels
from megappo.ops.verdicts import Faults, Look
from megappo.parallel.consensus import any_rank, on_every_rank
from megappo.telemetry.runlog import RunLog

logger = logging.getLogger(__name__)

# Seconds between two collectives of the ranks that check and those that wait for them: none lasts longer.
_POLL_S = 2.0


def select_kernels(kernels: Kernels, device: torch.device, log: RunLog, host_ops: Sequence[str] = ()) -> None:
    """Select the kernels before the first op of a run and log the choice for each op, with reasons for those left out. Collective.

    host_ops: ops that the run calls on host tensors, on any device. Errors as `choose_kernels`.
    """
    faults = choose_kernels(kernels, device)
    for (op, implementation), fault in faults.items():
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning(
                "kernels: %s (%s) %s; it is left out, please report this (%s)",
                op,
                implementation,
                fault,
                verdicts.cache_file(device),
            )
    for line in described(device, host_ops, faults):
        log.note(line)


def choose_kernels(kernels: Kernels, device: torch.device) -> Faults:
    """Select the kernels in this process; returns those left out, which fail their check on some GPU of the world. Collective.

    ValueError if a kernel that the user named is missing or fails; RuntimeError if the check cannot be done.
    """
    # Only a GPU's kernels are checked: they depend on the GPU, its driver and Triton's compiler. Those of the CPU depend on the
    # build alone, which the tests cover.
    dispatch.select(kernels, device.type)
    if device.type != "cuda" or kernels == "reference":
        return {}
    if not dist.is_initialized():
        return verdicts.select_checked(kernels, device)
    on_every_rank("choosing the kernels", lambda: dispatch.selected(device.type))  # a library may lack one on one node
    machines = on_every_rank("looking at the GPUs", lambda: (platform.node(), verdicts.fingerprint(device)))
    # one rank checks for all that have the same kind of GPU in the same machine
    looks = machines.index(machines[dist.get_rank()]) == dist.get_rank()
    return verdicts.select_checked(kernels, device, share=lambda chosen, look: _shared(chosen, look if looks else None))


def _shared(chosen: Mapping[str, str], look: Look | None) -> Faults:
    """Faults found by all ranks that check, on every rank. Collective every two seconds, so that none runs into its time-out."""
    with ThreadPoolExecutor(1) as pool:
        found: Future[Faults] | None = pool.submit(look) if look else None
        while any_rank(found is not None and not found.done()):
            if found is not None:
                wait([found], _POLL_S)
    ranks = on_every_rank("checking the kernels", lambda: (chosen, found.result() if found else {}))
    faults = disagreements([of_rank for of_rank, _ in ranks])
    for _, of_rank in ranks:
        faults |= of_rank
    return faults


def disagreements(choices: Sequence[Mapping[str, str]]) -> Faults:
    """Kernels that some ranks would take and others cannot (another library on one node); an op then runs by the lesser kernel on
    all. choices: by rank, op -> implementation.
    """
    faults: Faults = {}
    for op in choices[0]:
        # "gemm + triton" follows from the choice of its row op
        kernels = [choice[op] for choice in choices if choice[op] in ORDER["cuda"]]
        best = min(kernels, key=ORDER["cuda"].index, default="reference")
        other = next((rank for rank, choice in enumerate(choices) if choice[op] != best), None)
        if other is not None and best != "reference":
            faults[op, best] = f"cannot run on rank {other}, which takes {choices[other][op]}"
    return faults


def described(device: torch.device, host_ops: Sequence[str], faults: Faults) -> list[str]:
    """Lines for the log: `kernels on cuda: triton: policy_loss, ...`, then reasons why `auto` could not take better ones."""
    on_host = set(host_ops) if device.type != "cpu" else set()
    lines = [_line(device.type, [op for op in dispatch.selected(device.type) if op not in on_host])]
    if on_host:
        lines.append(_line("cpu", sorted(on_host)))
    lines += [f"kernels left out: {op} ({implementation}) {fault}" for (op, implementation), fault in faults.items()]
    kinds = [device.type, "cpu"] if on_host else [device.type]
    reasons = dict.fromkeys(reason for kind in kinds for reason in dispatch.unavailable(kind))
    return lines + [f"kernels left out: {reason}" for reason in reasons]


def _line(device_type: str, ops: Sequence[str]) -> str:
    by_implementation: dict[str, list[str]] = {}
    selected = dispatch.selected(device_type)
    for op in ops:
        by_implementation.setdefault(selected[op], []).append(op)
    return f"kernels on {device_type}: " + "; ".join(f"{chosen}: {', '.join(of)}" for chosen, of in by_implementation.items())
