"""Options of vLLM: the arguments of `LLM(...)` and its environment variables. Needs neither vLLM nor a device, so that GPU options
can be checked without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from megappo.config.role_sections import LoraConfig
from megappo.config.run_sections import TimeoutsConfig
from megappo.config.schema import RolloutConfig
from megappo.data.images import ImageStore
from megappo.models.arch import ModelArch
from megappo.models.hf_config import read_config, text_config
from megappo.rollout.vllm_adapter import adapter_options
from megappo.rollout.vllm_images import image_options

CPU_KV_CACHE_GIB = 0.25
LEAST_SHARE = 0.01
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class VllmModel:
    """The model that vLLM builds, with dummy weights."""

    path: str
    """Directory with its config.json."""
    arch: ModelArch
    """Architecture of the policy, which may differ from config.json's (`hf_config.read_arch`)."""
    dtype: torch.dtype
    max_model_len: int
    """Longest prompt plus response in tokens."""
    seed: int = 0
    tokenizer: str | None = None
    """Directory of a Hugging Face tokenizer, which vLLM needs for stop strings only."""
    lora: LoraConfig | None = None
    """Adapter of the policy, if vLLM applies it itself (`rollout.adapter`)."""
    images: ImageStore | None = None
    """Images that the tokens of a vision-language model name."""


def vllm_options(
    config: RolloutConfig,
    model: VllmModel,
    *,
    device_type: str,
    executor: type | str,
    peers_visible: bool = True,
    timeouts: TimeoutsConfig = TimeoutsConfig(),
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` or `vllm.EngineArgs`.

    device_type: "cpu" or "cuda". executor: vLLM's placement of workers. peers_visible: this process sees the GPUs of the other
    ranks of its replica. timeouts: of vLLM's process groups.
    """
    on_cpu = device_type == "cpu"
    cache_gib = CPU_KV_CACHE_GIB if config.kv_cache_gib is None and on_cpu else config.kv_cache_gib
    options: dict[str, Any] = dict(
        model=model.path,
        config_format="hf",
        hf_overrides=_model_config(text_config(read_config(model.path)), model.arch),
        tokenizer=model.tokenizer,
        skip_tokenizer_init=model.tokenizer is None,
        load_format="dummy",
        weight_transfer_config={"backend": "megappo"},  # bridge/vllm_loader.py
        generation_config="vllm",
        tensor_parallel_size=config.tp,
        distributed_executor_backend=executor,
        # Both for good: vLLM makes its groups before it compiles, and megappo's `settle` does not know them.
        distributed_timeout_seconds=ceil(timeouts.start_s),
        # On the host ranks wait for the slowest to measure its memory and to compile.
        cpu_distributed_timeout_seconds=ceil(timeouts.meeting_s),
        dtype=_DTYPE_NAMES[model.dtype],
        max_model_len=model.max_model_len,
        max_num_seqs=config.max_num_seqs,
        # With a cache of a given size vLLM uses the share only to refuse a start if it is not free.
        gpu_memory_utilization=config.memory_share if config.kv_cache_gib is None or on_cpu else LEAST_SHARE,
        kv_cache_memory_bytes=None if cache_gib is None else int(cache_gib * 2**30),
        enable_sleep_mode=config.sleep != "none" and not on_cpu,
        # After temperature, top-k and top-p, with -inf for tokens cut off. (vLLM's return_sampling_mask needs its second model
        # runner, which has no CPU support, and refuses the greedy requests of an evaluation.)
        logprobs_mode="processed_logprobs",
        max_logprobs=model.arch.vocab_size,
        seed=model.seed,
    )
    if model.arch.vision is not None:
        options |= image_options(model.path, model.arch.vision, config.shown_images)
    options |= config.vllm_args
    if model.lora is not None:
        options |= adapter_options(model.lora)
    if on_cpu:
        options["enforce_eager"] = True  # compiling takes minutes on a CPU
        # With a chunked prompt a seeded request raises "CPU Generator does not use offset": vLLM rewinds the generator after every
        # chunk. Whole prompts fit: vLLM then takes at least max_model_len tokens at once.
        options["enable_chunked_prefill"] = False
        if model.arch.delta is not None:
            options["enable_prefix_caching"] = False  # of states it needs the chunks that are off above
        if model.arch.latent is not None:
            # The default on a CPU with AMX has no fp32, and frees kv_b_proj, which the next push fills.
            options.setdefault("attention_config", {"backend": "CPU_MLA"})
            # vLLM's CPU kernel rotates queries wrongly beside the one key of all heads; YaRN has no kernel, and is right.
            compilation = options.get("compilation_config", {})
            custom_ops = [*compilation.get("custom_ops", ["all"]), "-rotary_embedding"]
            options["compilation_config"] = {**compilation, "custom_ops": custom_ops}
        if config.sleep != "none":
            options["worker_cls"] = "megappo.rollout.vllm_cpu_worker.SleepingCpuWorker"
    if config.replays_experts and model.arch.moe is not None and not on_cpu:
        options["enable_return_routed_experts"] = True
    if not peers_visible:
        # Both map the devices of all ranks over this process's CUDA_VISIBLE_DEVICES and fail; NCCL reduces instead.
        options["disable_custom_all_reduce"] = True
        options["compilation_config"] = {**options.get("compilation_config", {}), "pass_config": {"fuse_allreduce_rms": False}}
    return options


def vllm_environment(device_type: str, peers_visible: bool = True, *, returns_experts: bool = False) -> dict[str, str]:
    """Return the environment variables that vLLM needs while it runs; all others stay as the user set them."""
    if device_type == "cpu":
        return {}
    second = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if returns_experts else {}  # the runner that returns experts
    if peers_visible:
        return second
    # Their buffers are shared between GPUs by handles, which a process can open only for GPUs that it sees.
    names = ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC")
    return second | dict.fromkeys(names, "0")


def see_each_other(tp: int, places: Sequence[tuple[str, int | None]]) -> bool:
    """True if the ranks of every replica of tp ranks see each other's GPUs. places: (host, device index) of every rank."""
    # Slurm's --gpus-per-task shows each task one GPU: ranks of a host that all work on device 0 do not see each other's.
    return all(len(set(places[first : first + tp])) == tp for first in range(0, len(places), tp))


def _model_config(text: Mapping[str, Any], arch: ModelArch) -> Callable[[Any], Any]:
    """Return vLLM's override of config.json: the language model alone of a multimodal checkpoint, in the policy's dtype."""
    rope = arch.rope

    def override(config: Any) -> Any:
        if arch.vision is None:
            config = getattr(config, "text_config", config)
        # vLLM would build fp8 layers for a checkpoint in fp8
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.architectures = [arch.architecture] if arch.own or arch.vision is not None else text["architectures"]
        config.tie_word_embeddings = arch.tied_embeddings
        if arch.vision is not None and arch.vision.tile and hasattr(config, "text_config"):
            # vLLM builds the language model of its own part, and first asks with an empty configuration.
            config.text_config.architectures = text["architectures"]
            config.text_config.tie_word_embeddings = arch.tied_embeddings
        if rope.llama_4_scaling is not None:
            config.llama_4_scaling = rope.llama_4_scaling
        return config

    return override
