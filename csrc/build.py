"""Compile csrc/ to megappo/_native.so: the C++ kernels anywhere, the CUDA kernels if nvcc and a CUDA torch exist.

Used by setup.py, and by the tests, which compile the CUDA part without a CUDA torch (`compile_cuda`) and for the CPU
(`compile_cuda_for_cpu`). The library uses only torch's stable ABI and no Python ABI, so one binary serves torch 2.11 and later.

Environment: MEGAPPO_CUDA and CUDA_HOME, see toolkit.py. MEGAPPO_CUDA_ARCHS: semicolon-separated, by default toolkit.py's
DEFAULT_ARCHS. CXX: the C++ compiler.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from csrc.toolkit import DEFAULT_ARCHS, BuildError, Torch, arch_flags, cuda_decision, cudart, toolkit_version
from megappo.runtime.versions import nvcc_path, pinned

CSRC = Path(__file__).parent
# Oldest torch whose stable ABI can load the library, for Python and for the headers (one byte per number, from the top).
OLDEST_TORCH = (2, 11)
TARGET_VERSION = f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"
CXX_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",  # this and the next allow vector code and change no result
    "-fno-trapping-math",
    "-ffp-contract=fast",  # fuse a * b + c
    "-Wall",
    "-Wno-psabi",
]
ISA_FLAGS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"],
}
NO_TORCH = (
    f"the kernels are compiled against the installed torch, and there is none here: run `pip install {pinned('torch')} setuptools` "
    "first, then this command with --no-build-isolation"
)


def installed_torch() -> Torch:
    """Torch of this Python. BuildError if there is none or one older than the library's stable ABI."""
    try:
        import torch
    except ImportError:
        raise BuildError(NO_TORCH) from None
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        older = f"torch {torch.__version__} is older than {oldest}"
        raise BuildError(f"{older}: run `pip install {pinned('torch')}` and install megappo again")
    root = Path(torch.__file__).parent
    return Torch(root / "include", root / "lib", torch.__version__, torch.version.cuda)


def isas() -> list[str]:
    """Instruction sets to compile the CPU kernels for on this kind of machine."""
    return list(ISA_FLAGS) if platform.machine() in ("x86_64", "AMD64") else ["baseline"]


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


def _link(objects: Sequence[Path], output: Path, torch: Torch, runtime: Sequence[Path] = ()) -> None:
    """Link `output` against torch and the libraries of `runtime`, with their present paths, and load it once."""
    output.parent.mkdir(parents=True, exist_ok=True)
    # Link under another name and rename: a process that has mapped the old library keeps it.
    fresh = output.with_suffix(".new")
    # libtorch.so loads libtorch_cuda.so if torch has CUDA. Linked here, a CPU torch's process would need it too.
    libraries = [f"-L{torch.lib}", f"-Wl,-rpath,{torch.lib}", "-ltorch", "-ltorch_cpu", "-lc10"]
    libraries += [*map(str, runtime), *(f"-Wl,-rpath,{path.parent}" for path in runtime)]
    _run([_cxx(), "-shared", "-o", str(fresh), *map(str, objects), *libraries])
    # The linker accepts undefined symbols of a shared library; only loading finds them.
    _run([sys.executable, "-c", "import sys, torch; torch.ops.load_library(sys.argv[1])", str(fresh)])
    fresh.replace(output)


def _object(folder: Path, source: Path, variant: str = "") -> Path:
    return folder / ("_".join(source.relative_to(CSRC).with_suffix("").parts) + variant + ".o")


def cxx_commands(torch: Torch, with_cuda: bool, work: Path) -> dict[Path, list[str]]:
    """Object -> command that compiles it, for every C++ file of the library."""
    # USE_CUDA: torch's headers declare the current CUDA stream only if it is defined.
    common = [_cxx(), *CXX_FLAGS, *(["-DMEGAPPO_CUDA", "-DUSE_CUDA"] if with_cuda else []), f"-I{CSRC}"]
    commands = {}
    for source in sorted(CSRC.rglob("*.cpp")):
        variants: dict[str, list[str]] = {"": _torch_flags(torch) if source.name == "binding.cpp" else []}
        if source.name == "cpu.cpp":
            variants = {f"_{isa}": [f"-DMEGAPPO_ISA={isa}", *ISA_FLAGS[isa]] for isa in isas()}
        for variant, flags in variants.items():
            made = _object(work, source, variant)
            commands[made] = [*common, *flags, "-c", str(source), "-o", str(made)]
    return commands


