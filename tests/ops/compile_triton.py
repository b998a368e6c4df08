"""Compiles every Triton kernel that the self-check launches, for a GPU that need not be there; run by test_triton_compile.py.

Interpreting a kernel shows that it computes the right thing, not that it compiles: types of loop variables, for one, are only
looked at by the compiler. Launches are replaced by compilations for the compute capabilities in the arguments, up to machine
code (ptxas comes with Triton). Prints a line per capability and kernel: both, and how many variants of it were compiled.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from megappo.ops import dispatch, selfcheck

LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def compile_launch(kernel, target, args, kwargs):
    options = {name: kwargs.pop(name) for name in LAUNCH_OPTIONS if name in kwargs}
    values = {**dict(zip(kernel.arg_names, args)), **kwargs}
    assert len(values) == len(kernel.params), f"{kernel.__name__}: arguments {set(kernel.arg_names) ^ set(values)}"
    constant = {p.name: values[p.name] for p in kernel.params if p.is_constexpr or values[p.name] is None}
    signature = {p.name: "constexpr" if p.name in constant else mangle_type(values[p.name]) for p in kernel.params}
    # what a launch finds: tensors of torch's allocator start at multiples of 16 bytes
    aligned = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(kernel.params) if isinstance(values[p.name], torch.Tensor)}
    return triton.compile(ASTSource(kernel, signature, constant, aligned), target=target, options=options)


def main(capabilities: list[int]) -> None:
    compiled = {}

    def run(self, *args, grid, warmup=False, **kwargs):
        for capability in capabilities:
            made = compile_launch(self, GPUTarget("cuda", capability, 32), args, dict(kwargs))
            compiled.setdefault((capability, self.__name__), set()).add(made.hash)

    JITFunction.run = run
    dispatch.missing = lambda implementation, kind: None
    with dispatch.using("triton"):
        for problem in selfcheck.problems():
            for _ in problem.run(selfcheck.Numbers(torch.device("cpu"), wide=False)):
                pass
    for (capability, name), variants in sorted(compiled.items()):
        print(capability, name, len(variants))


if __name__ == "__main__":
    main([int(capability) for capability in sys.argv[1:]])
