"""Compile Megatron-core's fused functions at their first call, and not while it is imported.

Its `jit_fuser` is torch.compile, and a function that it decorates imports inductor: 0.3 s of processor time of every start (2.7 s
without vLLM), for functions that few processes call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MODULE = "megatron.core.jit"


def compile_at_first_call() -> None:
    """Make the import of Megatron-core, by any module, leave its functions uncompiled. Without effect after it."""
    if _MODULE not in sys.modules and not any(isinstance(finder, _PutsOffCompiling) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PutsOffCompiling())


def at_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """As torch.compile, in a process that calls the function; inside another compiled function it is a part of that one."""
    import torch

    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function))
        return compiled[0](*args, **kwargs)

    return call


class _PutsOffCompiling(MetaPathFinder):
    """Import hook that finds `megatron.core.jit` and sets its `jit_fuser`, once."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_set(module: ModuleType) -> None:
            execute(module)
            setattr(module, "jit_fuser", at_first_call)

        setattr(spec.loader, "exec_module", execute_and_set)
        return spec
