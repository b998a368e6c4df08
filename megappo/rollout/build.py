"""Chooses and builds the rollout engine that the configuration names."""

from __future__ import annotations

from typing import Any

import torch

from megappo.config.schema import RolloutConfig
from megappo.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megappo.models.arch import ModelArch
from megappo.platform.device import DTYPES
from megappo.rollout.megatron_engine import MegatronRollout
from megappo.rollout.types import RolloutEngine


def build_rollout(
    config: RolloutConfig,
    policy: Any,
    *,
    model: str,
    arch: ModelArch,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    policy_dtype: str,
    logits_dtype: str = "fp32",
    seed: int,
    device: torch.device,
) -> RolloutEngine:
    """The engine of `rollout.engine`, connected to the policy. Collective.

    policy: its MegatronEngine. logits_dtype: what the Megatron engine rounds logits to; vLLM's are of its own type. model:
    directory with the policy's config.json. ValueError where vLLM is missing.
    """
    if config.engine == "megatron":
        return MegatronRollout(policy, tokenizer.decode, bf16_logits=logits_dtype == "bf16")
    from megappo.rollout.vllm_engine import VllmEngine

    engine = VllmEngine(
        model,
        config,
        dtype=DTYPES[policy_dtype if config.dtype == "auto" else config.dtype],
        max_model_len=max_prompt_tokens + config.max_response_tokens,
        eos_token_ids=tokenizer.eos_ids,
        seed=seed,
        device=device,
        tokenizer=str(tokenizer.path) if config.stop and isinstance(tokenizer, HuggingFaceTokenizer) else None,
        detokenize=tokenizer.decode,
        timeouts=policy.groups.timeouts,
    )
    engine.connect(policy.named_parameters, arch, policy.groups.layout)
    return engine
