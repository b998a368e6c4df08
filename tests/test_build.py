"""Building csrc/: what is left out and why, wrong settings, metadata, and the CUDA kernels by nvcc for the supported GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from csrc.build import NO_TORCH, BuildError, build, compile_cuda, cxx_commands, installed_torch, isas
from csrc.toolkit import (
    DEFAULT_ARCHS,
    Decision,
    Torch,
    arch_flags,
    cuda_decision,
    cudart,
    toolkit_root,
    toolkit_version,
)
from megappo.ops.implementations import LIBRARY
from megappo.ops.losses import value_loss
from megappo.runtime.versions import nvcc_path
from tests.cuda_environment import kernels_of_environment

ROOT = Path(__file__).parent.parent
CPU_TORCH = Torch(Path(), Path(), "2.13.0+cpu", None)
CUDA_TORCH = Torch(Path(), Path(), "2.13.0", "13.0")
CUDA_TOOLKIT = "install the toolkit of CUDA 13.0, then export CUDA_HOME=/usr/local/cuda-13.0"
needs_nvcc = pytest.mark.skipif(nvcc_path() is None, reason="nvcc is not installed")


def stand_in_nvcc(folder: Path, release: str, top: Path = Path("/nowhere")) -> str:
    """An nvcc that says of which CUDA it is and where its toolkit is."""
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    says = f"Cuda compilation tools, release {release}, V{release}.88"
    nvcc.write_text(f'#!/bin/sh\ncase "$1" in --version) echo "{says}";; --dryrun) echo "#$ TOP={top}" >&2;; *) exit 1;; esac\n')
    nvcc.chmod(0o755)
    return str(nvcc)


# ------------------------------------------------------------------------------------------------ what is built, and why not


def test_cuda_is_built_where_nvcc_and_a_cuda_torch_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = stand_in_nvcc(tmp_path, "13.2")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cuda_decision(CUDA_TORCH, {}) == Decision(True, f"nvcc {nvcc}")
    assert cuda_decision(CUDA_TORCH, {"MEGAPPO_CUDA": "0"}) == Decision(False, "MEGAPPO_CUDA = 0")
    assert toolkit_version(nvcc) == "13.2"


# torch, release of nvcc (None: no nvcc), reason, the command that mends it
OBSTACLES = [
    (CPU_TORCH, "13.0", "torch 2.13.0+cpu has no CUDA", "pip install --force-reinstall torch===2.13.0"),
    (CUDA_TORCH, None, "nvcc was not found and torch 2.13.0 has CUDA 13.0", CUDA_TOOLKIT),
    (CUDA_TORCH, "12.4", "{nvcc} is of CUDA 12.4 and torch 2.13.0 of CUDA 13.0", CUDA_TOOLKIT),
]


@pytest.mark.parametrize("torch_, release, reason, fix", OBSTACLES, ids=["cpu torch", "no nvcc", "other major"])
def test_cuda_is_left_out_with_a_reason_or_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_: Torch, release: str | None, reason: str, fix: str
) -> None:
    nvcc = stand_in_nvcc(tmp_path, release) if release else None
    monkeypatch.setattr("csrc.toolkit.nvcc_path", lambda: nvcc)
    reason = reason.format(nvcc=nvcc)
    assert cuda_decision(torch_, {}) == Decision(False, reason, fix)
    with pytest.raises(BuildError) as refused:
        cuda_decision(torch_, {"MEGAPPO_CUDA": "1"})
    assert str(refused.value) == f"MEGAPPO_CUDA = 1, but {reason}: {fix}"


def test_other_settings_and_a_broken_nvcc_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match="MEGAPPO_CUDA = yes: use 0 .* or 1"):
        cuda_decision(CUDA_TORCH, {"MEGAPPO_CUDA": "yes"})
    monkeypatch.setattr("csrc.toolkit.nvcc_path", lambda: "/bin/false")
    with pytest.raises(BuildError, match="^/bin/false --version failed: .*set CUDA_HOME to a whole CUDA toolkit$"):
        cuda_decision(CUDA_TORCH, {})


def test_a_torch_without_the_stable_abi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(BuildError, match="^torch 2.9.1.cu128 is older than 2.11: run `pip install torch==2.13.0`"):
        installed_torch()


def test_the_runtime_is_that_of_torch_before_that_of_the_toolkit(tmp_path: Path) -> None:
    packages, toolkit = tmp_path / "site-packages", tmp_path / "cuda"
    found = Torch(packages / "torch/include", packages / "torch/lib", "2.13.0", "13.0")
    nvcc = stand_in_nvcc(tmp_path / "wrapper", "13.0", toolkit)  # a script in another place than the toolkit
    with pytest.raises(BuildError, match="^libcudart.so.13 is in none of .*: set CUDA_HOME to a whole toolkit of CUDA 13.0$"):
        cudart(found, nvcc)
    for folder in (toolkit / "lib64", packages / "nvidia/cu13/lib"):  # the later one is the better one
        folder.mkdir(parents=True)
        (folder / "libcudart.so.13").touch()
        assert cudart(found, nvcc) == folder / "libcudart.so.13"


def test_architectures_become_flags_of_nvcc() -> None:
    assert arch_flags("8.0;9.0a") == [
        "-gencode",
        "arch=compute_80,code=sm_80",
        "-gencode",
        "arch=compute_90a,code=sm_90a",
    ]
    assert arch_flags("9.0+PTX") == ["-gencode", "arch=compute_90,code=[sm_90,compute_90]"]


@pytest.mark.parametrize("archs", ["", "7.5", "sm_90", "9", "9.0a+PTX"])
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


def total_of_a_loss() -> float:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    return value_loss(x, x.flip(0), x.square(), x.abs(), clip=0.2)[0].item()


def test_a_lesser_instruction_set_can_be_asked_for() -> None:
    """By a process from its start; this one has the best."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.test_build import total_of_a_loss as t; print(t())"
    environment = {**os.environ, "MEGAPPO_CPU_ISA": "baseline"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(total_of_a_loss(), rel=1e-5)


# ------------------------------------------------------------------------------------------------ metadata for pip


def backend(call: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A call of the build backend as pip makes it: another process, in the repository, which is not on its path."""
    off_path = f"import sys; sys.path = [p for p in sys.path if p not in ('', {str(ROOT)!r})]"
    script = f"{off_path}; from setuptools import build_meta; {call}"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([sys.executable, *flags, "-c", script], env=kept | environ, cwd=ROOT, capture_output=True, text=True)


def test_pip_builds_by_the_backend_with_what_is_installed(tmp_path: Path) -> None:
    """Without pyproject.toml pip 23 runs `setup.py develop`, which current setuptools turns into an isolated build, without
    torch.
    """
    system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    assert system["build-backend"] == "setuptools.build_meta"
    assert not [name for name in system["requires"] if not name.startswith("setuptools")], "an isolated build would download them"
    done = backend(f"build_meta.prepare_metadata_for_build_editable({str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    metadata = next(tmp_path.glob("*.dist-info/METADATA")).read_text()
    versions = runpy.run_path(str(ROOT / "megappo/runtime/versions.py"))
    python = re.search(r"^Requires-Python: (.*)$", metadata, re.MULTILINE)
    assert python and set(python.group(1).split(",")) == set(versions["PYTHON"].split(","))
    for name, specifier in (versions["REQUIRED"] | versions["EXTRAS"]["gpu"]).items():
        line = re.search(rf"^Requires-Dist: {re.escape(name)}([^A-Za-z\[;]*)(;.*)?$", metadata, re.MULTILINE)
        assert line and set(line.group(1).split(",")) == set(specifier.split(",")), name


def test_an_isolated_build_says_in_one_line_what_to_do(tmp_path: Path) -> None:
    for name in ("setuptools", "pkg_resources", "_distutils_hack"):
        if (spec := importlib.util.find_spec(name)) is not None:
            (tmp_path / name).symlink_to(Path(spec.origin).parent)
    done = backend("build_meta.get_requires_for_build_editable()", "-S", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"megappo: {NO_TORCH}" and "--no-build-isolation" in NO_TORCH
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------ CUDA, without a GPU


def test_the_bindings_compile_for_cuda(tmp_path: Path) -> None:
    """Torch's headers declare what the bindings use of CUDA in its CPU builds too, under the flags of a CUDA build. All bindings in
    one compilation, as torch's headers take longest."""
    commands = [command for made, command in cxx_commands(installed_torch(), True, tmp_path).items() if "binding" in made.name]
    sources = sorted((ROOT / "csrc").glob("*/binding.cpp"))
    flags = {tuple(word for word in command[: command.index("-c")]) for command in commands}
    assert len(commands) == len(sources) and len(flags) == 1 and "-DMEGAPPO_CUDA" in commands[0]
    every = tmp_path / "bindings.cpp"
    # Each has a struct of this name.
    apart = '#define Inputs Inputs{0}\n#include "{1}"\n#undef Inputs\n'
    every.write_text("".join(apart.format(number, source) for number, source in enumerate(sources)))
    done = subprocess.run([*flags.pop(), "-fsyntax-only", str(every)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def cuda_objects() -> list[Path]:
    """Compiled for the default architectures: those of the environment with a CUDA torch, which are of the same sources, or made
    here. Registers and spills of every kernel are in ptxas.log beside them."""
    built = kernels_of_environment()
    return sorted(built.glob("*_cuda.o")) if built else compile_cuda(ROOT / "build/cuda")


def assert_no_spills(report: str) -> None:
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills and all(pair == ("0", "0") for pair in spills)
    assert "warning" not in report.lower()


@needs_nvcc
def test_the_cuda_kernels_compile_for_ampere_and_hopper_without_spills(cuda_objects: list[Path]) -> None:
    assert cuda_objects and all(made.stat().st_size > 0 for made in cuda_objects)
    assert len(cuda_objects) == len(list((ROOT / "csrc").rglob("*.cu")))
    report = (cuda_objects[0].parent / "ptxas.log").read_text()
    for arch in ("sm_80", "sm_90a"):
        assert len(re.findall(rf"Compiling entry function '\S+' for '{arch}'", report)) >= len(cuda_objects) / 2
    assert_no_spills(report)
    # Hopper's matrix products are only asynchronous while nothing else touches their accumulators; ptxas says where it has to wait.
    assert "serialized" not in report and len(re.findall(r"linear_kernel\S+' for 'sm_90a'", report)) == 6


def cuda_program(name: str) -> str:
    """cuobjdump or ptxas of the toolkit; a lesser toolkit has no cuobjdump, but Triton brings one."""
    places = [toolkit_root(nvcc_path() or "") / "bin"]
    if (triton := importlib.util.find_spec("triton")) is not None:
        places.append(Path(triton.origin or "").parent / "backends/nvidia/bin")
    return next(str(place / name) for place in places if (place / name).exists())


@needs_nvcc
def test_there_is_code_for_the_gpus_that_are_supported_and_ptx_for_newer_ones(cuda_objects: list[Path], tmp_path: Path) -> None:
    """A GPU runs SASS of its own major version up to its own minor version, and PTX of any older GPU; 9.0a runs on 9.0 only."""
    assert DEFAULT_ARCHS == "8.0+PTX;9.0a"
    listed = {
        made.name: set(
            re.findall(
                r"\.(sm_\w+\.(?:cubin|ptx))",
                subprocess.run(
                    [cuda_program("cuobjdump"), "--list-elf", "--list-ptx", str(made)], capture_output=True, text=True, check=True
                ).stdout,
            )
        )
        for made in cuda_objects
    }
    assert listed == dict.fromkeys(listed, {"sm_80.cubin", "sm_80.ptx", "sm_90a.cubin"})
    for made in cuda_objects:  # what the driver of a B200 does at the first use
        folder = tmp_path / made.stem
        folder.mkdir()
        extract = [cuda_program("cuobjdump"), "--extract-ptx", "all", str(made)]
        subprocess.run(extract, cwd=folder, capture_output=True, check=True)
        (ptx,) = folder.glob("*.ptx")
        compiled = [cuda_program("ptxas"), "-v", "-arch=sm_100", str(ptx), "-o", str(folder / "sm_100.cubin")]
        report = subprocess.run(compiled, capture_output=True, text=True, check=True).stderr
        # linear_stats has no kernel there: its Hopper code is a trap, and the host code refuses the device before
        assert_no_spills(report)
