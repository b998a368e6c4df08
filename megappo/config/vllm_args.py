"""Names that `rollout.vllm_args` may have: the installed vLLM's engine arguments except those that megappo sets."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from functools import cache
from pathlib import Path

from megappo.config.errors import problem
from megappo.config.schema import TrainConfig

OWN = {
    "tensor_parallel_size": "rollout.tp",
    "dtype": "rollout.dtype",
    "max_num_seqs": "rollout.max_num_seqs",
    "gpu_memory_utilization": "rollout.memory_share",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "enable_sleep_mode": "rollout.sleep",
    "max_model_len": "data.max_prompt_tokens and rollout.max_response_tokens",
    "seed": "run.seed",
    "tokenizer": "data.tokenizer",
    "enable_lora": "rollout.adapter",
    "max_lora_rank": "policy.lora.rank",
    "distributed_timeout_seconds": "run.timeouts.start_s",
    "cpu_distributed_timeout_seconds": "run.timeouts.meeting_s",
    **dict.fromkeys(("model", "config_format", "hf_overrides", "quantization"), "policy.model"),
    **dict.fromkeys(("skip_tokenizer_init", "load_format", "generation_config", "logprobs_mode", "max_logprobs"), ""),
    **dict.fromkeys(("distributed_executor_backend", "worker_cls", "weight_transfer_config"), ""),
}
"""Argument that megappo sets -> the key of ours that decides it, "" without one."""


COOLEST, HOTTEST = 0.01, 2.0  # vLLM 0.32: it samples at COOLEST below it, without an error, and refuses more than HOTTEST


def vllm_temperature_problem(config: TrainConfig) -> str | None:
    """Refuse a temperature at which vLLM does not sample: log-probs would be those of another one."""
    if config.rollout.engine != "vllm":
        return None
    given = {"rollout.sampling.temperature": config.rollout.sampling.temperature}
    given |= {f"evaluations.{name}.temperature": one.temperature for name, one in config.evaluations.items()}
    return next((message for key, value in given.items() if (message := temperature_problem(key, value)) is not None), None)


def temperature_problem(key: str, value: float) -> str | None:
    """Say why vLLM does not sample at this temperature; None if it does."""
    if value == 0 or COOLEST <= value <= HOTTEST:
        return None
    return problem(
        key, value, f"vLLM samples at {COOLEST:g} to {HOTTEST:g}, or greedily at 0; use one of these, or engine megatron"
    )


def vllm_args_problem(config: TrainConfig) -> str | None:
    """Refuse an argument that vLLM does not have or that megappo sets."""
    for name, value in config.rollout.vllm_args.items():
        key = f"rollout.vllm_args.{name}"
        if name in OWN:
            return problem(key, value, f"megappo sets it; {f'use {OWN[name]}' if OWN[name] else 'remove it'}")
        if (names := names_of_vllm()) and name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else "they are those of vllm.EngineArgs"
            return problem(key, value, f"vLLM has no such argument; {hint}")
    return None


@cache
def names_of_vllm() -> frozenset[str]:
    """Names of the installed vLLM's `EngineArgs`, from its source, as an import takes seconds; none without vLLM."""
    spec = importlib.util.find_spec("vllm")
    source = None if spec is None or spec.origin is None else Path(spec.origin).parent / "engine" / "arg_utils.py"
    if source is None or not source.is_file():
        return frozenset()
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    fields = (node.target for one in classes if one.name == "EngineArgs" for node in one.body if isinstance(node, ast.AnnAssign))
    return frozenset(field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_"))
