"""Tensors of a Hugging Face checkpoint directory: names, spellings, and lazy slices of safetensors. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open

from megappo.models.fp8 import FP8, SCALE_SUFFIX, Dequantised, read_fp8
from megappo.models.hf_config import read_config
from megappo.runtime.messages import parse_object

if TYPE_CHECKING:  # a configuration is refused without loading torch
    from torch import Tensor

_PLAIN_DTYPES = ("F64", "F32", "BF16", "F16")


class LazySlice(Protocol):
    """A tensor of a file of which only the indexed part is read."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


class CheckpointReader:
    """Tensors of a checkpoint directory (model.safetensors, or shards with an index) by their text-only names."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = _tensor_files(self.path)
        self._open: dict[str, Any] = {}

    def find(self, name: str) -> str | None:
        """Return the tensor's name in this checkpoint, or None."""
        return next((spelling for spelling in _spellings(name) if spelling in self._files), None)

    def slice(self, name: str, shape: Iterable[int]) -> tuple[LazySlice, str]:
        """Return the lazy slice of a tensor, dequantised if it is fp8, and its file and name for messages.
        ValueError if it or its scale is missing, or has another shape or a dtype that holds no weights."""
        spelling = self.find(name)
        if spelling is None:
            raise ValueError(f"{self.path}: tensor {name} is missing ({len(self._files)} tensors in the checkpoint)")
        found, where = self._stored(spelling)
        if list(found.get_shape()) != list(shape):
            raise ValueError(f"{where} has shape {list(found.get_shape())}, config.json asks for {list(shape)}")
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
            raise ValueError(f"{where} is {dtype}, but its scale {scale} is missing; the download may be incomplete")
        return Dequantised(found, *self._stored(scale), fp8), where

    def _stored(self, spelling: str) -> tuple[Any, str]:
        file = self._files[spelling]
        where = f"{self.path / file}: tensor {spelling}"
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.path / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.path / file} is not readable as safetensors: {error}") from None
        try:
            found = self._open[file].get_slice(spelling)
        except SafetensorError:
            raise ValueError(f"{where} is named by the index but not in the file") from None
        return found, where


def _tensor_files(path: Path) -> dict[str, str]:
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        files = parse_object(index.read_bytes(), str(index))["weight_map"]
        for name in sorted(set(files.values())):
            # A name with a folder in it could read outside of the checkpoint.
            if Path(name).name != name or not (path / name).is_file():
                raise ValueError(f"{index} names {name}, which is not a file in {path}")
        return files
    if single.is_file():
        try:
            with safe_open(single, framework="pt", device="cpu") as file:
                return dict.fromkeys(file.keys(), single.name)
        except SafetensorError as error:
            raise ValueError(f"{single} is not readable as safetensors: {error}") from None
    if any(path.glob("*.bin")) or any(path.glob("*.pt")):
        raise ValueError(
            f"{path} has pickled weights only (.bin), which are never loaded; convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)"
        )
    raise ValueError(f"{path} has neither model.safetensors nor model.safetensors.index.json")


def _spellings(name: str) -> tuple[str, ...]:
    # Text-only; Mistral3ForConditionalGeneration on the hub, then in transformers 5; base models.
    bare = name.removeprefix("model.")
    return name, f"language_model.{name}", f"model.language_model.{bare}", bare
