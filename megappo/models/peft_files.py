"""Adapters as files of Hugging Face's PEFT (0.4 and later), which PEFT and vLLM load. Tensors stay fp32, as trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megappo.config.role_sections import LoraConfig
from megappo.config.run_directory import open_to_readers_of
from megappo.data.tokenizers import Tokenizer
from megappo.models.gather import Gather
from megappo.models.lora import adapted_of, expert_of
from megappo.models.pieces import PieceMap, sizes_of
from megappo.models.weight_map import VALUE_HEAD
from megappo.parallel.groups import ProcessGroups

ADAPTER_FOLDER = "adapter"
"""Folder of an export that holds them."""
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterTensors:
    """Adapters of a model, and a value head, for an export. parameters: of this rank. pieces: of every position."""

    lora: LoraConfig
    parameters: Mapping[str, Tensor]
    pieces: PieceMap


def write_adapter(adapter: AdapterTensors, groups: ProcessGroups, folder: Path, source: Path, tokenizer: Tokenizer | None) -> None:
    """Write the two files, and the tokenizer if any, to `folder`, which must not exist, on the role's first rank. Collective over
    the role. source: directory of the base model, which the configuration names."""
    shapes = sizes_of(adapter.pieces)
    gather = Gather(adapter.parameters, adapter.pieces, shapes, groups, root=0)
    found = {_PREFIX + name: gather(name, torch.float32) for name in shapes}
    if groups.position != 0:
        return
    tensors = {name: whole for name, whole in found.items() if whole is not None}
    if VALUE_HEAD in shapes:
        tensors[f"{_PREFIX}score.bias"] = torch.zeros(shapes[VALUE_HEAD][0])  # transformers' token classifiers have one
    folder.mkdir()
    if tokenizer is not None:  # the base model's may be another
        tokenizer.save(folder)
    config = adapter_config(adapter.lora, list(shapes), source)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    file = folder / "adapter_model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    open_to_readers_of(folder, file)


def adapter_config(lora: LoraConfig, names: Sequence[str], source: Path) -> dict[str, Any]:
    """Make adapter_config.json of tensors with these names."""
    modules = adapted_of(names)
    kinds = sorted({module.rpartition(".")[2] for module in modules})
    value_head = VALUE_HEAD in names
    return {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS" if value_head else "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        # PEFT loads no adapters of experts with dropout, which is of training alone.
        "lora_dropout": 0.0 if any(map(expert_of, modules)) else lora.dropout,
        "use_rslora": False,
        "target_modules": kinds if isinstance(lora.targets, str) else list(lora.targets),
        # PEFT loads the head as a whole layer, not as an adapter.
        "modules_to_save": ["score"] if value_head else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
