"""Experts that a checkpoint stores in mxfp4 (gpt-oss as published), read as fp32: 32 inputs of an output share a power of two, and
each is a number of 4 bits (OCP Microscaling Formats 1.0). Training starts from these weights and never returns to 4 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a configuration is refused without loading torch
    from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the two tensors of a weight. Blocks: [experts, outputs, inputs / 32, 16] uint8, of which each holds two numbers, the
first in its low bits. Scales: [experts, outputs, inputs / 32] uint8, exponents of 2 plus 127."""
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Mxfp4:
    """A weight [experts, inputs, outputs] of a checkpoint; only the experts that are indexed are read. blocks, scales: safetensors'
    slices. where: file and name of the blocks. ValueError if they do not fit."""

    def __init__(self, blocks: Any, scales: Any, where: str) -> None:
        sizes = blocks.get_shape()
        if len(sizes) != 4 or sizes[3] != 16 or scales.get_shape() != sizes[:3]:
            found = f"{sizes} with scales {scales.get_shape()}"
            raise ValueError(f"{where} has shape {found}; [experts, outputs, inputs / 32, 16] and the same without 16 are needed")
        if kinds := {blocks.get_dtype(), scales.get_dtype()} - {"U8"}:
            raise ValueError(f"{where} is {min(kinds)}; blocks and scales of mxfp4 are U8")
        self._blocks, self._scales = blocks, scales
        self._shape = [sizes[0], 32 * sizes[2], sizes[1]]

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, index: Any) -> Tensor:
        """Read the experts of a slice: [experts, inputs, outputs] fp32."""
        import torch

        packed, exponents = self._blocks[index], self._scales[index].int() - 127
        pairs = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        values = torch.ldexp(torch.tensor(_NUMBERS)[pairs.int()], exponents[..., None])
        return values.flatten(-2).transpose(1, 2)
