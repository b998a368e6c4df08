"""Calls in processes that megappo has no hook for: Python imports this module at its start if its folder is on PYTHONPATH.

AFTER_IMPORT holds calls, separated by blanks: NAME=MODULE:FUNCTION. Once the module NAME has been imported, FUNCTION(it) is called.
MODULE is imported then, not before, and processes that never import NAME pay nothing. HIDDEN_MODULES names modules, separated by
blanks, that cannot be imported.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys


class CallingLoader(importlib.abc.Loader):
    """Imports a module as its own loader does, then calls the functions."""

    def __init__(self, loader, functions):
        self._loader, self._functions = loader, functions

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for function in self._functions:
            home, _, name = function.partition(":")
            getattr(importlib.import_module(home), name)(module)


class AfterImport(importlib.abc.MetaPathFinder):
    """functions: name of a module -> what is called after its import."""

    def __init__(self, functions):
        self._functions = functions

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self._functions:
            return None
        # Each time anew: libraries look for the spec of a module that they import later, or never.
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = CallingLoader(spec.loader, self._functions[fullname])
        return spec


def calls_of(text):
    calls = {}
    for call in text.split():
        name, _, function = call.partition("=")
        calls.setdefault(name, []).append(function)
    return calls


if calls := calls_of(os.environ.get("AFTER_IMPORT", "")):
    sys.meta_path.insert(0, AfterImport(calls))
for hidden in os.environ.get("HIDDEN_MODULES", "").split():
    sys.modules.setdefault(hidden, None)  # Python's mark of a module that cannot be imported
