"""Implementations of the ops, and the reason if one cannot run here. Imports torch only to query the GPU and to load the library.

cpp        csrc/*/cpu.cpp         CPU tensors
cuda       csrc/*/cuda.cu         CUDA tensors
triton     ops/triton/FILE.py     CUDA tensors, and CPU tensors under TRITON_INTERPRET=1 (tests)
reference  algo/, ops/FILE.py     every device, plain PyTorch
"""

from __future__ import annotations

import importlib.util
import json
import os
from functools import cache
from pathlib import Path
from typing import Any, Literal

from megappo.runtime.messages import first_line

Kernels = Literal["auto", "cpp", "triton", "cuda", "reference"]
# What `auto` tries, best first.
ORDER = {"cpu": ("cpp", "reference"), "cuda": ("cuda", "triton", "reference")}
LIBRARY = Path(__file__).parent.parent / "_native.so"
BUILD = "MEGAPPO_CUDA=1 pip install --no-build-isolation -e ."


def missing(implementation: str, device_type: str) -> str | None:
    """Reason, in one line, why an implementation cannot run on this kind of device ("cpu", "cuda"); None if it can.
    Loads the compiled library into the process. The GPU is the current one of this process."""
    if implementation in ("auto", "reference"):
        return None
    if implementation == "triton":
        if device_type == "cpu" and not interpreted():
            return "Triton kernels run on a GPU, and this run is on the CPU"
        return None if importlib.util.find_spec("triton") else "triton is not installed (pip install triton)"
    if implementation == "cpp" and device_type != "cpu":
        return "the C++ kernels run on the CPU, and this run is on a GPU"
    if implementation == "cuda" and device_type != "cuda":
        return "the CUDA kernels run on a GPU, and this run is on the CPU"
    if not (LIBRARY.exists() and _facts_file().exists()):
        return "the compiled kernels are missing: install megappo with a C++ compiler (pip install --no-build-isolation -e .)"
    return (_no_cuda(library_facts()) if implementation == "cuda" else None) or _unloadable(LIBRARY)


def interpreted() -> bool:
    """True if Triton's kernels run in its interpreter, for tests: minutes instead of milliseconds, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def library_facts() -> dict[str, Any]:
    """Read what csrc/build.py wrote beside the library: instruction sets, CUDA toolkit and architectures."""
    facts: dict[str, Any] = json.loads(_facts_file().read_text(encoding="utf-8"))
    return facts


def _facts_file() -> Path:
    return LIBRARY.with_suffix(".json")


def _no_cuda(facts: dict[str, Any]) -> str | None:
    """Reason why the library's CUDA kernels cannot run with this torch on this GPU; None if its facts give none."""
    if not facts["cuda"]:
        fix = facts.get("cuda_fix") or "install it again with nvcc and a CUDA torch"
        return f"megappo was built without CUDA kernels: {facts['cuda_reason']}; {fix}"
    import torch

    toolkit, runtime = facts.get("cuda_toolkit"), torch.version.cuda
    if runtime is None:
        built = f"megappo was built with CUDA kernels, and torch {torch.__version__} has no CUDA"
        return f"{built}: install it again with a CUDA torch ({BUILD})"
    # Minor versions of CUDA are compatible with each other, major ones are not.
    if toolkit and (major := runtime.split(".")[0]) != toolkit.split(".")[0]:
        built = f"megappo was built with CUDA {toolkit}, and torch {torch.__version__} is for CUDA {runtime}"
        return f"{built}: install it again with nvcc {major} on PATH ({BUILD})"
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    # A login node has no GPU: nothing there contradicts the build.
    if capability is None or serves(facts["cuda_archs"], capability):
        return None
    gpu, arch = "".join(map(str, capability)), ".".join(map(str, capability))
    held = f"this GPU is sm_{gpu}, and the CUDA kernels are for {facts['cuda_archs']}"
    return f"{held}: install megappo again for it (MEGAPPO_CUDA_ARCHS={arch} {BUILD})"


def serves(archs: str, capability: tuple[int, int]) -> bool:
    """True if code for these architectures (as in MEGAPPO_CUDA_ARCHS) runs on a GPU of this compute capability."""
    for arch in filter(None, map(str.strip, archs.split(";"))):
        name = arch.removesuffix("+PTX")
        major, minor = map(int, name.removesuffix("a").split("."))
        if name.endswith("a"):  # architecture-specific: 9.0a runs on 9.0 alone
            if capability == (major, minor):
                return True
        # Machine code of 8.0 runs on 8.x from 8.0 on; PTX (9.0+PTX) is compiled by the driver for any newer GPU.
        elif capability >= (major, minor) and (capability[0] == major or arch.endswith("+PTX")):
            return True
    return False


@cache
def _unloadable(library: Path) -> str | None:
    """Load the library, once. Returns the loader's reason for refusing it, None if it is loaded."""
    import torch

    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        # torch's message says only that loading failed; the loader's own (a missing symbol or library) is its cause
        said = first_line(error.__cause__ or error)
        again = "install megappo again for this torch (pip install --no-build-isolation -e .)"
        return f"the compiled kernels cannot be loaded ({said}): {again}"
    return None


def describe() -> str:
    """Describe the installed library in one line: kernels it holds, kernels left out and the reason."""
    if (reason := missing("cpp", "cpu")) is not None:
        return f"{reason}; until then the CPU runs the PyTorch references, and a GPU Triton's kernels"
    cpu = f"C++ kernels for {', '.join(library_facts()['isas'])}"
    reason = missing("cuda", "cuda")
    return f"{cpu}; CUDA kernels" if reason is None else f"{cpu}; no CUDA kernels ({reason}): a GPU runs Triton's"


if __name__ == "__main__":
    print(describe())
