"""Identity of a run (configuration, tokenizer, reference): recorded in every checkpoint and compared on resume."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

import megappo
from megappo.checkpoint.identity import identity_of_model
from megappo.config.dump import dump_yaml
from megappo.config.layout_checks import role_sections
from megappo.config.schema import TrainConfig
from megappo.data.tokenizers import Tokenizer
from megappo.prepare.layouts import model_paths


def run_facts(config: TrainConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Facts of a run, JSON-compatible. Layouts may change on resume, the tokenizer and the reference may not."""
    in_use = {role: path for role, (_, path) in model_paths(config).items()}
    return {
        "config": dump_yaml(config),
        "tokenizer": tokenizer.fingerprint,
        "reference": identity_of_model(in_use["reference"]) if "reference" in in_use else None,
        "layouts": {name: section.parallel.model_dump() for name, section in role_sections(config).items()},
        "versions": {"megappo": megappo.__version__, "torch": torch.__version__, **_megatron_version()},
    }


def _megatron_version() -> dict[str, str]:
    """Empty where another engine runs without it."""
    try:
        return {"megatron-core": importlib.metadata.version("megatron-core")}
    except importlib.metadata.PackageNotFoundError:
        return {}
