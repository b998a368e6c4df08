"""Every implementation of the ops, as a fixture: the same tests run over all of them, on the CPU and, marked gpu, on a GPU.

`kernels` is the device to put tensors on, with the implementation selected. INTERPRETED_WITH of a test module: constants that its
interpreted kernels have instead of their own. The CUDA kernels run on the CPU too, compiled against cuda_on_cpu/, which shows wrong
arithmetic and indexing but not what only a GPU does.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from csrc.build import compile_cuda_for_cpu
from megappo.ops import dispatch
from megappo.ops.implementations import LIBRARY
from tests.ops.interpreted_scan import scan_in_steps

HERE = Path(__file__).parent
ON_CPU = ["reference", "cpp", "triton", "cuda_on_cpu"]
ON_GPU = [pytest.param(f"{name} on a gpu", marks=pytest.mark.gpu) for name in ("reference", "triton", "cuda")]


def compiled_for_cpu() -> Path:
    """The library of the CUDA kernels compiled for the CPU; compiled again when a source is newer."""
    work = HERE.parent.parent / "build/cuda_on_cpu"
    library = work / "kernels.so"
    sources = [*LIBRARY.parent.parent.joinpath("csrc").rglob("*.*"), *HERE.joinpath("cuda_on_cpu").iterdir()]
    if not library.exists() or library.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        compile_cuda_for_cpu(library, work, HERE / "cuda_on_cpu")
    return library


@pytest.fixture(scope="session")
def cuda_on_cpu() -> str:
    """Namespace of the CUDA kernels compiled for the CPU."""
    torch.ops.load_library(str(compiled_for_cpu()))
    return "megappo_cuda_on_cpu"


@pytest.fixture(params=[*ON_CPU, *ON_GPU])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Selects the implementation for the test; the device for its tensors."""
    name, _, gpu = request.param.partition(" on ")
    if name == "triton" and not gpu:
        # Read when a kernel's file is imported and when it runs. Worlds that tests start do not inherit it.
        monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
        for constant, value in getattr(request.module, "INTERPRETED_WITH", {}).items():
            monkeypatch.setattr(constant, value)
        # a scan that the interpreter is through with
        monkeypatch.setattr(importlib.import_module("triton.runtime.interpreter").ScanOps, "generic_scan", scan_in_steps)
    native = request.getfixturevalue("cuda_on_cpu") if name == "cuda_on_cpu" else None
    with dispatch.using("cpp" if native else name, native=native):
        yield torch.device("cuda" if gpu else "cpu")
