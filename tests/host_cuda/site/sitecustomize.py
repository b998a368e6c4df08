"""In a process of the host's CUDA device: prepares torch as soon as it has been imported, and TransformerEngine's absence."""

import importlib.abc
import importlib.machinery
import os
import sys


class AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports torch as it is, then installs the device. Processes that never import torch pay nothing."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        sys.meta_path.remove(self)  # not before: others look for torch's spec and import it later, or never
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        import host_cuda

        host_cuda.install()


if os.environ.get("HOST_CUDA"):
    # Its fused kernels are launched past torch's dispatcher; host_cuda/fused_optimizers.py stands in for some.
    sys.modules.setdefault("transformer_engine", None)
    sys.meta_path.insert(0, AfterTorch())
