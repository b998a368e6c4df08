"""Builds the CUDA runtime of the host's device for one CUDA torch, and names the environment in which its processes run.

    python -m tests.host_cuda.build PYTHON_OF_A_CUDA_TORCH       prints that environment as lines of `export`

The library is kept in build/host_cuda/<hash of the sources and of torch's symbols>. Needs g++, nm and the headers of the CUDA
toolkit; no GPU, no nvcc, and no torch in the process that builds.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parent.parent / "build/host_cuda"
# Libraries of torch whose undefined symbols the runtime has to answer.
TORCH_LIBRARIES = ("torch_cuda", "c10_cuda", "torch_python", "caffe2_nvrtc", "torch_cuda_linalg")
SYMBOL = re.compile(r"(cuda|__cuda|cublas|cu[A-Z])\w+$")
# cuFile has a library of its own that needs no driver.
NOT_OURS = re.compile(r"cuFile")
# A product that nobody computes must not look like a result.
COMPUTES = re.compile(r"cublas.*(gemm|gemv|Gemm|dot|Dot|trsm|getr|geqrf|gels|Matmul$)")
NOT_SUPPORTED = 15  # CUBLAS_STATUS_NOT_SUPPORTED


class HostCudaError(RuntimeError):
    """The device cannot be built here; the text says what is missing."""


def toolkit_headers() -> Path:
    """Folder with cuda_runtime_api.h."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and str(Path(nvcc).resolve().parent.parent), "/usr/local/cuda"]
    for home in homes:
        if home and Path(home, "include/cuda_runtime_api.h").exists():
            return Path(home, "include")
    raise HostCudaError("the headers of the CUDA toolkit were not found: install it, or set CUDA_HOME")


def torch_folder(python: str) -> Path:
    """Folder of the CUDA torch of this interpreter, found without importing it (ten seconds)."""
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd="/", env={**os.environ, "PYTHONPATH": ""})
    folder = Path(found.stdout.strip()).parent
    if found.returncode or not folder.joinpath("lib/libtorch_cuda.so").exists():
        raise HostCudaError(f"{python} has no CUDA build of torch")
    return folder


def build(python: str) -> Path:
    """Folder with libhostcuda.so for the torch of `python`; compiled where it is not in the cache."""
    libraries = [torch_folder(python) / f"lib/lib{name}.so" for name in TORCH_LIBRARIES]
    wanted = sorted({s for s in _symbols(libraries, "--undefined-only") if SYMBOL.match(s) and not NOT_OURS.match(s)})
    sources = sorted(HERE.joinpath("runtime").iterdir())
    content = "\n".join([Path(__file__).read_text(), *(source.read_text() for source in sources), *wanted])
    folder = CACHE / hashlib.sha256(content.encode()).hexdigest()[:16]
    if not folder.joinpath("libcuda.so.1").exists():
        _compile([source for source in sources if source.suffix == ".cpp"], wanted, folder)
    return folder


def environment(python: str, num_devices: int = 1, **settings: str) -> dict[str, str]:
    """Variables for a process of `python`; settings: HOST_CUDA_* without the prefix, in small letters (races="0")."""
    folder = build(python)
    return {
        "LD_PRELOAD": str(folder / "libhostcuda.so"),
        "LD_LIBRARY_PATH": str(folder),
        "AFTER_IMPORT": "torch=host_cuda:install",
        # Its fused kernels are launched past torch's dispatcher; host_cuda/fused_optimizers.py stands in for some.
        "HIDDEN_MODULES": "transformer_engine",
        "HOST_CUDA_DEVICES": str(num_devices),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num_devices))),
        **{f"HOST_CUDA_{name.upper()}": value for name, value in settings.items()},
    }


def site() -> str:
    """First folders of PYTHONPATH in such a process."""
    return f"{HERE.parents[1] / 'scripts' / 'after_import'}:{HERE / 'site'}"


def _symbols(files: Sequence[Path], which: str) -> set[str]:
    listed = _run(["nm", *(["-D"] if which == "--undefined-only" else ["-g"]), which, *map(str, files)])
    return {line.split()[-1].split("@")[0] for line in listed.splitlines() if len(line.split()) > 1}


def _compile(sources: Sequence[Path], wanted: Sequence[str], folder: Path) -> None:
    work = folder.with_name(f"{folder.name}.{os.getpid()}")
    work.mkdir(parents=True, exist_ok=True)
    objects = [work / f"{source.stem}.o" for source in sources]
    include = f"-I{toolkit_headers()}"
    flags = ["g++", "-std=c++20", "-O2", "-Wall", "-fPIC", include]
    with ThreadPoolExecutor() as pool:
        list(pool.map(_run, ([*flags, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects))))
    # The rest of what torch imports answers that all is well.
    rest = set(wanted) - _symbols(objects, "--defined-only")
    answers = [f"int {name}() {{ return {NOT_SUPPORTED if COMPUTES.match(name) else 0}; }}\n" for name in sorted(rest)]
    work.joinpath("answers.c").write_text("".join(answers))
    _run(["gcc", "-w", "-O1", "-fPIC", "-fno-builtin", "-c", str(work / "answers.c"), "-o", str(work / "answers.o")])
    library = work / "libhostcuda.so"
    _run(["g++", "-shared", "-o", str(library), *map(str, objects), str(work / "answers.o"), "-ldl"])
    work.joinpath("libcuda.so.1").symlink_to("libhostcuda.so")
    try:
        work.rename(folder)  # another process may have been faster
    except OSError:
        shutil.rmtree(work)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise HostCudaError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for name, value in environment(sys.argv[1]).items():
        print(f"export {name}={shlex.quote(value)}")
    print(f"export PYTHONPATH={shlex.quote(site())}:$PYTHONPATH")


if __name__ == "__main__":
    main()
