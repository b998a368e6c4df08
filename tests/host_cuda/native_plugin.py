"""HOST_CUDA_PLUGIN of megappo's tests: what `kernels: cuda` and `kernels: triton` find on the host's device.

csrc's CUDA kernels are the library that tests/ops compiles for the CPU (MEGAPPO_ON_CPU_LIBRARY, with the .json of an installation
beside it); calls with CUDA tensors run on their bytes. Triton's kernels are interpreted.
"""

import importlib
import os
from pathlib import Path

import torch

ON_CPU, INSTALLED = "megappo_cuda_on_cpu", "megappo_native"


def use_library(library: Path) -> None:
    """Its ops become those of an installed library that was built with CUDA."""
    import megappo.ops.implementations

    megappo.ops.implementations.LIBRARY = library  # before ops.dispatch imports the name
    torch.ops.load_library(str(library))
    kept = torch.library.Library(INSTALLED, "FRAGMENT")
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace == ON_CPU:
            run = getattr(getattr(torch.ops, ON_CPU), name)
            kept.define(str(run.default._schema).replace(f"{ON_CPU}::", ""))
            kept.impl(name, run, "CPU")
    globals()["_kept"] = kept  # the registrations end with the object


def interpret_triton() -> None:
    """As tests/conftest.py does it; but on the host's tensors there is no Triton, as in any process with a GPU."""
    import megappo.ops.implementations

    missing = megappo.ops.implementations.missing

    def missing_as_with_a_gpu(implementation: str, device_type: str) -> str | None:
        if (implementation, device_type) == ("triton", "cpu"):
            return "Triton kernels run on a GPU, and this run is on the CPU"
        return missing(implementation, device_type)

    megappo.ops.implementations.missing = missing_as_with_a_gpu
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.language")
    importlib.import_module("tests.ops.interpreted_calls").exchange_once()


use_library(Path(os.environ["MEGAPPO_ON_CPU_LIBRARY"]))
interpret_triton()
