"""Tensors of a Hugging Face checkpoint directory: names, spellings, and lazy slices of safetensors. Nothing is unpickled."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from safetensors import SafetensorError, safe_open

from megappo.models.fp8 import FP8, SCALE_SUFFIX, Dequantised, read_fp8
from megappo.models.hf_config import read_config
from megappo.models.mxfp4 import BLOCKS, SCALES, Mxfp4
from megappo.models.pieces import Box, as_2d
from megappo.models.vision_families import TOWER
from megappo.models.weight_map import OUTPUT
from megappo.runtime.messages import first_line, parse_object

if TYPE_CHECKING:  # a configuration is refused without loading torch
    from torch import Tensor

_PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_INCOMPLETE = "the download may be incomplete"


class LazySlice(Protocol):
    """A tensor of a file of which only the indexed part is read."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


class CheckpointReader:
    """Tensors of a checkpoint directory (model.safetensors, or shards with an index) by their text-only names."""

    def __init__(self, path: str | Path, *, headers_only: bool = False) -> None:
        """headers_only: shapes and dtypes alone are asked for, and torch is not loaded. ValueError if there are no such files."""
        self.path = Path(path)
        self._files = _tensor_files(self.path)
        self._open: dict[str, Any] = {}
        self._framework = "np" if headers_only else "pt"  # a slice is an array of numpy, which has no bf16, or a tensor

    def find(self, name: str) -> str | None:
        """Return the tensor's name in this checkpoint, or that of its blocks in mxfp4, or of all experts of its layer; or None."""
        spelled = [found for spelling in _spellings(name) for found in (spelling, spelling + BLOCKS)]
        if (place := place_in_stack(name)) is not None:
            spelled += _spellings(place.stack)
        return next((found for found in spelled if found in self._files), None)

    def slice(self, name: str, shape: Iterable[int]) -> tuple[LazySlice, str]:
        """Return the lazy slice of a tensor, dequantised if it is fp8 or mxfp4, and its file and name for messages.
        ValueError if it or its scale is missing, or has another shape or a dtype that holds no weights."""
        spelling = self.find(name)
        if spelling is None:
            raise ValueError(f"{self.path}: tensor {name} {list(shape)} is missing; {_fix_of_missing(name)}")
        found, where = self._stored(spelling)
        if (place := place_in_stack(name)) is not None and not spelling.endswith(".weight"):
            found = OfAllExperts(found, place, tuple(shape))
        in_mxfp4 = self._mxfp4(found, spelling, where) if spelling.endswith(BLOCKS) else None
        sizes = list((in_mxfp4 or found).get_shape())
        if sizes != list(shape):
            fix = "take both from the same checkpoint"
            raise ValueError(f"{where} has shape {sizes}, config.json asks for {list(shape)}; {fix}")
        if in_mxfp4 is not None:
            return in_mxfp4, where
        scale, dtype = spelling + SCALE_SUFFIX, found.get_dtype()
        if dtype in _PLAIN_DTYPES:
            if scale in self._files:
                raise ValueError(f"{where} is {dtype}, but {scale} scales it; only {FP8} tensors have scales")
            return found, where
        if dtype != FP8:
            raise ValueError(f"{where} is {dtype}; weights are read from {', '.join(_PLAIN_DTYPES)} and {FP8}")
        fp8 = read_fp8(read_config(self.path))
        if fp8 is None:
            raise ValueError(f"{where} is {dtype}, but config.json has no quantization_config that says how it is scaled")
        if scale not in self._files:
            raise ValueError(f"{where} is {dtype}, but its scale {scale} is missing; {_INCOMPLETE}")
        return Dequantised(found, *self._stored(scale), fp8), where

    def _mxfp4(self, blocks: Any, spelling: str, where: str) -> Mxfp4:
        scales = spelling.removesuffix(BLOCKS) + SCALES
        if scales not in self._files:
            raise ValueError(f"{where} has no {scales}; {_INCOMPLETE}")
        return Mxfp4(blocks, self._stored(scales)[0], where)

    def unread(self, names: Iterable[str]) -> dict[str, list[int]]:
        """Return the shapes of the tensors that no one of `names` finds, by the names that they have in this checkpoint."""
        others = dict.fromkeys(self._files)
        for name in names:
            others.pop(self.find(name) or "", None)
        return {spelling: list(self._stored(spelling)[0].get_shape()) for spelling in others}

    def _stored(self, spelling: str) -> tuple[Any, str]:
        file = self._files[spelling]
        where = f"{self.path / file}: tensor {spelling}"
        if file not in self._open:
            self._open[file] = _opened(self.path / file, self._framework)
        try:
            found = self._open[file].get_slice(spelling)
        except SafetensorError:
            raise ValueError(f"{where} is named by the index but not in the file") from None
        return found, where


