"""Checks of the compiled library: it loads beside this torch; its registered ops, linked libraries and code for each GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from megappo.ops.implementations import LIBRARY
from megappo.runtime.installed import Finding, findings
from scripts.gpu_stack.rows import Check, Skipped, Wrong, run

GROUP = "library"
ROOT = Path(__file__).resolve().parents[2]
PTXAS_LOG = ROOT / "build/kernels/ptxas.log"
NAMESPACE = "megappo_native::"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def cuobjdump() -> str:
    """Path of cuobjdump: few installations have the toolkit's, Triton ships one."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        raise Skipped("cuobjdump comes with Triton, which is not installed")
    return str(Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump")


def facts() -> dict:
    return json.loads(LIBRARY.with_suffix(".json").read_text())


@cache
def load() -> None:
    # All symbols at once: an undefined one would else show at the first call. torch's libraries are in the process already.
    ctypes.CDLL(str(LIBRARY))
    torch.ops.load_library(str(LIBRARY))


def loads() -> str:
    load()
    built = facts()
    if built["torch"] != torch.__version__:
        raise Wrong(f"built for torch {built['torch']}, and this is {torch.__version__}: install megappo again")
    if not built["cuda"]:
        raise Wrong(f"built without CUDA kernels: {built['cuda_reason']}; install it again with MEGAPPO_CUDA=1")
    return f"{LIBRARY.stat().st_size / 2**20:.1f} MiB beside torch {torch.__version__}, for {built['cuda_archs']}"


def without_cuda(registered: Mapping[str, set[str]]) -> list[str]:
    """Ops of the library that have no kernel for CUDA. registered: dispatch key -> names."""
    return sorted(set.union(*registered.values()) - registered["CUDA"])


def version_fault(found: Sequence[Finding]) -> str:
    """Required packages that are missing or were not tested in their version; "" if none."""
    return ", ".join(
        f"{f.requirement.name} {f.version or 'is missing'} (tested: {f.requirement.versions or 'any'})"
        for f in found
        if f.requirement.required and f.state != "ok"
    )


def versions() -> str:
    found = findings()
    fault = version_fault(found)
    if fault:
        raise Wrong(fault)
    shown = ("torch", "megatron-core", "vllm")
    return ", ".join(f"{f.requirement.name} {f.version}" for f in found if f.requirement.name in shown)


def registrations() -> str:
    load()
    registered = {
        key: {name for name in torch._C._dispatch_get_registrations_for_dispatch_key(key) if name.startswith(NAMESPACE)}
        for key in ("CPU", "CUDA")
    }
    if not registered["CUDA"] or without_cuda(registered):
        raise Wrong(f"no CUDA kernel is registered for {', '.join(without_cuda(registered))}")
    return f"{len(registered['CUDA'])} ops: " + ", ".join(sorted(name.removeprefix(NAMESPACE) for name in registered["CUDA"]))


def fake_kernels() -> str:
    """Fake kernels of the public ops, which are the ones in a graph; the library's are called inside them."""
    from megappo.ops import dispatch, selfcheck  # noqa: F401  imports every op

    names = [name if hasattr(torch.ops.megappo, name) else f"{name}_" for name in sorted(dispatch._references)]
    entries = {name: torch._library.simple_registry.singleton.find(f"megappo::{name}") for name in names}
    missing = [name for name, entry in entries.items() if entry.fake_impl.kernel is None]
    if missing:
        raise Wrong(f"no fake kernel (register_fake) for {', '.join(missing)}")
    return f"{len(names)} ops"


def cudart_fault(needed: Sequence[str], cuda: str) -> str:
    """Fault of a library that asks for the libraries `needed` beside a torch of CUDA `cuda`: another runtime; "" if none."""
    runtimes = [name for name in needed if name.startswith("libcudart")]
    wanted = f"libcudart.so.{cuda.split('.')[0]}"
    if runtimes == [wanted]:
        return ""
    return f"linked to {', '.join(runtimes) or 'no CUDA runtime'}, torch needs {wanted}: build with the nvcc of CUDA {cuda}"


def needed() -> str:
    names = re.findall(r"\(NEEDED\).*\[(.+)\]", _output("readelf", "-d", str(LIBRARY)))
    fault = cudart_fault(names, torch.version.cuda or "none")
    if fault:
        raise Wrong(fault)
    return ", ".join(names)


def mapped(pattern: str) -> list[str]:
    """Files of this process's memory map whose name matches."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({path for path in (line.split(maxsplit=5)[-1] for line in lines) if re.search(pattern, path)})


def one_runtime() -> str:
    """Check that the process has one CUDA runtime: two do not share streams."""
    load()
    runtimes = mapped(r"/libcudart[^/]*\.so")
    if len(runtimes) != 1:
        raise Wrong(f"{len(runtimes)} CUDA runtimes are loaded: {', '.join(runtimes)}")
    return runtimes[0]


def undefined(wanted: Iterable[str], libraries: Mapping[str, set[str]]) -> tuple[list[str], Counter]:
    """(symbols that no library defines, how many each defines). wanted: strong undefined symbols, without versions."""
    homes = {symbol: next((name for name, defined in libraries.items() if symbol in defined), None) for symbol in wanted}
    return sorted(s for s, home in homes.items() if home is None), Counter(home for home in homes.values() if home)


def symbols_of(library: str, kind: str) -> set[str]:
    """Dynamic symbols: kind is --defined-only or --undefined-only; of the undefined only strong ones, which must be found."""
    lines = [line.split() for line in _output("nm", "-D", kind, library).splitlines()]
    return {fields[-1].split("@")[0] for fields in lines if fields[-2] not in "wv"}


def symbols() -> str:
    load()
    pattern = r"/(libtorch|libc10|libcudart|libstdc|libgcc|libm|libc|ld-)[^/]*\.so"
    libraries = {Path(path).name: symbols_of(path, "--defined-only") for path in mapped(pattern)}
    lost, homes = undefined(symbols_of(str(LIBRARY), "--undefined-only"), libraries)
    if lost:
        raise Wrong(f"undefined: {', '.join(lost)}")
    return ", ".join(f"{count} of {name}" for name, count in homes.most_common())


def architectures(listing: str) -> Counter:
    """sm_80 -> how many files of machine code (or PTX) for it cuobjdump lists."""
    return Counter(re.findall(r"\.(sm_\w+)\.(?:cubin|ptx)", listing))


def expected(archs: str) -> tuple[set[str], set[str]]:
    """ "8.0;10.0+PTX" -> architectures that must have (machine code, PTX)."""
    names = [name.strip() for name in archs.split(";") if name.strip()]
    number = {name: "sm_" + name.removesuffix("+PTX").replace(".", "") for name in names}
    return set(number.values()), {number[name] for name in names if name.endswith("+PTX")}


def code_fault(archs: str, sass: Mapping[str, int], ptx: Mapping[str, int], sources: int) -> str:
    """First thing that a library built for `archs` lacks; "" if nothing. sources: files that every architecture must hold."""
    want_sass, want_ptx = expected(archs)
    for kind, want, have in (("machine code", want_sass, sass), ("PTX", want_ptx, ptx)):
        for arch in sorted(want):
            if have.get(arch, 0) < sources:
                return f"{kind} for {arch}: {have.get(arch, 0)} of {sources} files"
    return ""


def code() -> str:
    sources = len(list((ROOT / "csrc").rglob("*.cu")))
    sass = architectures(_output(cuobjdump(), "--list-elf", str(LIBRARY)))
    ptx = architectures(_output(cuobjdump(), "--list-ptx", str(LIBRARY)))
    fault = code_fault(facts()["cuda_archs"], sass, ptx, sources)
    if fault:
        raise Wrong(fault)
    return f"machine code {', '.join(sorted(sass))}; PTX {', '.join(sorted(ptx)) or 'none'}; {sources} files each"


def kernels_of(log: str) -> list[tuple[str, str, int, int]]:
    """(kernel, arch, registers, bytes spilled) of every kernel in ptxas' report."""
    entry = re.compile(
        r"Compiling entry function '(\S+)' for '(sm_\w+)'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    return [(name, arch, int(registers), int(stores) + int(loads)) for name, arch, stores, loads, registers in entry.findall(log)]


def register_table(log: str) -> str:
    """One clause per architecture; raises Wrong for spills, kernels without a line, and matrix products that ptxas serialised."""
    kernels = kernels_of(log)
    if not kernels or len(kernels) != log.count("Compiling entry function"):
        raise Wrong(f"{len(kernels)} of {log.count('Compiling entry function')} kernels have registers and spills in the report")
    spilled = [f"{name} ({arch}): {size} bytes" for name, arch, _, size in kernels if size]
    if spilled:
        raise Wrong(f"spills: {', '.join(spilled)}")
    if "serialized" in log:
        raise Wrong("wgmma was serialised: " + next(line for line in log.splitlines() if "serialized" in line))
    by_arch: dict[str, list[int]] = {}
    for _, arch, registers, _ in kernels:
        by_arch.setdefault(arch, []).append(registers)
    return "; ".join(
        f"{arch}: {len(used)} kernels, {min(used)}-{max(used)} registers, no spills" for arch, used in sorted(by_arch.items())
    )


def registers() -> str:
    if not PTXAS_LOG.exists():
        raise Wrong(f"{PTXAS_LOG} is missing: the library was not built here")
    return register_table(PTXAS_LOG.read_text())


CHECKS: Sequence[Check] = (
    ("versions", versions),
    ("loads", loads),
    ("CUDA registrations", registrations),
    ("fake kernels", fake_kernels),
    ("NEEDED", needed),
    ("one CUDA runtime", one_runtime),
    ("undefined symbols", symbols),
    ("machine code and PTX", code),
    ("registers and spills", registers),
)

if __name__ == "__main__":
    run(GROUP, CHECKS)
