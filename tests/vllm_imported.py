"""Imports of vLLM for the server that forks ranks: 2 s of processor time, which every rank with an engine would spend.

As an engine imports it: environment and torch are restored after.
"""

import importlib

import torch

from megappo.rollout.process_state import EngineState
from megappo.rollout.vllm_process import require_vllm, vllm_running

require_vllm()
with vllm_running(EngineState(torch.device("cpu")), {}):
    for name in ("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(name)
