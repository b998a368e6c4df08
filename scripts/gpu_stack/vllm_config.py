"""Checks of vLLM's GPU wheel: its import, the options that `VllmEngine` passes, and their effect on a CUDA platform.

On a GPU vLLM takes other paths than on a CPU (second model runner, asynchronous scheduling, compilation, CUDA graphs); the
details of the rows say which. The configuration is built for a tiny model on an H100 that only answers questions.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.gpu_stack.pretend import pretend_driver, pretend_gpu
from scripts.gpu_stack.rows import Check, Wrong, run

GROUP = "vllm_config"


class Model(NamedTuple):
    """Properties of a model that decide vLLM's attention kernel."""

    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64


BF16 = Model()


@cache
def platform() -> str:
    """Make vLLM's platform that of CUDA; NVML, by which it looks for one, needs the driver."""
    pretend_gpu()
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    driver = pretend_driver(sorted(Path(spec.origin).parent.glob("*.so")))
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    vllm.platforms._current_platform = NonNvmlCudaPlatform()
    import vllm

    return f"vLLM {vllm.__version__}, platform {vllm.platforms.current_platform.device_name}; {driver}"


@cache
def model_folder(head_dim: int) -> str:
    """A llama, kept until the process ends: 2 layers, a vocabulary of 131."""
    from tests.models.checkpoints import hf_config

    folder = tempfile.mkdtemp()
    config = hf_config("llama", head_dim=head_dim)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


def options_of(peers_visible: bool = True, model: Model = BF16, **rollout: Any) -> dict[str, Any]:
    """Arguments that `VllmEngine` passes for these settings of `rollout`, of such a policy on a GPU."""
    from megappo.config.schema import RolloutConfig
    from megappo.models.hf_config import read_arch
    from megappo.rollout.vllm_options import VllmModel, vllm_options

    folder = model_folder(model.head_dim)
    return vllm_options(
        RolloutConfig.model_validate(rollout),
        VllmModel(folder, read_arch(folder), model.dtype, max_model_len=256),
        device_type="cuda",
        executor=_executor(),
        peers_visible=peers_visible,
    )


def _executor() -> type:
    from megappo.rollout.vllm_process import colocated_executor

    return colocated_executor("megappo-check", torch.device("cuda", 0))


def unknown(names: Iterable[str], known: Iterable[str]) -> str:
    """Unknown names, in one line; "" if all are known."""
    return ", ".join(sorted(set(names) - set(known)))


def known_options() -> str:
    import dataclasses

    from vllm.engine.arg_utils import EngineArgs

    # LLM(...) hands what it does not know itself to EngineArgs.
    fields = [field.name for field in dataclasses.fields(EngineArgs)]
    names = options_of(peers_visible=False)
    lost = unknown(names, fields)
    if lost:
        raise Wrong(f"vLLM does not know {lost}")
    return f"{len(names)} options"


def known_variables() -> str:
    from vllm import envs

    from megappo.rollout.vllm_options import vllm_environment

    names = vllm_environment("cuda", peers_visible=False)
    lost = unknown(names, envs.environment_variables)
    if lost:
        raise Wrong(f"vLLM does not read {lost}")
    return ", ".join(names)


def configuration(peers_visible: bool = True, model: Model = BF16, **rollout: Any) -> Any:
    """VllmConfig for these settings, with the variables that the engine would set."""
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from megappo.rollout.vllm_options import vllm_environment

    os.environ.update(vllm_environment("cuda", peers_visible))
    return EngineArgs(**options_of(peers_visible, model, **rollout)).create_engine_config(UsageContext.LLM_CLASS)


def facts_of(config: Any) -> dict[str, Any]:
    """The paths that vLLM takes with a configuration."""
    compilation = config.compilation_config
    sizes = compilation.cudagraph_capture_sizes or []
    parallel = config.parallel_config
    return {
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "async scheduling": config.scheduler_config.async_scheduling,
        "compile": compilation.mode.name,
        "CUDA graphs": compilation.cudagraph_mode.name,
        "sizes": f"{len(sizes)} up to {max(sizes)}" if sizes else "none",
        "chunked prefill": config.scheduler_config.enable_chunked_prefill,
        "batched tokens": config.scheduler_config.max_num_batched_tokens,
        "prefix cache": config.cache_config.enable_prefix_caching,
        "sleep": config.model_config.enable_sleep_mode,
        "custom all-reduce": not parallel.disable_custom_all_reduce,
        "seconds on the device, on the host": (parallel.distributed_timeout_seconds, parallel.cpu_distributed_timeout_seconds),
        "attention": _attention_backend(config),
    }


def _attention_backend(config: Any) -> str:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    with set_current_vllm_config(config):
        backend = get_attn_backend(model.get_head_size(), model.dtype, "auto", num_heads=model.hf_text_config.num_attention_heads)
    return backend.get_name()


def difference(facts: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Facts that differ from the expected ones; "" if none."""
    return ", ".join(f"{name} is {facts[name]}, not {value}" for name, value in expected.items() if facts[name] != value)


def case(expected: Mapping[str, Any], peers_visible: bool = True, model: Model = BF16, **rollout: Any) -> Callable[[], str]:
    """A check that a setting has the effect in vLLM that it is for."""

    def check() -> str:
        before = dict(os.environ)
        try:
            facts = facts_of(configuration(peers_visible, model, **rollout))
        finally:
            os.environ.clear()
            os.environ.update(before)
        fault = difference(facts, expected)
        if fault:
            raise Wrong(fault)
        return ", ".join(f"{name} {value}" for name, value in expected.items())

    return check


# Facts in docs/gpu.md of a run on H100s with default settings.
DEFAULTS = {
    "runner": "v2",
    "async scheduling": True,
    "attention": "FLASH_ATTN",
    "compile": "VLLM_COMPILE",
    "CUDA graphs": "FULL_AND_PIECEWISE",
    "sizes": "51 up to 512",
    "sleep": False,
    "custom all-reduce": True,
    "seconds on the device, on the host": (600, 3600),
}
CHECKS: Sequence[Check] = (
    ("imports", platform),
    ("options", known_options),
    ("variables", known_variables),
    ("defaults", case(DEFAULTS)),
    # FlashAttention does not support fp32.
    ("fp32, heads of 32", case({"attention": "TRITON_ATTN"}, model=Model(torch.float32, 32))),
    ("enforce_eager", case({"compile": "NONE", "CUDA graphs": "NONE", "sizes": "none"}, vllm_args={"enforce_eager": True})),
    ("async_scheduling: false", case({"async scheduling": False}, vllm_args={"async_scheduling": False})),
    ("sleep: all", case({"sleep": True}, sleep="all")),
    ("tp 2", case({"custom all-reduce": True}, tp=2)),
    ("tp 2, one GPU visible", case({"custom all-reduce": False}, peers_visible=False, tp=2)),
)

if __name__ == "__main__":
    run(GROUP, CHECKS)
