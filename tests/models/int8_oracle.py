"""Rounding of weights to 8 bits written out in NumPy, and a checkpoint of weights that are rounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

BLOCK = 64


def rounded(weight: np.ndarray) -> np.ndarray:
    """[rows, columns] fp64 -> the same after 8 bits: in blocks of 64 of a row, whole multiples of a 127th of the largest number, in
    bf16."""
    found = np.zeros_like(weight)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], BLOCK):
            block = weight[row, start : start + BLOCK]
            step = float(torch.tensor(np.abs(block).max() / 127).bfloat16())
            if step > 0:
                found[row, start : start + BLOCK] = np.clip(np.rint(block / step), -127, 127) * step
    return found


def write_rounded(source: Path, target: Path) -> None:
    """Write the checkpoint `source` of a language model again, with the weights of the linear layers of its layers rounded."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            module.weight.data = torch.from_numpy(rounded(module.weight.detach().double().numpy())).float()
    model.save_pretrained(target)