def build(library: Path, work: Path) -> str:
    """Compile and link `library`, with a record of the build in a .json next to it; returns a line on it. Raises BuildError."""
    torch = installed_torch()
    decision = cuda_decision(torch)
    work.mkdir(parents=True, exist_ok=True)
    commands = cxx_commands(torch, decision.built, work)
    _run_all(list(commands.values()))
    objects, runtime, archs, toolkit = list(commands), [], "", ""
    if decision.built:
        nvcc = nvcc_path() or ""
        archs, toolkit = os.environ.get("MEGAPPO_CUDA_ARCHS", DEFAULT_ARCHS), toolkit_version(nvcc)
        objects += compile_cuda(work, archs)
        runtime = [cudart(torch, nvcc)]
    _link(objects, library, torch, runtime)
    built = {
        "torch": torch.version,
        "isas": isas(),
        "cuda": decision.built,
        "cuda_archs": archs,
        "cuda_toolkit": toolkit,
        "cuda_reason": decision.reason,
        "cuda_fix": decision.fix,
    }
    library.with_suffix(".json").write_text(json.dumps(built) + "\n")
    if decision.built:
        return (
            f"C++ kernels ({', '.join(isas())}) and CUDA {toolkit} kernels ({archs}) built; registers and spills are in "
            f"{work / 'ptxas.log'}"
        )
    fix = f" ({decision.fix})" if decision.fix else ""
    skipped = f"CUDA kernels skipped: {decision.reason}{fix}. On a GPU the Triton kernels would run."
    return f"C++ kernels built ({', '.join(isas())}); {skipped}"


def compile_cuda(work: Path, archs: str = DEFAULT_ARCHS) -> list[Path]:
    """Compile csrc/**/*.cu to objects, with ptxas' registers and spills in `work`/ptxas.log. Needs nvcc, but no CUDA torch."""
    nvcc = nvcc_path()
    if nvcc is None:
        raise BuildError("nvcc was not found (set CUDA_HOME or PATH)")
    work.mkdir(parents=True, exist_ok=True)
    sources = sorted(CSRC.rglob("*.cu"))
    objects = [_object(work, source, "_cuda") for source in sources]
    flags = ["-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-Xptxas", "-v", "-Xcompiler", "-fPIC", f"-I{CSRC}"]
    if "9.0a" in archs:
        flags.append("-DMEGAPPO_SM90A")  # tells host code that Hopper's kernels exist; nvcc has no macro for it there
    reports = _run_all(
        [[nvcc, *flags, *arch_flags(archs), "-c", str(source), "-o", str(made)] for source, made in zip(sources, objects)]
    )
    (work / "ptxas.log").write_text("".join(f"== {s.relative_to(CSRC)}\n{r}" for s, r in zip(sources, reports)))
    return objects


def compile_cuda_for_cpu(library: Path, work: Path, fake_cuda: Path) -> None:
    """Compile the CUDA kernels by the C++ compiler with the headers in `fake_cuda`, as megappo_cuda_on_cpu."""
    torch = installed_torch()
    work.mkdir(parents=True, exist_ok=True)
    defines = ["-DMEGAPPO_CUDA", "-DMEGAPPO_CUDA_ON_CPU", "-DMEGAPPO_NAMESPACE=megappo_cuda_on_cpu"]
    flags = [*CXX_FLAGS, "-O1", "-Wno-unknown-pragmas", *defines, f"-I{fake_cuda}", f"-I{CSRC}"]
    sources = [
        *sorted(CSRC.rglob("*.cu")),
        *sorted(CSRC.rglob("binding.cpp")),
        *sorted(CSRC.rglob("cpu.cpp")),
        CSRC / "common/isa.cpp",
    ]
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
