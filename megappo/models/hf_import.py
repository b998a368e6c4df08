"""Import of a Hugging Face checkpoint into a built model: each rank reads the rectangles it holds from safetensors.

Nothing is unpickled. `weight_map.py` places the rectangles; this file knows the spellings of names and the sources of value heads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megappo.models.arch import ModelArch
from megappo.models.gpt import CriticModel, PackedModel
from megappo.models.naming import named_parameters
from megappo.models.pieces import Box, Piece, as_2d
from megappo.models.weight_map import (
    EMBEDDING,
    LOCAL_EMBEDDING,
    LOCAL_OUTPUT,
    LOCAL_VALUE_HEAD,
    OUTPUT,
    VALUE_HEAD,
    hf_tensors,
    megatron_pieces,
)
from megappo.parallel.groups import ProcessGroups

ValueHeadSource = Literal["zero", "normal", "checkpoint"]

# transformers' token and sequence classifiers, then TRL's AutoModelForCausalLMWithValueHead
_HEAD_NAMES = (VALUE_HEAD, "v_head.summary.weight", "v_head.weight")


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


class CheckpointReader:
    """Tensors of a checkpoint directory (model.safetensors, or shards with an index) by their text-only names."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = _tensor_files(self.path)
        self._open: dict[str, Any] = {}

    def find(self, name: str) -> str | None:
        """The tensor's name in this checkpoint, or None."""
        return next((spelling for spelling in _spellings(name) if spelling in self._files), None)

    def slice(self, name: str, shape: Iterable[int]) -> tuple[_Slice, str]:
        """Lazy slice of a tensor, and its file and name for messages. ValueError if it is missing or has another shape."""
        spelling = self.find(name)
        if spelling is None:
            raise ValueError(f"{self.path}: tensor {name} is missing ({len(self._files)} tensors in the checkpoint)")
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
        if list(found.get_shape()) != list(shape):
            raise ValueError(f"{where} has shape {list(found.get_shape())}, config.json asks for {list(shape)}")
        return found, where


def _tensor_files(path: Path) -> dict[str, str]:
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
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
    """Possible names of a tensor: text-only, then Mistral3ForConditionalGeneration's on the hub and in transformers 5, then those
    of base models."""
    bare = name.removeprefix("model.")
    return name, f"language_model.{name}", f"model.language_model.{bare}", bare


def load_pretrained(
    chunks: Sequence[PackedModel],
    arch: ModelArch,
    groups: ProcessGroups,
    path: str | Path,
    value_head: ValueHeadSource = "zero",
    seed: int = 0,
) -> None:
    """Fill every parameter of this rank from the checkpoint `path`.

    chunks: as built, not wrapped. value_head matters for a critic: zeros, normal with variance 1/(hidden+1) from `seed`, or read
    from the checkpoint. ValueError names tensor and file.
    """
    parameters = {name: parameter.data for name, parameter in named_parameters(chunks).items()}
    is_critic = isinstance(chunks[0], CriticModel)
    pieces = megatron_pieces(arch, groups.layout, dist.get_rank(), is_critic)
    shapes = hf_tensors(arch, is_critic)
    reader = CheckpointReader(path)
    for local in (LOCAL_EMBEDDING, LOCAL_OUTPUT):
        if local in parameters:
            parameters[local].zero_()  # vocabulary padding
    for piece in pieces:
        if piece.local != LOCAL_VALUE_HEAD:
            source, _ = reader.slice(piece.hf, shapes[piece.hf])
            _place(parameters[piece.local], piece, read_box(source, piece.box))
    if not is_critic and arch.tied_embeddings:
        _check_tied(reader, arch, pieces)
    if LOCAL_VALUE_HEAD in parameters:
        _fill_value_head(parameters[LOCAL_VALUE_HEAD], arch, reader, value_head, seed)


def read_box(source: _Slice, box: Box) -> Tensor:
    """Read a rectangle of a safetensors slice as 2-D (a 1-D tensor is one column)."""
    if len(source.get_shape()) == 1:
        return source[box.r0 : box.r1].view(-1, 1)
    return source[box.r0 : box.r1, box.c0 : box.c1]


def _place(parameter: Tensor, piece: Piece, values: Tensor) -> None:
    target = as_2d(parameter)[piece.row : piece.row + piece.box.rows, piece.col : piece.col + piece.box.cols]
    target.copy_(values)


def _check_tied(reader: CheckpointReader, arch: ModelArch, pieces: list[Piece]) -> None:
    """Raise ValueError for a checkpoint that claims tied embeddings but has another output projection, which would be lost."""
    if reader.find(OUTPUT) is None:
        return
    shape = (arch.vocab_size, arch.hidden_size)
    for piece in (piece for piece in pieces if piece.hf == EMBEDDING):
        output, where = reader.slice(OUTPUT, shape)
        embedding, _ = reader.slice(EMBEDDING, shape)
        if not torch.equal(read_box(output, piece.box), read_box(embedding, piece.box)):
            fix = "set tie_word_embeddings to false in config.json"
            raise ValueError(f"{where} differs from the embedding to which it is tied; {fix}")


def _fill_value_head(weight: Tensor, arch: ModelArch, reader: CheckpointReader, source: ValueHeadSource, seed: int) -> None:
    if source == "zero":
        weight.zero_()
    elif source == "normal":
        # Drawn on the host from the seed: the same on every tp rank and any device.
        generator = torch.Generator().manual_seed(seed)
        # Variance 1 / (hidden + 1), as Stiennon et al. 2020 start the head of their reward model.
        weight.copy_(torch.randn(1, arch.hidden_size, generator=generator) * (arch.hidden_size + 1) ** -0.5)
    else:
        name = next((name for name in _HEAD_NAMES if reader.find(name)), None)
        if name is None:
            known = ", ".join(_HEAD_NAMES)
            raise ValueError(f"{reader.path} has no value head ({known}); set critic.value_head to zero or normal")
        head, _ = reader.slice(name, (1, arch.hidden_size))
        weight.copy_(head[:])
        _refuse_bias(reader, name.removesuffix("weight") + "bias")


def _refuse_bias(reader: CheckpointReader, name: str) -> None:
    if reader.find(name) is None:
        return
    bias, where = reader.slice(name, (1,))
    if bool(bias[:].ne(0).any()):
        fix = "set critic.value_head to zero or normal"
        raise ValueError(f"{where} is {bias[:].item():g}, but the value head has no bias; {fix}")
