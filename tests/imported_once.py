"""Imports of the server that forks ranks: 5 s of processor time, which every rank with an engine would spend.

The server can be forked: they start no thread but OpenBLAS' idle ones.
"""

import importlib

import torch

from megappo.platform.garbage import collect_seldom
from megappo.rollout.process_state import EngineState
from megappo.rollout.vllm_process import require_vllm, vllm_running

collect_seldom()
for name in ("transformers.models.auto.modeling_auto", "megappo.engine.megatron", "megappo.trainer.ppo", "megappo.trainer.main"):
    importlib.import_module(name)
# As an engine imports it: environment and torch are restored after.
require_vllm()
with vllm_running(EngineState(torch.device("cpu")), {}):
    for name in ("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(name)
