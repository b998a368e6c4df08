"""Small vLLM engines for the tests that start many of them in one process."""

from __future__ import annotations

from typing import Any

import torch

from megappo.config.schema import RolloutConfig
from megappo.rollout.vllm_engine import VllmEngine


def make_engine(path: str, tp: int, **changes: Any) -> VllmEngine:
    """A CPU engine in fp32 for sequences of up to 256 tokens; no token ends a response. Collective.

    changes: of the engine's arguments, or of its section of the configuration.
    """
    settings = {key: changes.pop(key) for key in tuple(changes) if key in RolloutConfig.model_fields and key != "dtype"}
    config = RolloutConfig(**{"tp": tp, "max_num_seqs": 16, "kv_cache_gib": 1 / 32, **settings})
    values = dict(dtype=torch.float32, max_model_len=256, eos_token_ids=(), seed=0, device=torch.device("cpu"))
    return VllmEngine(path, config, **{**values, **changes})
