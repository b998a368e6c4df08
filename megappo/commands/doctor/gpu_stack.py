"""Driver, GPUs, CUDA toolkit and torch of this machine: parts that do not fit, each with the command that fixes it.

`found` inspects the machine; `faults` only compares, so that every state can be tested without a GPU. `ops/implementations.py`
decides which kernels of the library run with this torch on this GPU.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from megappo.ops.implementations import BUILD
from megappo.runtime.versions import cuda_torch, nvcc_path, release_of

# The first Linux driver of each major version of CUDA: it runs programs of every minor version of it.
DRIVERS = {"12": "525.60.13", "13": "580.65.06"}
# Ampere (bf16, asynchronous copies), which the kernels, TransformerEngine and vLLM are compiled for.
LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi names it."""

    name: str
    memory_gib: float
    capability: tuple[int, int]  # major, minor


@dataclass(frozen=True)
class Stack:
    """Parts of the stack; None if missing. `*_cuda` are CUDA versions such as "13.0"."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    driver_cuda: str | None = None  # newest CUDA that the driver runs
    nvcc: str | None = None
    nvcc_cuda: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    torch_sees: int = 0
    library_has_cuda: bool = False

    def lines(self) -> list[str]:
        unused = " (unused, as this torch has no CUDA)" if self.torch is not None and self.torch_cuda is None else ""
        nvcc = "not found (needed only for compiling the CUDA kernels)"
        if self.nvcc:
            nvcc = f"{self.nvcc}, CUDA {self.nvcc_cuda}{unused}"
        driver = f"{self.driver}, for CUDA up to {self.driver_cuda or 'unknown'}" if self.driver else "not found (nvidia-smi)"
        lines = [
            f"  GPU {index}: {gpu.name}, {gpu.memory_gib:.0f} GiB, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
            for index, gpu in enumerate(self.gpus)
        ]
        if not self.torch_sees:
            lines.append("  no GPU that torch can use: models, kernels and vLLM run on the CPU")
        return [
            *lines,
            f"  driver: {driver}",
            f"  nvcc: {nvcc}",
            f"  torch: {self.torch or 'not installed'}{f', CUDA {self.torch_cuda}' if self.torch_cuda else ', without CUDA'}",
        ]


@dataclass(frozen=True)
class Fault:
    """One line on a part that does not fit, with the command that fixes it."""

    text: str
    stops: bool  # the GPUs cannot be used until it is fixed


def _major(version: str | None) -> str:
    return (version or "").partition(".")[0]


def faults(stack: Stack) -> list[Fault]:
    """Find obstacles to using this machine's GPUs or compiling the CUDA kernels; none on a machine without GPU and with a CPU's
    torch, whether or not it has nvcc."""
    found = []
    if stack.torch is not None and stack.torch_cuda is None and stack.gpus:
        fix = f"pip install --force-reinstall {cuda_torch()}, then {BUILD}"
        found.append(Fault(f"torch {stack.torch} has no CUDA, and this machine has {len(stack.gpus)} GPUs: {fix}", True))
    if stack.torch_cuda is not None:
        found += _driver_faults(stack)
        found += _toolkit_faults(stack)
    least = ".".join(map(str, LEAST_CAPABILITY))
    for index, gpu in enumerate(stack.gpus):
        if gpu.capability < LEAST_CAPABILITY:
            has = ".".join(map(str, gpu.capability))
            others = ",".join(str(i) for i, other in enumerate(stack.gpus) if other.capability >= LEAST_CAPABILITY)
            fix = f"export CUDA_VISIBLE_DEVICES={others}" if others else f"take GPUs of {least} or later, or run.device=cpu"
            low = f"GPU {index} ({gpu.name}) has compute capability {has}, and {least} is the least"
            found.append(Fault(f"{low}: {fix}", not others))
    return found


def _driver_faults(stack: Stack) -> list[Fault]:
    if not stack.gpus or stack.torch_sees:
        return []
    needed = DRIVERS.get(_major(stack.torch_cuda), "the newest")
    if stack.driver_cuda is not None and int(_major(stack.driver_cuda)) < int(_major(stack.torch_cuda)):
        runs = f"driver {stack.driver} runs CUDA up to {stack.driver_cuda}, and torch {stack.torch} has CUDA {stack.torch_cuda}"
        return [Fault(f"{runs}: install driver {needed} or later", True)]
    blind = f"torch {stack.torch} sees none of this machine's {len(stack.gpus)} GPUs (CUDA_VISIBLE_DEVICES, permissions)"
    return [Fault(f"{blind}: python -c 'import torch; torch.cuda.init()' says why", True)]


def _toolkit_faults(stack: Stack) -> list[Fault]:
    if stack.library_has_cuda:  # built already: no toolkit is needed
        return []
    fix = f"install the toolkit of CUDA {stack.torch_cuda}, then CUDA_HOME=/usr/local/cuda-{stack.torch_cuda} {BUILD}"
    if stack.nvcc is None:
        lacks = f"torch {stack.torch} has CUDA {stack.torch_cuda}, and nvcc was not found for the CUDA kernels"
    elif _major(stack.nvcc_cuda) != _major(stack.torch_cuda):
        lacks = f"{stack.nvcc} is of CUDA {stack.nvcc_cuda}, and torch {stack.torch} of CUDA {stack.torch_cuda}"
    else:
        return []
    return [Fault(f"{lacks}: {fix}", False)]


def found(library_has_cuda: bool) -> Stack:
    """Inspect the stack of this machine. Imports torch if it is installed."""
    nvcc = nvcc_path()
    said = _said_by("nvidia-smi")
    driver = re.search(r"Driver Version: *([\d.]+)", said)
    driver_cuda = re.search(r"CUDA (?:UMD )?Version: *([\d.]+)", said)
    try:
        import torch
    except ImportError:
        version, cuda, sees = None, None, 0
    else:
        version, cuda, sees = torch.__version__, torch.version.cuda, torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Stack(
        gpus=gpus_of(_said_by("nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")),
        driver=driver.group(1) if driver else None,
        driver_cuda=driver_cuda.group(1) if driver_cuda else None,
        nvcc=nvcc,
        nvcc_cuda=release_of(_said_by(nvcc, "--version")) if nvcc else None,
        torch=version,
        torch_cuda=cuda,
        torch_sees=sees,
        library_has_cuda=library_has_cuda,
    )


def gpus_of(said: str) -> tuple[Gpu, ...]:
    """Parse nvidia-smi's lines `name, MiB, 9.0`; other lines are ignored, as it prints errors to stdout."""
    rows = re.findall(r"^(.+), *(\d+), *(\d+)\.(\d+) *$", said, re.MULTILINE)
    return tuple(Gpu(name, int(mib) / 1024, (int(major), int(minor))) for name, mib, major, minor in rows)


def _said_by(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, timeout=60, encoding="utf-8", errors="replace").stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
