"""Faults that only a rank itself can have: an exception, and NaN in its gradients.

Python imports this module at its start if its folder is on PYTHONPATH. A rank then, before each optimizer step, leaves its process
id in the folder that MEGAPPO_CHAOS names (`rank-RANK`), looks there for `raise-RANK` and `nan-RANK`, removes them and commits that
fault once. megappo has no hook for this: the method is replaced as soon as its module has been imported.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path

ENGINE = "megappo.engine.megatron"


class AfterEngine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the engine as it is, then wraps its optimizer step."""

    def find_spec(self, name, path=None, target=None):
        if name != ENGINE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        sys.meta_path.remove(self)
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        wrap(module.MegatronEngine, Path(os.environ["MEGAPPO_CHAOS"]))


def wrap(engine_class, folder):
    plain, announced = engine_class.optimizer_step, []

    def optimizer_step(engine):
        rank = os.environ["RANK"]
        if os.getpid() not in announced:  # a rank may be forked from a process that has imported the engine
            announced.append(os.getpid())
            announce(folder, rank)
        if took(folder / f"raise-{rank}"):
            raise RuntimeError(f"chaos: an exception on rank {rank}, on purpose")
        if took(folder / f"nan-{rank}"):
            for gradient in engine.named_gradients().values():  # all: a distributed optimizer reads only its own part
                gradient.fill_(float("nan"))
        return plain(engine)

    engine_class.optimizer_step = optimizer_step


def announce(folder, rank):
    partial = folder / f"rank-{rank}.{os.getpid()}"
    partial.write_text(str(os.getpid()))
    os.replace(partial, folder / f"rank-{rank}")


def took(path):
    """True once for each time that the file was made."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


if "MEGAPPO_CHAOS" in os.environ:
    sys.meta_path.insert(0, AfterEngine())
