"""Imports TransformerEngine before Megatron-core does, and hides one that does not import.

Megatron-core puts mocks in its place after an ImportError and dies of any other error (a cuDNN that does not fit, for example),
whatever layers a run has.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import Any

# A library of another version or place, a core package without its torch part, another torch than it was compiled for.
_IMPORT_FAULTS = (ImportError, OSError, RuntimeError, AssertionError, AttributeError)


@functools.cache
def import_fault() -> str | None:
    """Why TransformerEngine does not import, in a few words; None where it does. Takes seconds where it is installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "is not installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except _IMPORT_FAULTS as error:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # Python's mark of a module that cannot be imported
        return f"does not import ({_first_line(error)})"
    return None


def look_before_megatron() -> None:
    """From now on the first import of Megatron-core, by whichever module, is preceded by `import_fault`."""
    if "megatron.core" not in sys.modules and not any(isinstance(finder, _BeforeMegatron) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeMegatron())


class _BeforeMegatron(MetaPathFinder):
    """Finds nothing; is asked for every module before the finders that do."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "megatron.core":
            sys.meta_path.remove(self)
            import_fault()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
