"""Checkpoints quantised to fp8 as the public releases are, and the weights that they stand for, computed from the whole tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file, save_file

LARGEST = 448.0  # of float8_e4m3fn

Block = tuple[int, int] | None


def quantise(weight: torch.Tensor, block: Block, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(fp8 weight, scales, the fp32 weight that they stand for). block None: one scale, a scalar."""
    rows, cols = weight.shape
    height, width = block or (rows, cols)
    grid = torch.zeros(-(-rows // height), -(-cols // width))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            grid[i, j] = weight[i * height : (i + 1) * height, j * width : (j + 1) * width].abs().max() / LARGEST
    grid = grid.to(scale_dtype)
    spread = grid.float().repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :cols]
    stored = (weight / spread).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return stored, grid if block else grid.reshape(()), stored.float() * spread


def quantise_checkpoint(folder: Path, block: Block, scale_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Rewrite the projections of a checkpoint in fp8, with scales of activations as Ministral 3's release has them.

    Returns every tensor of the language model by its text-only name, in fp32.
    """
    tensors = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    written, meant = {}, {}
    for name, tensor in tensors.items():
        bare = name.replace("model.language_model.", "model.").removeprefix("language_model.")
        if "vision" in name or "projector" in name or not name.endswith("_proj.weight"):
            written[name] = meant[bare] = tensor
        else:
            written[name], written[f"{name}_scale_inv"], meant[bare] = quantise(tensor, block, scale_dtype)
            written[name.replace(".weight", ".activation_scale")] = torch.tensor(0.01)
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic" if block else "static",
        "weight_block_size": list(block) if block else None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def transformers_model(kind: Any, folder: Path, **arguments: Any) -> torch.nn.Module:
    """transformers' model of class `kind`, dequantised by transformers if the checkpoint is in fp8."""
    settings = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if settings is None:
        return kind.from_pretrained(folder, **arguments)
    block = settings["weight_block_size"]
    arguments["quantization_config"] = transformers.FineGrainedFP8Config(weight_block_size=block, dequantize=True)
    # It asks for accelerate, which dequantising does not use.
    quantizer = "transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer"
    with mock.patch(f"{quantizer}.validate_environment"):
        return kind.from_pretrained(folder, **arguments)
