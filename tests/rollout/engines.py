"""Small vLLM engines for the tests that start many of them in one process."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from megappo.config.schema import RolloutConfig
from megappo.models.hf_config import read_arch
from megappo.rollout.vllm_engine import VllmEngine
from megappo.rollout.vllm_options import VllmModel

# Keys of the section that are arguments of the engine, or of its model, with a value of another kind.
_OF_ENGINE = ("dtype", "cache_after_push")


def make_engine(path: str, tp: int, **changes: Any) -> VllmEngine:
    """A CPU engine in fp32 for sequences of up to 256 tokens; no token ends a response. Collective.

    changes: of the engine's arguments, of its model, or of its section of the configuration.
    """
    settings = {key: changes.pop(key) for key in tuple(changes) if key in RolloutConfig.model_fields and key not in _OF_ENGINE}
    config = RolloutConfig(**{"tp": tp, "max_num_seqs": 16, "kv_cache_gib": 1 / 32, **settings})
    names = {field.name for field in fields(VllmModel)}
    of_model = {key: changes.pop(key) for key in tuple(changes) if key in names}
    arch = of_model.pop("arch", None) or read_arch(path)
    model = VllmModel(path, arch, **{"dtype": torch.float32, "max_model_len": 256, **of_model})
    return VllmEngine(model, config, **{"eos_token_ids": (), "device": torch.device("cpu"), **changes})
