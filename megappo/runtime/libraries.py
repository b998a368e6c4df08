"""Prepares a process for the libraries it imports: environment, import order, garbage collection, memory, warning filters. Imports
nothing heavy. Missing packages are the business of `megappo doctor`."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import importlib.util
import logging
import os
import sys
import warnings
from importlib.abc import MetaPathFinder
from typing import Any

from megappo.runtime.messages import first_line

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
    if "megatron.core" not in sys.modules and not any(isinstance(finder, _BeforeMegatron) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeMegatron())
    for text in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_no_missing_gpu)
    # Megatron-core calls collectives by names that newer torch versions deprecate.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def _is_no_missing_gpu(record: logging.LogRecord) -> bool:
    """False for torch's warning that nvcc is there but no GPU, as where GPU runs are planned on a CPU."""
    # Megatron-core imports torch's extension builder, which looks for both. A run that needs a GPU says so itself.
    return not record.getMessage().startswith("No CUDA runtime is found")


# ------------------------------------------------------------------------------------------------- collections and memory

_IMPORTING = 20_000  # new objects before a collection, where Python has 700: visiting those of imports is 0.7 s of 5
_USUAL = gc.get_threshold()
_KEPT_BYTES = 128 << 20
_MAPPED_FROM = 32 << 20  # larger blocks go back one by one, as ever: the largest threshold that glibc takes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt


def collect_seldom() -> None:
    """Collect garbage seldom during heavy imports, until `freeze_imports`; a command of a few seconds leaves it so."""
    gc.set_threshold(_IMPORTING, *_USUAL[1:])


def freeze_imports() -> None:
    """Exclude all present objects from garbage collection and restore its usual threshold. Call it after heavy imports."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries that look for leaks at the end (nanobind's) take the frozen objects for some
    gc.set_threshold(*_USUAL)


def keep_freed_memory() -> bool:
    """Let malloc keep up to 128 MiB of freed memory for blocks below 32 MiB. False if the C library has no such setting."""
    # By default glibc returns it to the kernel, which clears each page again: a seventh of a rank's time on experience, whose
    # buffers of a few MiB come and go.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*rule) for rule in ((_MMAP_THRESHOLD, _MAPPED_FROM), (_TRIM_THRESHOLD, _KEPT_BYTES)))


# ------------------------------------------------------------------------------------------------------- TransformerEngine

# A library of a wrong version or place, a core package without its torch part, a torch that it was not compiled for.
_IMPORT_FAULTS = (ImportError, OSError, RuntimeError, AssertionError, AttributeError)


@functools.cache
def import_fault() -> str | None:
    """Say in a few words why TransformerEngine does not import; None if it does. Takes seconds if it is installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "is not installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except _IMPORT_FAULTS as error:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # Python's mark of a module that cannot be imported
        return f"does not import ({first_line(error, kind=True)})"
    return None


class _BeforeMegatron(MetaPathFinder):
    """Import hook in front of the finders; finds nothing itself. Megatron-core mocks TransformerEngine after an ImportError but
    dies of any other error (a wrong cuDNN), even if no layer of it is used. So the first import of Megatron-core tries
    TransformerEngine, and hides one that fails."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "megatron.core":
            sys.meta_path.remove(self)
            import_fault()
