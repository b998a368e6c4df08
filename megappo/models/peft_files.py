"""Adapters as files of Hugging Face's PEFT (0.4 and later), which PEFT and vLLM load. Tensors stay fp32, as trained."""

from __future__ import annotations

import json
import re
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
from megappo.models.arch import ModelArch
from megappo.models.gather import Gather
from megappo.models.lora import ADAPTER_A, ADAPTER_B, adapted_of, expert_of, last_part, of_expert
from megappo.models.pieces import PieceMap, sizes_of
from megappo.models.vision_families import VISION_FAMILIES, checkpoint_name
from megappo.models.weight_map import VALUE_HEAD
from megappo.parallel.groups import ProcessGroups

ADAPTER_FOLDER = "adapter"
"""Folder of an export that holds them."""
_PREFIX = "base_model.model."
_GATE_UP, _FUSED, _LAST = ("gate_proj", "up_proj"), "gate_up_proj", "down_proj"
"""Names of experts' matrices in checkpoints, and of transformers' parameters of all experts of a layer."""


@dataclass(frozen=True)
class AdapterTensors:
    """Adapters of a model, and a value head, for an export. parameters: of this rank. pieces: of every position."""

    lora: LoraConfig
    parameters: Mapping[str, Tensor]
    pieces: PieceMap
    arch: ModelArch

    @property
    def fused(self) -> bool:
        """True if checkpoint and transformers' class hold gate and up of all experts of a layer in one tensor; PEFT knows no
        adapters of each."""
        return self.arch.vision is not None and VISION_FAMILIES[self.arch.architecture].stacked

    @property
    def stacked(self) -> bool:
        """True if one tensor of the checkpoint holds a matrix of all experts of a layer."""
        return self.fused or (self.arch.moe is not None and self.arch.moe.stacked)


def write_adapter(
    adapter: AdapterTensors,
    groups: ProcessGroups,
    folder: Path,
    source: Path,
    tokenizer: Tokenizer | None,
) -> None:
    """Write the two files, and the tokenizer if any, to `folder`, which must not exist, on the role's first rank. Collective over
    the role. source: directory of the base model, which the configuration names."""
    beside_tower = adapter.arch.vision is not None
    shapes = sizes_of(adapter.pieces)
    gather = Gather(adapter.parameters, adapter.pieces, shapes, groups, root=0)
    found = {_PREFIX + (checkpoint_name(name) if beside_tower else name): gather(name, torch.float32) for name in shapes}
    if groups.position != 0:
        return
    tensors = {name: whole for name, whole in found.items() if whole is not None}
    if adapter.fused:
        tensors = _gate_beside_up(tensors)
    if adapter.stacked:
        tensors = _in_stacks(tensors)
    if VALUE_HEAD in shapes:
        tensors[f"{_PREFIX}score.bias"] = torch.zeros(shapes[VALUE_HEAD][0])  # transformers' token classifiers have one
    folder.mkdir()
    if tokenizer is not None:  # the base model's may be another
        tokenizer.save(folder)
    config = adapter_config(adapter.lora, list(shapes), source, stacked=adapter.stacked, fused=adapter.fused)
    if beside_tower and config["target_modules"]:  # whose layers have names of the same endings
        endings = "|".join(map(re.escape, config["target_modules"]))
        config["target_modules"] = rf".*\.language_model\.layers\..*\.({endings})"
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    file = folder / "adapter_model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    open_to_readers_of(folder, file)


def _in_stacks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the adapters of a layer's experts as PEFT has them for parameters [experts, in, out]: A [experts x rank, in] and B [out,
    rank x experts]. PEFT wraps the module of the experts once for each of its parameters, the first one innermost."""
    found, stacks = dict[str, Tensor](), dict[str, list[Tensor]]()
    for name, tensor in tensors.items():
        if (place := expert_of(name)) is None:
            found[name] = tensor
        else:
            stacks.setdefault(place[0], []).append(tensor)
    for name, each in stacks.items():
        inner = "base_layer." if name.replace(_FUSED, _LAST) in stacks else ""
        joined = torch.cat(each) if name.endswith(ADAPTER_A) else torch.stack(each, dim=-1).flatten(1)
        found[name.replace(f"{_FUSED}.", inner).replace(f"{_LAST}.", "")] = joined
    return found


def _gate_beside_up(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the adapters of gate and up of every expert to one of both, side by side: A below A, and B beside B in blocks."""
    found, pairs = dict[str, Tensor](), dict[tuple[str, int], dict[str, Tensor]]()
    for name, tensor in tensors.items():
        place = expert_of(name)
        module = "" if place is None else last_part(place[0].removesuffix(ADAPTER_A).removesuffix(ADAPTER_B))
        if place is None or module not in _GATE_UP:
            found[name] = tensor
        else:
            stack, number = place
            pairs.setdefault((stack.replace(f".{module}.", f".{_FUSED}."), number), {})[module] = tensor
    for (stack, number), parts in pairs.items():
        if stack.endswith(ADAPTER_A):
            joined = torch.cat([parts[kind] for kind in _GATE_UP if kind in parts])
        else:
            rows = next(iter(parts.values())).size(0)
            joined = torch.block_diag(*(parts.get(kind, torch.zeros(rows, 0)) for kind in _GATE_UP))
        found[of_expert(stack, number)] = joined
    return found


def adapter_config(
    lora: LoraConfig, names: Sequence[str], source: Path, *, stacked: bool = False, fused: bool = False
) -> dict[str, Any]:
    """Make adapter_config.json of tensors with these names. stacked, fused: see `AdapterTensors`."""
    modules = adapted_of(names)
    value_head, of_experts = VALUE_HEAD in names, {last_part(module) for module in modules if expert_of(module)}
    targets = sorted(set(map(last_part, modules))) if isinstance(lora.targets, str) else list(lora.targets)
    config = {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS" if value_head else "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        # PEFT loads no adapters of experts with dropout, which is of training alone.
        "lora_dropout": 0.0 if of_experts else lora.dropout,
        "use_rslora": False,
        "target_modules": targets,
        # PEFT loads the head as a whole layer, not as an adapter.
        "modules_to_save": ["score"] if value_head else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    # Shared experts and dense layers, which PEFT would take for experts if it found them among the modules.
    beside = {_in_layer(module) for module in modules if expert_of(module) is None and last_part(module) in of_experts}
    if not stacked and (not beside or len(of_experts.intersection(_GATE_UP)) == 1):
        return config
    of_stacks = sorted({_FUSED if kind in _GATE_UP else kind for kind in of_experts})
    config["target_modules"] = [name for name in targets if last_part(name) not in of_experts]
    config["target_parameters"] = [f"experts.{kind}" for kind in of_stacks] + [f"{name}.weight" for name in sorted(beside)]
    if not stacked or (fused and of_experts.issuperset(_GATE_UP)):  # the adapters of gate and up are joined, here by PEFT itself
        joined = rf".*\.{_FUSED}"
        config |= {"rank_pattern": {joined: 2 * lora.rank}, "alpha_pattern": {joined: 2 * lora.alpha}}
    return config


def _in_layer(module: str) -> str:
    return module.partition(".layers.")[2].partition(".")[2]
