"""Imports of the server that forks ranks: 5 s of processor time, which every rank with an engine would spend.

The server can be forked: they start no thread but OpenBLAS' idle ones.
"""

import importlib

import torch

from megappo.rollout import vllm_options
from megappo.rollout.vllm_process import EngineState, require_vllm, vllm_running
from megappo.runtime.libraries import collect_seldom
from megappo.telemetry import runlog

collect_seldom()
# Before what imports it. The usual 0.25 took a twentieth of the processor time of four short runs: the kernel clears every page.
vllm_options.CPU_KV_CACHE_GIB = 1 / 16
for name in (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "megappo.engine.megatron",
    "megappo.engine.fsdp2",
    "megappo.commands.plan.run",
    "megappo.trainer.prepare.run",
    "megappo.trainer.ppo",
    "megappo.trainer.main",
    "megappo.telemetry.trackers.tensorboard",
    "pandas",  # by pyarrow, for the first array that it makes one of NumPy's of
    "pyarrow.compute",
    "pytest",  # by the modules whose functions ranks run
):
    importlib.import_module(name)
# Drawing is a fifth of the processor time of a run of few steps, and tests/telemetry looks at the picture.
runlog.write_learning_curve = lambda run_dir: None
# As an engine imports it: environment and torch are restored after.
require_vllm()
with vllm_running(EngineState(torch.device("cpu")), {}):
    for name in (
        "vllm.entrypoints.llm",
        "vllm.entrypoints.launchers.cli_args",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.model_executor.models.llama",
        "vllm.plugins.lora_resolvers.filesystem_resolver",
        "vllm.plugins.lora_resolvers.hf_hub_resolver",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "megappo.bridge.vllm_loader",
        "megappo.rollout.vllm_engine",
    ):
        importlib.import_module(name)
    # Not in a process of its own, which takes 8 s of processor time for each class and rank where vLLM's cache of what it finds is
    # empty: it is to keep CUDA from starting, and the rank imports the class anyway.
    importlib.import_module("vllm.model_executor.models.registry")._run_in_subprocess = lambda look: look()
    # As the first worker of a process does (0.3 s): it looks through all modules, and what it finds here later engines leave alone.
    importlib.import_module("vllm.platforms").current_platform.register_triton_kernel_overrides()
