"""Compares the tensors that a role reads with those of its checkpoint: missing, of another shape, or left out. The plan asks the
headers, and the values of the few tensors that the import refuses by value; both refuse by the same lines. Needs no torch, but for
`check_values`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megappo.models.arch import ModelArch
from megappo.models.families.registry import FAMILIES
from megappo.models.fp8 import SCALE_SUFFIX
from megappo.models.hf_config import read_config, text_config
from megappo.models.hf_tensors import CheckpointReader, LazySlice, read_box
from megappo.models.mxfp4 import SCALES
from megappo.models.pieces import Box
from megappo.models.weight_map import EMBEDDING, OUTPUT, VALUE_HEAD, hf_layer, hf_tensors

ValueHeadSource = Literal["zero", "normal", "checkpoint"]

# transformers' token and sequence classifiers, then TRL's AutoModelForCausalLMWithValueHead
_HEAD_NAMES = (VALUE_HEAD, "v_head.summary.weight", "v_head.weight")
_PREFIX = "model."
# Angles that are computed from config.json, and scales of fp8 and mxfp4, of which those of weights are read with them.
_COMPUTED = (".inv_freq", SCALE_SUFFIX, SCALES, ".activation_scale", ".input_scale")
_OTHER_HEADS = "set critic.value_head to zero or normal"
_ROWS = 4096  # of an embedding that are compared at once


@dataclass(frozen=True)
class LeftOut:
    """Tensors of a checkpoint that a role does not read. head: name of a value head, if the role's own starts otherwise.
    others: names and shapes of tensors of the language model that no layer has."""

    head: str | None
    others: tuple[str, ...]


def check_headers(path: str | Path, arch: ModelArch, value_head: ValueHeadSource | None) -> LeftOut:
    """Read the headers of a checkpoint's files and return the tensors that are left out. value_head: None for a language model.
    ValueError as from the import, with file, tensor and shapes, for a tensor that it would not find or not take."""
    reader = CheckpointReader(path, headers_only=True)
    for name, shape in hf_tensors(arch, value_head is not None).items():
        if name != VALUE_HEAD:
            reader.slice(name, shape)
    if value_head == "checkpoint":
        find_head(reader, arch)
    heads = [name for name in _HEAD_NAMES if value_head in ("zero", "normal") and reader.find(name)]
    beside = {name.removesuffix("weight") + end for name in _HEAD_NAMES for end in ("weight", "bias")} if value_head else set()
    others = {name: shape for name, shape in _surplus(reader, arch).items() if name not in beside}
    return LeftOut(heads[0] if heads else None, tuple(f"{name} {shape}" for name, shape in others.items()))


def _surplus(reader: CheckpointReader, arch: ModelArch) -> dict[str, list[int]]:
    """Names and shapes of the tensors of the language model that its architecture has not, a value head among them."""
    of_model = hf_tensors(arch)
    first = next(name for name in of_model if name.startswith(_PREFIX) or arch.own)
    prefix = str(reader.find(first)).removesuffix(first.removeprefix(_PREFIX))
    inside = prefix if prefix not in ("", _PREFIX) else ""  # of a model beside a vision tower
    unread = reader.unread((*of_model, OUTPUT))  # a value model leaves the output projection
    passed = further_layers_of(reader.path, arch)
    found = {name: shape for name, shape in unread.items() if name.startswith(inside) and not name.endswith(_COMPUTED)}
    return {name: shape for name, shape in found.items() if not name.startswith(passed)}


def further_layers_of(path: str | Path, arch: ModelArch) -> tuple[str, ...]:
    """Prefixes of the layers behind the last that predict further tokens: an export copies them (`hf_export.py`)."""
    if (family := FAMILIES.get(arch.family)) is not None and family.further_layers is not None:
        return (family.further_layers,)
    more = text_config(read_config(path)).get("num_nextn_predict_layers") or 0
    return tuple(hf_layer(arch.num_layers + layer) for layer in range(more))


def check_values(path: str | Path, arch: ModelArch, value_head: ValueHeadSource | None) -> None:
    """Refuse, as the import would, what headers do not show: an output projection that differs from the embedding to which it is
    tied, a bias of a value head. ValueError. Reads no other tensors, and few checkpoints have these."""
    reader = CheckpointReader(path)
    if value_head == "checkpoint":
        find_head(reader, arch).refuse_bias()
    if value_head is None and arch.tied_embeddings and reader.unread(hf_tensors(arch)):
        check_tied(reader, arch, *_names_of_embeddings(path, arch))


def _names_of_embeddings(path: str | Path, arch: ModelArch) -> tuple[str, str]:
    if not arch.own:
        return EMBEDDING, OUTPUT
    import torch

    from megappo.models.hf_classes import build_on_meta, names_of_embeddings

    return names_of_embeddings(build_on_meta(str(path), head_rows=0, dtype=torch.float32, vision=arch.vision))


def check_tied(
    reader: CheckpointReader,
    arch: ModelArch,
    embedding_name: str = EMBEDDING,
    output_name: str = OUTPUT,
    boxes: Iterable[Box] | None = None,
) -> None:
    """Raise ValueError if the checkpoint claims tied embeddings but has another output projection, which would be lost.
    boxes: the rectangles that are compared; None for the whole tensors."""
    if reader.find(output_name) is None:
        return
    shape = (arch.vocab_size, arch.hidden_size)
    (output, where), (embedding, _) = (reader.slice(name, shape) for name in (output_name, embedding_name))
    if boxes is None:
        starts = range(0, arch.vocab_size, _ROWS)
        boxes = (Box(row, min(row + _ROWS, arch.vocab_size), 0, arch.hidden_size) for row in starts)
    for box in boxes:
        if bool(read_box(output, box).ne(read_box(embedding, box)).any()):
            fix = "set tie_word_embeddings to false in config.json"
            raise ValueError(f"{where} differs from the embedding to which it is tied; {fix}")


@dataclass(frozen=True)
class StoredHead:
    """A value head in a checkpoint: weight [head_rows, hidden], and its bias or None with its file and name."""

    weight: LazySlice
    bias: LazySlice | None
    where: str

    def refuse_bias(self) -> None:
        """Raise ValueError if the head has a bias that is not 0."""
        if self.bias is not None and bool(self.bias[:].ne(0).any()):
            value = float(self.bias[:].flatten()[0])
            raise ValueError(f"{self.where} is {value:g}, but the value head has no bias; {_OTHER_HEADS}")


def find_head(reader: CheckpointReader, arch: ModelArch) -> StoredHead:
    """Find the value head of a checkpoint. ValueError names file and tensor if there is none, or one of another shape."""
    name = next((name for name in _HEAD_NAMES if reader.find(name)), None)
    if name is None:
        raise ValueError(f"{reader.path} has no value head ({', '.join(_HEAD_NAMES)}); {_OTHER_HEADS}")
    weight, _ = reader.slice(name, (arch.head_rows, arch.hidden_size))
    bias = name.removesuffix("weight") + "bias"
    return StoredHead(weight, *(reader.slice(bias, (arch.head_rows,)) if reader.find(bias) else (None, "")))
