"""`megappo doctor`: installed packages, the features that they enable, and missing packages with their purpose.

Imports torch for its devices and operations, and TransformerEngine, since only an import shows that it works. Packages are listed
in `installed.py`, driver and CUDA in `gpu_stack.py`.
"""

from __future__ import annotations

import platform
import shutil
import sys
from typing import TYPE_CHECKING, Any

from megappo.commands.doctor import gpu_stack
from megappo.commands.doctor.gpu_stack import Stack
from megappo.ops import implementations
from megappo.runtime.installed import can_train, findings, pair_fault
from megappo.telemetry.tables import table

if TYPE_CHECKING:
    import torch


def device_lines(stack: Stack) -> list[str]:
    python = f"  Python {platform.python_version()} on {platform.system()} {platform.machine()} ({sys.executable})"
    lines = [python, *stack.lines()]
    tools = {"g++": "compiling the C++ kernels, and layers with compile: true", "sbatch": "jobs of Slurm: megappo launch"}
    tools["bwrap"] = "code rewards: apt-get install bubblewrap"
    for tool, purpose in tools.items():
        where = shutil.which(tool)
        lines.append(f"  {tool}: {where or f'not found (needed only for {purpose})'}")
    return lines


def library_facts() -> dict[str, Any] | None:
    """Read the record that csrc/build.py left next to the library; None without a library."""
    there = implementations.LIBRARY.exists() and implementations.LIBRARY.with_suffix(".json").exists()
    return implementations.library_facts() if there else None


def library_line(facts: dict[str, Any]) -> str:
    cuda = f" by CUDA {facts.get('cuda_toolkit') or 'unknown'} for {facts['cuda_archs']}" if facts["cuda"] else " without CUDA"
    return f"  library: built for torch {facts['torch']}{cuda}"


def unfit_lines(stack: Stack) -> tuple[list[str], bool]:
    """Return lines on parts of the GPU stack that do not fit, and True if the GPUs are unusable until they are fixed."""
    found = gpu_stack.faults(stack)
    lines = [fault.text for fault in found]
    # Skipped if the faults above already explain why the library has no CUDA.
    reason = implementations.missing("cuda", "cuda") if stack.torch_cuda is not None else None
    if reason and not found:
        lines.append(f"CUDA kernels: {reason}")
    return lines, any(fault.stops for fault in found)


def parts_lines() -> list[str]:
    from megappo.models.families.registry import FAMILIES
    from megappo.models.implementation import transformer_engine_fault
    from megappo.rewards.rules import RULES

    present = {f.requirement.name for f in findings() if f.version is not None}
    engines = ["megatron"] + (["vllm"] if "vllm" in present else [])
    rules = [name for name in RULES if name != "math_verify" or "math-verify" in present]
    fault = transformer_engine_fault()
    layers = "TransformerEngine's on a GPU in bf16, else Megatron-core's own" if fault is None else "Megatron-core's own"
    if fault and "transformer-engine" in present:  # that it is not installed stands under `missing`
        layers += f" (TransformerEngine {fault})"
    return [
        f"  layers: {layers}",
        f"  rollout engines: {', '.join(engines)}",
        f"  model families: {', '.join(FAMILIES)}",
        f"  rewards: {', '.join(rules)}",
    ]


def kernel_lines() -> tuple[list[str], list[str]]:
    """Return the table of each op's implementation on CPU and GPU, checked against its reference, and lines on faults."""
    import torch

    from megappo.ops import dispatch, selfcheck  # noqa: F401  registers the ops

    columns, wrong = [], []
    for kind in implementations.ORDER:
        if kind == "cuda" and not torch.cuda.is_available():
            columns.append({op: [implementation, "no GPU here"] for op, implementation in dispatch.selected(kind).items()})
            continue
        column, failed = checked_column(torch.device(kind, 0))
        columns.append(column)
        wrong += failed
    rows = [[op, *(cell for column in columns for cell in column[op])] for op in columns[0]]
    facts = library_facts()
    library = [library_line(facts)] if facts else []
    return [f"  {implementations.describe()}", *library, *table(["op", "CPU", "state", "GPU", "state"], rows, left=5)], wrong


def checked_column(device: torch.device) -> tuple[dict[str, list[str]], list[str]]:
    """Check the kernels of a device. Returns op -> [implementation, state], and lines on faults."""
    from megappo.ops import dispatch, selfcheck

    found = selfcheck.run_checks(device)
    state = {op: "ok" for finding in found for op in finding.ops}
    state |= {op: "WRONG" for finding in found if not finding.ok for op in finding.ops}
    column = {op: [implementation, state.get(op, "unknown")] for op, implementation in dispatch.selected(device.type).items()}
    return column, [finding.line(device) for finding in found if not finding.ok]


def report() -> tuple[str, int]:
    """Return the text of `megappo doctor` and its exit code, 0 if PPO can run on this machine."""
    found, facts = findings(), library_facts()
    stack = gpu_stack.found(library_has_cuda=bool(facts and facts["cuda"]))
    rows = [[f.requirement.name, f.version or "-", f.requirement.versions or "any", f.state, f.requirement.purpose] for f in found]
    lines = [
        "machine",
        *device_lines(stack),
        "",
        "packages",
        *table(["package", "installed", "tested", "state", "needed for"], rows, left=5),
    ]
    differing: list[str] = []
    unfit, stopped = unfit_lines(stack)
    versions = {f.requirement.name: f.version for f in found if f.state == "ok" and f.version is not None}
    # One that is missing or out of range is told of by itself.
    if {"vllm", "torch"} <= versions.keys() and (pair := pair_fault(versions["vllm"], versions["torch"])) is not None:
        unfit, stopped = [*unfit, pair], True
    if stack.torch is not None:
        available, differing = kernel_lines()
        lines += ["", "available", *parts_lines(), "", "kernels", *available]
    wrong = [f for f in found if f.state != "ok"]
    if wrong:
        lines += ["", "missing"]
        lines += [
            f"  {f.requirement.purpose}: {f.requirement.install} ({f.state}, tested: {f.requirement.versions or 'any'})"
            for f in wrong
        ]
    if unfit:
        lines += ["", "does not fit", *(f"  {line}" for line in unfit)]
    if differing:
        lines += ["", "wrong", *(f"  {line}" for line in differing)]
    ready = can_train(found) and not differing and not stopped
    fix = "install what is missing above"
    if differing:
        fix = "its kernels compute something else than their references"
    elif can_train(found):
        fix = "mend what does not fit above"
    lines += ["", "PPO can run on this machine" if ready else f"PPO cannot run on this machine: {fix}"]
    return "\n".join(lines) + "\n", 0 if ready else 1
