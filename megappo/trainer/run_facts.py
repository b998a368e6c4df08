"""Identity of a run (configuration, tokenizer, reference): recorded in every checkpoint and compared on resume."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

import megappo
from megappo.checkpoint.identity import identity_of_model
from megappo.config.dump import dump_yaml
from megappo.config.schema import TrainConfig
from megappo.data.tokenizers import Tokenizer


def run_facts(config: TrainConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Facts of a run, JSON-compatible. Layouts may change on resume, the tokenizer and the reference may not."""
    reference = config.reference.model or config.policy.model
    return {
        "config": dump_yaml(config),
        "tokenizer": tokenizer.fingerprint,
        "reference": identity_of_model(reference) if config.algorithm.kl.placement != "none" else None,
        "layouts": {
            name: role.parallel.model_dump()
            for name, role in (("policy", config.policy), ("critic", config.critic), ("reference", config.reference))
        },
        "versions": {
            "megappo": megappo.__version__,
            "torch": torch.__version__,
            "megatron-core": importlib.metadata.version("megatron-core"),
        },
    }
