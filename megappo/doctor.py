"""`megappo doctor`: what is installed on this machine, what that makes possible, and what is missing for what.

Nothing heavy is imported but torch, to ask it for its devices and operations. The list of packages is `installed.py`'s.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys

from megappo.installed import can_train, findings
from megappo.plan.tables import table


def device_lines() -> list[str]:
    """GPUs and compilers of this machine."""
    lines = [f"  Python {platform.python_version()} on {platform.system()} {platform.machine()} ({sys.executable})"]
    if importlib.util.find_spec("torch") is None:
        return lines + ["  GPUs: unknown without torch"]
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            lines.append(f"  GPU {index}: {gpu.name}, {gpu.total_memory / (1 << 30):.0f} GiB, CUDA {torch.version.cuda}")
    else:
        lines.append("  no GPU that torch can use: models, kernels and vLLM run on the CPU")
    tools = (("nvcc", "compiling the CUDA kernels"), ("g++", "compiling the C++ kernels"), ("sbatch", "jobs of Slurm: megappo launch"))
    for tool, purpose in tools:
        where = shutil.which(tool)
        lines.append(f"  {tool}: {where or f'not found (needed only for {purpose})'}")
    return lines


def parts_lines() -> list[str]:
    """What of megappo works with what is installed."""
    from megappo.models.arch import ARCHITECTURES
    from megappo.rewards.rules import RULES

    present = {f.requirement.name for f in findings() if f.version is not None}
    engines = ["megatron"] + (["vllm"] if "vllm" in present else [])
    rules = [name for name in RULES if name != "math_verify" or "math-verify" in present]
    return [
        f"  rollout engines: {', '.join(engines)}",
        f"  model families: {', '.join(dict.fromkeys(ARCHITECTURES.values()))}",
        f"  rewards: {', '.join(rules)}",
    ]


def kernel_lines() -> tuple[list[str], list[str]]:
    """(what each op runs on the CPU and on a GPU, and whether that computes what its reference does; lines on what is wrong)."""
    import torch

    from megappo.ops import dispatch, kernels, selfcheck

    columns, wrong = [], []
    for kind in kernels.ORDER:
        chosen = dispatch.selected(kind)
        if kind == "cuda" and not torch.cuda.is_available():
            columns.append({op: [implementation, "no GPU here"] for op, implementation in chosen.items()})
            continue
        device = torch.device(kind)
        found = selfcheck.run_checks(device)
        wrong += [finding.line(device) for finding in found if not finding.ok]
        # an op that only others call has no result of its own
        state = dict.fromkeys(chosen, "in others") | {op: "ok" for finding in found for op in finding.ops}
        state |= {op: "WRONG" for finding in found if not finding.ok for op in finding.ops}
        columns.append({op: [implementation, state[op]] for op, implementation in chosen.items()})
    rows = [[op, *(cell for column in columns for cell in column[op])] for op in columns[0]]
    return [f"  {kernels.describe()}", *table(["op", "CPU", "state", "GPU", "state"], rows, left=5)], wrong


def report() -> tuple[str, int]:
    """The text of `megappo doctor`, and its exit code: 0 where PPO can run on this machine."""
    found = findings()
    rows = [
        [f.requirement.name, f.version or "-", f.requirement.versions or "any", f.state, f.requirement.purpose] for f in found
    ]
    lines = [
        "machine",
        *device_lines(),
        "",
        "packages",
        *table(["package", "installed", "tested", "state", "needed for"], rows, left=5),
    ]
    differing: list[str] = []
    if next(f for f in found if f.requirement.name == "torch").version is not None:
        kernels, differing = kernel_lines()
        lines += ["", "available", *parts_lines(), "", "kernels", *kernels]
    wrong = [f for f in found if f.state != "ok"]
    if wrong:
        lines += ["", "missing"]
        lines += [
            f"  {f.requirement.purpose}: {f.requirement.install} ({f.state}, tested: {f.requirement.versions or 'any'})"
            for f in wrong
        ]
    if differing:
        lines += ["", "wrong", *(f"  {line}" for line in differing)]
    ready = can_train(found) and not differing
    fix = "its kernels compute something else than their references" if differing else "install what is missing above"
    lines += ["", "PPO can run on this machine" if ready else f"PPO cannot run on this machine: {fix}"]
    return "\n".join(lines) + "\n", 0 if ready else 1
