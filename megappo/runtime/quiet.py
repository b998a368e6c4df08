"""Prepare a process for the libraries before they are imported: environment, import order, collections, filters of warnings.

`megappo doctor` names missing packages once; ranks do not at every start. Imports nothing heavy.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from importlib.abc import MetaPathFinder
from typing import Any

from megappo.runtime.garbage import collect_seldom
from megappo.runtime.lazy_compile import compile_at_first_call
from megappo.runtime.transformer_engine import import_before_megatron

_EXPECTED_WARNINGS = (
    # Megatron-core's imports without TransformerEngine and Apex: the local layers are chosen on purpose.
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    # Megatron-core's TransformerConfig about its own default.
    "full scope is deprecated",
    # Megatron-core about selective recomputation, which is intended, and about experts that etp does not cut.
    "If you are using transformer_engine as the transformer implementation, the core_attn",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
    # Megatron-core's optimizer reads .grad of its views into the gradient buffer, which is None as it expects.
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)


def quiet_libraries() -> None:
    """Set up environment and warnings. Call it before torch is first imported; the user's own settings are kept."""
    collect_seldom()
    # torch's C++ side warns about vLLM's memory binding at every start on a CPU.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Megatron-core wants one hardware queue, so that tensor-parallel collectives start before the products that they overlap.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # torch's profiler (`telemetry.profile_steps`) announces each start and stop on the console below this level, that of errors.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    import_before_megatron()
    compile_at_first_call()
    if not any(isinstance(finder, _HidesWandb) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HidesWandb())
    for text in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_no_missing_gpu)
    # Megatron-core calls collectives by names that newer torch versions deprecate.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


class _HidesWandb(MetaPathFinder):
    """Import hook that hides wandb from Megatron-core alone; finds nothing itself.

    Its timers and its inference import wandb wherever it is installed (a second, and handlers of the process), and can do without.
    Runs are tracked by a process of their own (`telemetry/trackers/process.py`); a user's reward code may import what it likes.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "wandb" and _importing_module().startswith("megatron."):
            raise ModuleNotFoundError("megappo hides wandb from Megatron-core", name=fullname)


def _importing_module() -> str:
    """Name of the module whose import statement called a finder of this file."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib."):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")


def _is_no_missing_gpu(record: logging.LogRecord) -> bool:
    """False of torch's warning that there is nvcc and no GPU, as where runs on GPUs are planned or checked on the CPU.

    Megatron-core imports torch's builder of extensions, which looks for both. A run that needs a GPU says so itself.
    """
    return not record.getMessage().startswith("No CUDA runtime is found")
