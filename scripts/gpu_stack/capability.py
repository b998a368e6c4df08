"""GPUs that this build serves: by machine code or by PTX that the driver compiles, and what `kernels: auto` takes there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from megappo.ops.implementations import LIBRARY, serves
from scripts.gpu_stack.pretend import pretend_gpu
from scripts.gpu_stack.rows import Check, Wrong, run

GROUP = "capability"
GPUS: Mapping[str, tuple[int, int]] = {
    "A100": (8, 0),
    "L40S": (8, 9),
    "H100": (9, 0),
    "B200": (10, 0),
    "RTX PRO 6000": (12, 0),
}
HOPPER = (9, 0)


def wanted(op: str, capability: tuple[int, int]) -> str:
    """The implementation that `auto` should take for an op on a GPU that the library serves."""
    if op == "linear_stats":  # its CUDA kernel is Hopper's matrix products
        return "cuda" if capability == HOPPER else "triton"
    products = op == "linear_backward" or (op == "linear_dlogits" and capability != HOPPER)
    return "gemm + cuda" if products else "cuda"


def code_for(archs: str, capability: tuple[int, int]) -> str | None:
    """Code of a library for `archs` that runs on a GPU: `machine code 8.0` or `PTX 8.0`; None if there is none."""
    names = [name.strip() for name in archs.split(";") if name.strip()]
    exact = [name.removesuffix("+PTX") for name in names if serves(name.removesuffix("+PTX"), capability)]
    if exact:
        return f"machine code {exact[-1]}"
    ptx = [name.removesuffix("+PTX") for name in names if serves(name, capability)]
    return f"PTX {ptx[-1]}" if ptx else None


def selection_fault(selected: Mapping[str, str], capability: tuple[int, int]) -> str:
    """Ops that `auto` runs by something else on a GPU that the library serves; "" if none."""
    expected = {op: wanted(op, capability) for op in selected}
    return ", ".join(f"{op} runs by {chosen}, not {expected[op]}" for op, chosen in selected.items() if chosen != expected[op])


def serving(name: str) -> Callable[[], str]:
    def check() -> str:
        from megappo.ops import dispatch, selfcheck  # noqa: F401  imports every op

        archs = json.loads(LIBRARY.with_suffix(".json").read_text())["cuda_archs"]
        code = code_for(archs, GPUS[name])
        if code is None:
            raise Wrong(f"no code for sm_{''.join(map(str, GPUS[name]))} in a build for {archs or 'no GPU'}")
        pretend_gpu(name, GPUS[name])
        dispatch.select("auto", "cuda")
        selected = dispatch.selected("cuda")
        fault = selection_fault(selected, GPUS[name])
        if fault:
            raise Wrong(fault)
        by_choice = sorted((choice, op) for op, choice in selected.items())
        return f"{code}; " + "; ".join(
            f"{choice}: {', '.join(op for _, op in pairs)}" for choice, pairs in groupby(by_choice, key=lambda pair: pair[0])
        )

    return check


CHECKS: Sequence[Check] = tuple((f"{name} (sm_{major}{minor})", serving(name)) for name, (major, minor) in GPUS.items())

if __name__ == "__main__":
    run(GROUP, CHECKS)
