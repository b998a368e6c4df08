"""CUDA toolkit around nvcc (found by megappo/runtime/versions.py): its fit to the installed torch, architectures, the CUDA runtime
to link.

Environment: MEGAPPO_CUDA=0 leaves CUDA out, MEGAPPO_CUDA=1 makes a missing part an error. CUDA_HOME: toolkit to use instead of
the nvcc on PATH.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megappo.runtime.versions import cuda_torch, nvcc_path, release_of

# SASS of Ampere and Ada (8.x) and of Hopper, whose kernels want 9.0a, which runs on no other GPU; the PTX serves all newer ones:
# the driver compiles it at the first use (2 s by ptxas for sm_100) and keeps the result. PTX costs 4 % of the objects' size and
# no time; SASS of 10.0 and 12.0 in its place doubles the size (3.6 to 7.7 MB) and the time of the build.
DEFAULT_ARCHS = "8.0+PTX;9.0a"


class BuildError(RuntimeError):
    """A compiler is missing or failed; the text names it and the consequence."""


@dataclass(frozen=True)
class Torch:
    """Directories of the torch that the library is linked against, its version and its CUDA version (None: a CPU build)."""

    include: Path
    lib: Path
    version: str
    cuda: str | None


def _said_by(nvcc: str, *arguments: str) -> str:
    """Output of nvcc. BuildError if it does not run."""
    try:
        done = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{nvcc} {' '.join(arguments)} failed: {error}; set CUDA_HOME to a whole CUDA toolkit") from None
    return done.stdout + done.stderr


def toolkit_version(nvcc: str) -> str:
    """Version of nvcc's toolkit, like "13.0"."""
    found = release_of(_said_by(nvcc, "--version"))
    if found is None:
        raise BuildError(f"{nvcc} --version names no release; set CUDA_HOME to a CUDA toolkit")
    return found


def toolkit_root(nvcc: str) -> Path:
    """Folder of nvcc's toolkit."""
    # Ask nvcc itself: the one on PATH may be a script, or a link from another place.
    found = re.search(r"^#\$ TOP=(.+)$", _said_by(nvcc, "--dryrun", "-c", "-x", "cu", os.devnull), re.MULTILINE)
    if found is None:
        raise BuildError(f"{nvcc} --dryrun names no toolkit; set CUDA_HOME to a CUDA toolkit")
    return Path(found.group(1).strip()).resolve()


def major(version: str) -> str:
    """Major version: "13.0" -> "13", as in libcudart.so.13."""
    return version.partition(".")[0]


@dataclass(frozen=True)
class Decision:
    """built: True if the CUDA part is. reason: for or against it. fix: command that installs the missing part, "" if none is."""

    built: bool
    reason: str
    fix: str = ""


def cuda_decision(torch: Torch, environ: Mapping[str, str] = os.environ) -> Decision:
    """Decide by nvcc, torch and MEGAPPO_CUDA. BuildError if MEGAPPO_CUDA=1 demands an impossible build."""
    wanted = environ.get("MEGAPPO_CUDA")
    if wanted not in (None, "0", "1"):
        raise BuildError(f"MEGAPPO_CUDA = {wanted}: use 0 (leave CUDA out) or 1 (require it)")
    if wanted == "0":
        return Decision(False, "MEGAPPO_CUDA = 0")
    decision = _possible(torch)
    if wanted == "1" and not decision.built:
        raise BuildError(f"MEGAPPO_CUDA = 1, but {decision.reason}: {decision.fix}")
    return decision


def _possible(torch: Torch) -> Decision:
    nvcc = nvcc_path()
    if torch.cuda is None:
        return Decision(False, f"torch {torch.version} has no CUDA", f"pip install --force-reinstall {cuda_torch()}")
    fix = f"install the toolkit of CUDA {torch.cuda}, then export CUDA_HOME=/usr/local/cuda-{torch.cuda}"
    if nvcc is None:
        return Decision(False, f"nvcc was not found and torch {torch.version} has CUDA {torch.cuda}", fix)
    found = toolkit_version(nvcc)
    if major(found) != major(torch.cuda):
        return Decision(False, f"{nvcc} is of CUDA {found} and torch {torch.version} of CUDA {torch.cuda}", fix)
    return Decision(True, f"nvcc {nvcc}")


def arch_flags(archs: str) -> list[str]:
    """nvcc's -gencode flags of "8.0;9.0a". +PTX behind one adds code that the driver compiles for any later GPU."""
    names = [arch.strip() for arch in archs.split(";") if arch.strip()]
    for name in names:
        first, _, second = name.removesuffix("+PTX").removesuffix("a").partition(".")
        if not (first.isdigit() and second.isdigit() and int(first) >= 8):
            known = f"a compute capability from 8.0 on, like {DEFAULT_ARCHS!r}"
            raise BuildError(f"MEGAPPO_CUDA_ARCHS = {archs}: {name!r} is not {known}")
        if name.endswith("a+PTX"):
            alone = name.removesuffix("+PTX")
            raise BuildError(f"MEGAPPO_CUDA_ARCHS = {archs}: PTX of {alone!r} runs on no other GPU; use {alone!r}")
    if not names:
        raise BuildError(f"MEGAPPO_CUDA_ARCHS is empty: name compute capabilities like {DEFAULT_ARCHS!r}")
    flags = []
    for name in names:
        number = name.removesuffix("+PTX").replace(".", "")
        code = f"[sm_{number},compute_{number}]" if name.endswith("+PTX") else f"sm_{number}"
        flags += ["-gencode", f"arch=compute_{number},code={code}"]
    return flags


def cudart(torch: Torch, nvcc: str) -> Path:
    """CUDA runtime to link: torch's own from NVIDIA's wheels, else (a torch of another origin) the toolkit's.

    BuildError if there is none of torch's major version.
    """
    assert torch.cuda is not None
    # torch's first: a process can hold only one runtime, and torch loads its own.
    name, packages = f"libcudart.so.{major(torch.cuda)}", torch.lib.parent.parent
    # CUDA 13's wheels share a folder, CUDA 12's have one each.
    folders = [packages / f"nvidia/cu{major(torch.cuda)}/lib", packages / "nvidia/cuda_runtime/lib", torch.lib]
    root = toolkit_root(nvcc)
    folders += [root / "lib64", root / "targets/x86_64-linux/lib", root / "targets/sbsa-linux/lib", root / "lib"]
    for folder in folders:
        if (folder / name).exists():
            return (folder / name).parent.resolve() / name
    searched = ", ".join(map(str, folders))
    raise BuildError(f"{name} is in none of {searched}: set CUDA_HOME to a whole toolkit of CUDA {torch.cuda}")
