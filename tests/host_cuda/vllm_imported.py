"""Imports of vLLM for the process from which ranks are forked: every rank would take 10 s for them, half in other processes."""

import importlib

import vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform

vllm.platforms._current_platform = NonNvmlCudaPlatform()  # NVML, by which vLLM looks for a GPU, needs the driver
for name in ("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"):
    importlib.import_module(name)
