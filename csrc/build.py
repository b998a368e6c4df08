"""Compiles csrc/ to megappo/_native.so: the C++ kernels anywhere, the CUDA kernels where nvcc and a CUDA torch exist.

Used by setup.py, and by the tests, which compile the CUDA part without a CUDA torch (`compile_cuda`) and for the CPU
(`compile_cuda_for_cpu`). The library uses only torch's stable ABI and no Python ABI, so one binary serves torch 2.11 and later.

Environment: MEGAPPO_CUDA=0 leaves CUDA out, MEGAPPO_CUDA=1 makes a missing nvcc an error. MEGAPPO_CUDA_ARCHS: semicolon-separated,
default "8.0;9.0a". CXX: the C++ compiler. CUDA_HOME: where nvcc is, if not on PATH.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Optional, Sequence

CSRC = Path(__file__).parent
# The oldest torch whose stable ABI the library may be loaded by: 2.11.
TARGET_VERSION = "0x020b000000000000"
# -ffp-contract=fast lets the compiler fuse a*b+c; -fno-math-errno and -fno-trapping-math allow vector code and change no result.
CXX_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wall", "-Wno-psabi"]
ISA_FLAGS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"],
}
DEFAULT_ARCHS = "8.0;9.0a"
NO_TORCH = (
    "the kernels are compiled against the installed torch, and there is none here: run `pip install torch==2.13.0 setuptools` first, then "
    "this command with --no-build-isolation"
)


class BuildError(RuntimeError):
    """A compiler is missing or failed; the text says which and what that means."""


@dataclass(frozen=True)
class Torch:
    """Where the torch that the library is linked against lives."""

    include: Path
    lib: Path
    version: str
    cuda: Optional[str]

    @classmethod
    def installed(cls) -> Torch:
        try:
            import torch
        except ImportError:
            raise BuildError(NO_TORCH) from None
        root = Path(torch.__file__).parent
        return cls(root / "include", root / "lib", torch.__version__, torch.version.cuda)


def isas() -> list[str]:
    """Instruction sets that the CPU kernels are compiled for on this kind of machine."""
    return list(ISA_FLAGS) if platform.machine() in ("x86_64", "AMD64") else ["baseline"]


def nvcc_path() -> Optional[str]:
    """nvcc of CUDA_HOME, else on PATH, else None."""
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin/nvcc").exists():
        return str(Path(home) / "bin/nvcc")
    return shutil.which("nvcc")


def cuda_decision(torch: Torch, environ: Mapping[str, str] = os.environ) -> tuple[bool, str]:
    """(whether the CUDA part is built, why or why not)."""
    wanted = environ.get("MEGAPPO_CUDA")
    if wanted not in (None, "0", "1"):
        raise BuildError(f"MEGAPPO_CUDA = {wanted}: use 0 (leave CUDA out) or 1 (require it)")
    missing = None
    if torch.cuda is None:
        missing = f"torch {torch.version} has no CUDA"
    elif nvcc_path() is None:
        missing = "nvcc was not found (set CUDA_HOME or PATH)"
    if wanted == "0":
        return False, "MEGAPPO_CUDA = 0"
    if missing and wanted == "1":
        raise BuildError(f"MEGAPPO_CUDA = 1, but {missing}")
    return missing is None, missing or f"nvcc {nvcc_path()}"


def arch_flags(archs: str) -> list[str]:
    """"8.0;9.0a" -> nvcc's -gencode flags."""
    names = [arch.strip() for arch in archs.split(";") if arch.strip()]
    for name in names:
        major, _, minor = name.removesuffix("a").removesuffix("+PTX").partition(".")
        if not (major.isdigit() and minor.isdigit() and int(major) >= 8):
            raise BuildError(f"MEGAPPO_CUDA_ARCHS = {archs}: {name!r} is not a compute capability from 8.0 on, like {DEFAULT_ARCHS!r}")
    if not names:
        raise BuildError(f"MEGAPPO_CUDA_ARCHS is empty: name compute capabilities like {DEFAULT_ARCHS!r}")
    flags = []
    for name in names:
        number = name.removesuffix("+PTX").replace(".", "")
        code = f"[sm_{number},compute_{number}]" if name.endswith("+PTX") else f"sm_{number}"
        flags += ["-gencode", f"arch=compute_{number},code={code}"]
    return flags


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _run_all(commands: Sequence[Sequence[str]]) -> list[str]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_run, commands))


def _cxx() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler: install g++ (Debian: apt-get install g++) or set CXX")
    return compiler


def _torch_flags(torch: Torch) -> list[str]:
    include = ["-isystem", str(torch.include), "-isystem", str(torch.include / "torch/csrc/api/include")]
    return [*include, f"-DTORCH_TARGET_VERSION={TARGET_VERSION}"]


def _link(objects: Sequence[Path], output: Path, torch: Torch, extra: Sequence[str] = ()) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    # Linked under another name and renamed: a process that has the old library mapped keeps it.
    fresh = output.with_suffix(".new")
    libraries = [f"-L{torch.lib}", f"-Wl,-rpath,{torch.lib}", "-ltorch", "-ltorch_cpu", "-lc10"]
    _run([_cxx(), "-shared", "-o", str(fresh), *map(str, objects), *libraries, *extra])
    fresh.replace(output)


