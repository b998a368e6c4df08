"""Import TransformerEngine before Megatron-core does, and hide it if the import fails.

Megatron-core replaces it by mocks after an ImportError and dies of any other error (of a wrong cuDNN, for example), even if a run
uses no layer of it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import Any

from megappo.runtime.error_text import first_line

# A library of a wrong version or place, a core package without its torch part, a torch that it was not compiled for.
_IMPORT_FAULTS = (ImportError, OSError, RuntimeError, AssertionError, AttributeError)


@functools.cache
def import_fault() -> str | None:
    """Reason why TransformerEngine does not import, in a few words; None if it does. Takes seconds if it is installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "is not installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except _IMPORT_FAULTS as error:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # Python's mark of a module that cannot be imported
        return f"does not import ({first_line(error, kind=True)})"
    return None


def import_before_megatron() -> None:
    """Make the first import of Megatron-core, by any module, call `import_fault` before."""
    if "megatron.core" not in sys.modules and not any(isinstance(finder, _BeforeMegatron) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeMegatron())


class _BeforeMegatron(MetaPathFinder):
    """Import hook in front of the finders; finds nothing itself."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "megatron.core":
            sys.meta_path.remove(self)
            import_fault()
