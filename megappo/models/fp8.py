"""Weights that a checkpoint stores in fewer bits, read as fp32: training starts from these and never returns to them.

fp8 (float8_e4m3fn) as in transformers' fine-grained fp8: weight = fp8 value x `weight_scale_inv` of its block or tensor, in fp32;
scales of activations are not read. mxfp4 (experts of gpt-oss as published): 32 inputs of an output share a power of two, and each
is a number of 4 bits (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a configuration is refused without loading torch
    from torch import Tensor

FP8 = "F8_E4M3"
"""Name of float8_e4m3fn in safetensors files."""
SCALE_SUFFIX = "_scale_inv"
_SCALE_DTYPES = ("F32", "BF16", "F16")
# transformers' default where quantization_config has no weight_block_size; null means one scale per tensor.
_DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True)
class Fp8:
    """fp8 settings of a checkpoint. block: (rows, columns) that share a scale; None for one scale per tensor."""

    block: tuple[int, int] | None

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of the scales of a 2-D weight; blocks at the lower and right edge may be cut."""
        rows, cols = shape
        return (-(-rows // self.block[0]), -(-cols // self.block[1])) if self.block else (1, 1)


def read_fp8(config: Mapping[str, Any], *, mxfp4: bool = True) -> Fp8 | None:
    """Read the fp8 settings of a config.json; None if it is not quantised, or in mxfp4, which its tensors tell.
    ValueError for every other quantisation. mxfp4: that one is read."""
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not found:
        return None
    method = found.get("quant_method", "unknown") if isinstance(found, Mapping) else "unknown"
    if method == "mxfp4" and mxfp4:
        return None
    if method != "fp8":
        raise ValueError(f"the checkpoint is quantised ({method}); training needs its bf16, fp16, fp32 or fp8 version")
    if (fmt := found.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"quantization_config.fmt {fmt!r} is not supported; only e4m3 is")
    block = found.get("weight_block_size", _DEFAULT_BLOCK)
    if block is None:
        return Fp8(None)
    if not isinstance(block, list | tuple) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        fix = "two positive integers, or null for one scale per tensor, are needed"
        raise ValueError(f"quantization_config.weight_block_size {block!r}: {fix}")
    return Fp8((block[0], block[1]))


class Dequantised:
    """A 2-D fp8 tensor of a checkpoint that reads as fp32; a rectangle reads only its own weights and scales.
    weight, scale: safetensors' slices; scale of `grid(shape)` elements, or a scalar where there is one. where: file and name of the
    scale. ValueError if the scale does not fit the weight."""

    def __init__(self, weight: Any, scale: Any, where: str, fp8: Fp8) -> None:
        self._weight, self._shape = weight, tuple(weight.get_shape())
        if len(self._shape) != 2:
            raise ValueError(f"{where} scales a weight of shape {list(self._shape)}; a matrix is needed")
        self._grid, self._block = fp8.grid(self._shape), fp8.block or self._shape
        shape = scale.get_shape()
        fits = shape in ([], [1], [1, 1]) if self._grid == (1, 1) else shape == list(self._grid)
        if not fits:
            blocks = "one scale per tensor" if fp8.block is None else f"blocks of {list(fp8.block)}"
            raise ValueError(f"{where} has shape {shape}; {blocks} of a weight of {list(self._shape)} need {list(self._grid)}")
        if (dtype := scale.get_dtype()) not in _SCALE_DTYPES:
            raise ValueError(f"{where} is {dtype}; scales are read from {', '.join(_SCALE_DTYPES)}")
        self._scale = scale

    @cached_property
    def _scales(self) -> Tensor:
        return self._scale[...].float().reshape(self._grid)

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Read the fp32 rectangle [rows, columns] of two slices; one slice takes rows."""
        import torch

        rows, cols = index if isinstance(index, tuple) else (index, slice(None))
        values = self._weight[rows, cols].float()
        row_blocks = torch.arange(*rows.indices(self._shape[0])) // self._block[0]
        col_blocks = torch.arange(*cols.indices(self._shape[1])) // self._block[1]
        return values.mul_(self._scales[row_blocks[:, None], col_blocks])


# --------------------------------------------------------------------------------------------------------------- mxfp4

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
