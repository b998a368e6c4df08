"""Weights that a checkpoint stores in fp8 (float8_e4m3fn) with a scale per tensor or per block, read as fp32.

As in transformers' fine-grained fp8: weight = fp8 value x `weight_scale_inv` of its block, in fp32. Scales of activations are not
read: training starts from the dequantised weights and never returns to fp8.
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
    """Read the fp8 settings of a config.json; None if it is not quantised, or in mxfp4, which its tensors tell (`mxfp4.py`).
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
