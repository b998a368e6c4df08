"""Building csrc/: what is left out and why, wrong settings, and the CUDA kernels by nvcc, for the GPUs that are supported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from csrc.build import BuildError, Torch, arch_flags, build, compile_cuda, cuda_decision, isas, nvcc_path
from megappo.ops.kernels import LIBRARY

ROOT = Path(__file__).parent.parent
CPU_TORCH = Torch(Path(), Path(), "2.13.0+cpu", None)
CUDA_TORCH = Torch(Path(), Path(), "2.13.0", "13.0")


def test_cuda_is_built_where_nvcc_and_a_cuda_torch_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csrc.build.nvcc_path", lambda: "/opt/cuda/bin/nvcc")
    assert cuda_decision(CUDA_TORCH, {}) == (True, "nvcc /opt/cuda/bin/nvcc")
    assert cuda_decision(CUDA_TORCH, {"MEGAPPO_CUDA": "0"}) == (False, "MEGAPPO_CUDA = 0")
    assert cuda_decision(CPU_TORCH, {}) == (False, "torch 2.13.0+cpu has no CUDA")
    monkeypatch.setattr("csrc.build.nvcc_path", lambda: None)
    assert cuda_decision(CUDA_TORCH, {}) == (False, "nvcc was not found (set CUDA_HOME or PATH)")


@pytest.mark.parametrize("torch_, environ, text", [
    (CPU_TORCH, {"MEGAPPO_CUDA": "1"}, "MEGAPPO_CUDA = 1, but torch 2.13.0\\+cpu has no CUDA"),
    (CUDA_TORCH, {"MEGAPPO_CUDA": "yes"}, "MEGAPPO_CUDA = yes: use 0 .* or 1"),
])  # fmt: skip
def test_a_cuda_build_that_cannot_be_is_refused(torch_: Torch, environ: dict[str, str], text: str) -> None:
    with pytest.raises(BuildError, match=text):
        cuda_decision(torch_, environ)


def test_architectures_become_flags_of_nvcc() -> None:
    assert arch_flags("8.0;9.0a") == [
        "-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90a,code=sm_90a",
    ]  # fmt: skip
    assert arch_flags("9.0+PTX") == ["-gencode", "arch=compute_90,code=[sm_90,compute_90]"]


@pytest.mark.parametrize("archs", ["", "7.5", "sm_90", "9"])
def test_architectures_that_do_not_exist_are_refused(archs: str) -> None:
    with pytest.raises(BuildError, match="MEGAPPO_CUDA_ARCHS"):
        arch_flags(archs)


def test_a_compiler_that_fails_says_what_it_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match="false -std=c\\+\\+20"):
        build(tmp_path / "kernels.so", tmp_path)
    assert not (tmp_path / "kernels.so").exists()


def test_the_installed_library_says_what_it_holds() -> None:
    facts = json.loads(LIBRARY.with_suffix(".json").read_text())
    assert facts["isas"] == isas() and facts["torch"] == torch.__version__
    if torch.version.cuda is None:
        assert not facts["cuda"] and "has no CUDA" in facts["cuda_reason"]


def test_a_lesser_instruction_set_can_be_asked_for() -> None:
    script = (
        "import torch; from megappo.ops import whiten; x = torch.randn(1000, generator=torch.Generator().manual_seed(0));"
        "print(whiten.whiten_apply(x, x > -1, torch.tensor([900.0, 3.0, 800.0]).double()).sum().item())"
    )
    sums = {
        isa: float(subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "MEGAPPO_CPU_ISA": isa}, cwd=ROOT, capture_output=True, text=True,
            check=True,
        ).stdout)
        for isa in ("baseline", isas()[-1])
    }  # fmt: skip
    assert sums["baseline"] == pytest.approx(sums[isas()[-1]], rel=1e-5)


@pytest.mark.skipif(nvcc_path() is None, reason="nvcc is not installed")
def test_the_cuda_kernels_compile_for_ampere_and_hopper_without_spills() -> None:
    """The registers and spills of every kernel are kept in build/cuda/ptxas.log."""
    work = ROOT / "build/cuda"
    objects = compile_cuda(work)
    assert objects and all(made.stat().st_size > 0 for made in objects)
    report = (work / "ptxas.log").read_text()
    for arch in ("sm_80", "sm_90a"):
        assert len(re.findall(rf"Compiling entry function '\S+' for '{arch}'", report)) >= len(objects) / 2
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills and all(pair == ("0", "0") for pair in spills)
    assert "warning" not in report.lower()
    # Hopper's matrix products are only asynchronous while nothing else touches their accumulators; ptxas says where it has to wait.
    assert "serialized" not in report and re.search(r"linear_stats_kernel\S+' for 'sm_90a'", report)