def _object(folder: Path, source: Path, variant: str = "") -> Path:
    return folder / ("_".join(source.relative_to(CSRC).with_suffix("").parts) + variant + ".o")


def build(library: Path, work: Path) -> str:
    """Compile and link `library`, with what was built in a .json beside it; returns a line about it. Raises BuildError."""
    torch = Torch.installed()
    with_cuda, reason = cuda_decision(torch)
    work.mkdir(parents=True, exist_ok=True)
    cxx, defines = _cxx(), ["-DMEGAPPO_CUDA"] if with_cuda else []
    common = [*CXX_FLAGS, *defines, f"-I{CSRC}"]
    commands, objects = [], []

    def compile_cxx(source: Path, variant: str, flags: Sequence[str]) -> None:
        objects.append(_object(work, source, variant))
        commands.append([cxx, *common, *flags, "-c", str(source), "-o", str(objects[-1])])

    for source in sorted(CSRC.rglob("*.cpp")):
        if source.name == "cpu.cpp":
            for isa in isas():
                compile_cxx(source, f"_{isa}", [f"-DMEGAPPO_ISA={isa}", *ISA_FLAGS[isa]])
        else:
            compile_cxx(source, "", _torch_flags(torch) if source.name == "binding.cpp" else [])
    _run_all(commands)
    extra: list[str] = []
    archs = os.environ.get("MEGAPPO_CUDA_ARCHS", DEFAULT_ARCHS) if with_cuda else ""
    if with_cuda:
        cuda_objects = compile_cuda(work, archs)
        objects += cuda_objects
        toolkit = Path(nvcc_path() or "").parent.parent
        extra = [f"-L{toolkit / 'lib64'}", "-lcudart"]
    _link(objects, library, torch, extra)
    facts = library.with_suffix(".json")
    built = {"torch": torch.version, "isas": isas(), "cuda": with_cuda, "cuda_archs": archs, "cuda_reason": reason}
    facts.write_text(json.dumps(built) + "\n")
    if with_cuda:
        return f"C++ kernels ({', '.join(isas())}) and CUDA kernels built; registers and spills are in {work / 'ptxas.log'}"
    return f"C++ kernels built ({', '.join(isas())}); CUDA kernels skipped: {reason}. On a GPU the Triton kernels would run."


def compile_cuda(work: Path, archs: str = DEFAULT_ARCHS) -> list[Path]:
    """Objects of csrc/**/*.cu; ptxas' registers and spills of every kernel go to `work`/ptxas.log. Needs nvcc, not a CUDA torch."""
    nvcc = nvcc_path()
    if nvcc is None:
        raise BuildError("nvcc was not found (set CUDA_HOME or PATH)")
    work.mkdir(parents=True, exist_ok=True)
    sources = sorted(CSRC.rglob("*.cu"))
    objects = [_object(work, source, "_cuda") for source in sources]
    flags = ["-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-Xptxas", "-v", "-Xcompiler", "-fPIC", f"-I{CSRC}"]
    if "9.0a" in archs:
        flags.append("-DMEGAPPO_SM90A")  # the host code asks whether it has Hopper's kernels; no macro of nvcc says so there
    reports = _run_all([
        [nvcc, *flags, *arch_flags(archs), "-c", str(source), "-o", str(made)] for source, made in zip(sources, objects)
    ])  # fmt: skip
    (work / "ptxas.log").write_text("".join(f"== {s.relative_to(CSRC)}\n{r}" for s, r in zip(sources, reports)))
    return objects


def compile_cuda_for_cpu(library: Path, work: Path, fake_cuda: Path) -> None:
    """The CUDA kernels compiled by the C++ compiler against the headers in `fake_cuda`, registered as megappo_cuda_on_cpu."""
    torch = Torch.installed()
    work.mkdir(parents=True, exist_ok=True)
    defines = ["-DMEGAPPO_CUDA", "-DMEGAPPO_CUDA_ON_CPU", "-DMEGAPPO_NAMESPACE=megappo_cuda_on_cpu"]
    flags = [*CXX_FLAGS, "-O1", "-Wno-unknown-pragmas", *defines, f"-I{fake_cuda}", f"-I{CSRC}"]
    sources = [*sorted(CSRC.rglob("*.cu")), *sorted(CSRC.rglob("binding.cpp")), *sorted(CSRC.rglob("cpu.cpp")), CSRC / "common/isa.cpp"]
    commands, objects = [], []
    for source in sources:
        variants = isas() if source.name == "cpu.cpp" else [""]
        for isa in variants:
            objects.append(_object(work, source, f"_on_cpu{isa}"))
            language = ["-x", "c++"] if source.suffix == ".cu" else _torch_flags(torch) if source.name == "binding.cpp" else []
            chosen = [f"-DMEGAPPO_ISA={isa}", *ISA_FLAGS[isa]] if isa else []
            commands.append([_cxx(), *flags, *chosen, *language, "-c", str(source), "-o", str(objects[-1])])
    _run_all(commands)
    _link(objects, library, torch)