class PlaceInStack(NamedTuple):
    """Place of an expert's matrix in a tensor of all experts of a layer. part: gate, up or down."""

    stack: str
    expert: int
    part: str


def place_in_stack(name: str) -> PlaceInStack | None:
    """Find the place of the weight `name` of an expert's projection; None for other tensors."""
    if (found := _EXPERT.fullmatch(name)) is None:
        return None
    return PlaceInStack(found[1] + ("down_proj" if found[3] == "down" else "gate_up_proj"), int(found[2]), found[3])


class OfAllExperts:
    """The matrix [out, in] of one expert in a tensor of a layer: [experts, rows, in], gate above up, as transformers holds them, or
    [experts, in, rows]. shape: that of the matrix, which tells the two apart; of squares transformers takes the first."""

    def __init__(self, stack: Any, place: PlaceInStack, shape: tuple[int, ...]) -> None:
        self._stack, self._expert, self._part = stack, place.expert, place.part
        _, rows, columns = stack.get_shape()
        self._turned = columns != shape[-1] and rows == shape[-1]
        self._shape = [columns, rows] if self._turned else [rows, columns]
        self.get_dtype = stack.get_dtype

    def get_shape(self) -> list[int]:
        rows, columns = self._shape
        return [rows if self._part == "down" else rows // 2, columns]

    def __getitem__(self, index: Any) -> Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        size = self.get_shape()[0]
        start, stop, _ = rows.indices(size)
        first = size if self._part == "up" else 0
        one, rows = slice(self._expert, self._expert + 1), slice(first + start, first + stop)
        return self._stack[one, columns, rows][0].T if self._turned else self._stack[one, rows, columns][0]


def read_box(source: LazySlice, box: Box) -> Tensor:
    """Read a rectangle of a safetensors slice as 2-D (`as_2d`)."""
    shape = source.get_shape()
    if len(shape) == 1:
        return source[box.r0 : box.r1].view(-1, 1)
    if len(shape) == 2:
        return source[box.r0 : box.r1, box.c0 : box.c1]
    rows = prod(shape[1:-1])  # of each entry of the first dimension
    first = box.r0 // rows
    entries = as_2d(source[first : -(-box.r1 // rows)].contiguous())
    return entries[box.r0 - first * rows : box.r1 - first * rows, box.c0 : box.c1]


def _fix_of_missing(name: str) -> str:
    if name == OUTPUT:
        return "set tie_word_embeddings to true in config.json if the embedding is the output projection, or use a language model"
    return f"{_INCOMPLETE}, or config.json is of another model"


def _tensor_files(path: Path) -> dict[str, str]:
    """Return tensor -> file of a checkpoint directory."""
    index, single = path / _INDEX, path / _SINGLE
    if index.is_file():
        files = parse_object(index.read_bytes(), str(index)).get("weight_map")
        if not isinstance(files, dict):
            raise ValueError(f"{index} has no weight_map; {_INCOMPLETE}")
        for name in sorted({*map(str, files.values())}):
            # A name with a folder in it could read outside of the checkpoint.
            if Path(name).name != name:
                raise ValueError(f"{index} names {name}, which is not a file in {path}")
            if not (path / name).is_file():  # of an interrupted download, which fetches the index first
                raise ValueError(f"{path / name} is missing, which {_INDEX} names; {_INCOMPLETE}")
        return files
    if single.is_file():
        return dict.fromkeys(_opened(single, "np").keys(), single.name)
    raise ValueError(f"{path} {_without_weights(path)}")


def _opened(file: Path, framework: str) -> Any:
    try:
        return safe_open(file, framework=framework, device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {first_line(error)}; {_INCOMPLETE}") from None


def _without_weights(path: Path) -> str:
    """Describe a directory with neither the one file of weights nor an index of several."""
    if other := next((file.name for file in sorted(path.glob("*.safetensors"))), None):
        return f"holds {other}, but neither {_SINGLE} nor {_INDEX}; {_INCOMPLETE}"
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickled:
        fix = "pickled weights are never read, save it with transformers' save_pretrained"
        return f"holds {pickled[0]} and no .safetensors; {fix}"
    return f"holds no .safetensors weights; {_INCOMPLETE} (`megappo plan --shapes-only` needs config.json alone)"


def _spellings(name: str) -> tuple[str, ...]:
    # Text-only; Mistral3ForConditionalGeneration on the hub, then in transformers 5; towers in transformers 5; base models.
    bare = name.removeprefix("model.")
    inside = name.removeprefix(TOWER)
    beside = () if inside == name else (f"model.{inside}", inside)
    return name, f"language_model.{name}", f"model.language_model.{bare}", f"model.{bare}", bare, *beside
