"""Real numbers on a CUDA device that is host memory; see tests/host_cuda/README.md.

`install` is called once torch has been imported: every operation on CUDA tensors then computes on the host, in all threads.
"""

from __future__ import annotations

import importlib.util
import os
import threading


def install(torch) -> None:
    """Enter the mode in this and all later threads, serve nccl groups by gloo, report at the end."""
    from host_cuda import collectives, mode, report

    mode.enter()
    mode.print_tensors()
    _enter_in_threads(mode.enter)
    collectives.serve_nccl()
    report.at_exit()
    # cuDNN has no written-out attention.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("HOST_CUDA_FUSED_OPTIMIZERS") == "1":
        from host_cuda import fused_optimizers

        fused_optimizers.install()
    plugin = os.environ.get("HOST_CUDA_PLUGIN")
    if plugin:
        spec = importlib.util.spec_from_file_location("host_cuda_plugin", plugin)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _enter_in_threads(enter) -> None:
    """A dispatch mode belongs to its thread. Autograd's threads take it along; Python's do not."""
    run = threading.Thread.run

    def run_on_the_device(self):
        enter()
        run(self)

    threading.Thread.run = run_on_the_device
