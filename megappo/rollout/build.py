"""Chooses and builds the rollout engine that the configuration names."""

from __future__ import annotations

import torch

from megappo.config.run_sections import TimeoutsConfig
from megappo.config.schema import RolloutConfig
from megappo.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megappo.engine.base import Engine, LogitsDtype
from megappo.platform.device import DTYPES
from megappo.rollout.megatron_engine import MegatronRollout
from megappo.rollout.types import RolloutEngine


def build_rollout(
    config: RolloutConfig,
    policy: Engine,
    *,
    model: str,
    tokenizer: Tokenizer,
    max_sequence_tokens: int,
    policy_dtype: str,
    logits_dtype: LogitsDtype = "fp32",
    seed: int,
    device: torch.device,
    timeouts: TimeoutsConfig,
) -> RolloutEngine:
    """The engine of `rollout.engine`, connected to the policy. Collective.

    max_sequence_tokens: longest prompt plus response. logits_dtype: to which the policy's own engine rounds logits when it
    samples; vLLM's are of its own type. timeouts: of vLLM's exchanges and of meetings. model: directory with the policy's
    config.json. ValueError if vLLM is missing.
    """
    if config.engine == "megatron":
        return MegatronRollout(policy, tokenizer.decode, logits_dtype=logits_dtype, timeouts=timeouts)
    from megappo.rollout.vllm_engine import VllmEngine

    engine = VllmEngine(
        model,
        config,
        dtype=DTYPES[policy_dtype if config.dtype == "auto" else config.dtype],
        max_model_len=max_sequence_tokens,
        eos_token_ids=tokenizer.eos_ids,
        seed=seed,
        device=device,
        tokenizer=str(tokenizer.path) if config.stop and isinstance(tokenizer, HuggingFaceTokenizer) else None,
        detokenize=tokenizer.decode,
        timeouts=timeouts,
    )
    engine.connect(policy)
    return engine
