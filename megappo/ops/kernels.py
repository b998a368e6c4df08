"""Which implementations of the ops exist, which run on a device, and why one cannot run here. Needs no torch.

    cpp        csrc/*/cpu.cpp         CPU tensors
    cuda       csrc/*/cuda.cu         CUDA tensors
    triton     ops/triton/FILE.py     CUDA tensors, and CPU tensors under TRITON_INTERPRET=1 (tests)
    reference  the op's own file      every device
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Literal, Optional

Kernels = Literal["auto", "cpp", "triton", "cuda", "reference"]
# What `auto` tries, best first.
ORDER = {"cpu": ("cpp", "reference"), "cuda": ("cuda", "triton", "reference")}
LIBRARY = Path(__file__).parent.parent / "_native.so"


def missing(implementation: str, device_type: str) -> Optional[str]:
    """Why an implementation cannot run on this kind of device ("cpu", "cuda") here; None where it can."""
    if implementation in ("auto", "reference"):
        return None
    if implementation == "triton":
        if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton kernels run on a GPU, and this run is on the CPU"
        return None if importlib.util.find_spec("triton") else "triton is not installed (pip install triton)"
    if implementation == "cpp" and device_type != "cpu":
        return "the C++ kernels run on the CPU, and this run is on a GPU"
    if implementation == "cuda" and device_type != "cuda":
        return "the CUDA kernels run on a GPU, and this run is on the CPU"
    if not LIBRARY.exists():
        return "the compiled kernels are missing: install megappo with a C++ compiler (pip install --no-build-isolation -e .)"
    facts = json.loads(LIBRARY.with_suffix(".json").read_text())
    if implementation == "cuda" and not facts["cuda"]:
        return f"megappo was built without CUDA kernels: {facts['cuda_reason']}; install it again with nvcc and a CUDA torch"
    return None


def describe() -> str:
    """One line: what the installed library holds, and what is left out and why."""
    if not LIBRARY.exists():
        return "no compiled kernels: the ops run their PyTorch references"
    facts = json.loads(LIBRARY.with_suffix(".json").read_text())
    cpu = f"C++ kernels for {', '.join(facts['isas'])}"
    return f"{cpu}; CUDA kernels" if facts["cuda"] else f"{cpu}; no CUDA kernels ({facts['cuda_reason']}): a GPU runs Triton's"


if __name__ == "__main__":
    print(describe())
