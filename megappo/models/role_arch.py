"""Architecture of a role's model: from its family, or under engine fsdp2 from transformers' own class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from megappo.models.arch import ModelArch
from megappo.models.hf_config import NotImplementedByFamilies, read_arch


def arch_for(path: str | Path, engine: Literal["megatron", "fsdp2"], head_rows: int = 1) -> ModelArch:
    """Read the architecture of the checkpoint directory `path`; under fsdp2 of any causal language model of transformers.
    head_rows: see `ModelArch`. ValueError, one line, for a model that the engine does not run."""
    arch = _arch_for(path, engine)
    return arch if head_rows == 1 else replace(arch, head_rows=head_rows)


def _arch_for(path: str | Path, engine: Literal["megatron", "fsdp2"]) -> ModelArch:
    try:
        arch = read_arch(path)
    except NotImplementedByFamilies as error:
        if engine == "megatron":
            raise ValueError(f"{error}; engine fsdp2 runs any causal language model of transformers") from None
        # Imports transformers, which families do without.
        from megappo.models.any_model import describe_model

        return describe_model(path)
    if engine == "megatron" or arch.moe is None:
        return arch
    from megappo.models.any_model import with_own_parameters

    return with_own_parameters(arch, path)
