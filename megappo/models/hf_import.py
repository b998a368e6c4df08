"""Import of a Hugging Face checkpoint into a built model: each rank reads the rectangles it holds from safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megappo.models.arch import ModelArch
from megappo.models.gpt import CriticModel, PackedModel, named_parameters
from megappo.models.hf_tensors import CheckpointReader, LazySlice
from megappo.models.int8_linear import BLOCK, SCALE, quantise
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


def load_pretrained(
    chunks: Sequence[PackedModel],
    arch: ModelArch,
    groups: ProcessGroups,
    path: str | Path,
    value_head: ValueHeadSource = "zero",
    seed: int = 0,
) -> None:
    """Fill every parameter of this rank from the checkpoint `path`.
    chunks: as built, not wrapped. value_head: how a critic's head starts: zeros, normal with variance 1/(hidden+1) from `seed`, or
    from the checkpoint. ValueError names tensor and file."""
    parameters = {name: parameter.data for name, parameter in named_parameters(chunks).items()}
    is_critic = isinstance(chunks[0], CriticModel)
    pieces = megatron_pieces(arch, groups.layout, groups.position, is_critic)
    shapes = hf_tensors(arch, is_critic)
    reader = CheckpointReader(path)
    for local in (LOCAL_EMBEDDING, LOCAL_OUTPUT):
        if local in parameters:
            parameters[local].zero_()  # vocabulary padding
    for piece in pieces:
        if piece.local != LOCAL_VALUE_HEAD:
            source, _ = reader.slice(piece.hf, shapes[piece.hf])
            if (scales := parameters.get(piece.local.removesuffix(".weight") + SCALE)) is None:
                _place(parameters[piece.local], piece, read_box(source, piece.box))
            else:
                codes, steps = read_int8(source, piece.box)
                _place(parameters[piece.local], piece, codes)
                scales[piece.row : piece.row + piece.box.rows] = steps
    if not is_critic and arch.tied_embeddings:
        check_tied(reader, arch, pieces)
    if LOCAL_VALUE_HEAD in parameters:
        fill_value_head(parameters[LOCAL_VALUE_HEAD], arch, reader, value_head, seed)


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


def read_int8(source: LazySlice, box: Box) -> tuple[Tensor, Tensor]:
    """Read a rectangle of a 2-D tensor in 8 bits: its codes, and the scales of every block of 64 columns that it touches.
    Both are what `int8_linear.quantise` makes of the whole tensor."""
    first, columns = box.c0 // BLOCK * BLOCK, source.get_shape()[1]
    # A scale is of all columns of its block, also of those that other ranks hold.
    codes, scales = quantise(read_box(source, box._replace(c0=first, c1=min(columns, -(-box.c1 // BLOCK) * BLOCK))))
    return codes[:, box.c0 - first : box.c1 - first], scales


def _place(parameter: Tensor, piece: Piece, values: Tensor) -> None:
    target = as_2d(parameter)[piece.row : piece.row + piece.box.rows, piece.col : piece.col + piece.box.cols]
    target.copy_(values)


def check_tied(
    reader: CheckpointReader, arch: ModelArch, pieces: Sequence[Piece], embedding_name: str = EMBEDDING, output_name: str = OUTPUT
) -> None:
    """Raise ValueError if the checkpoint claims tied embeddings but has another output projection, which would be lost."""
    if reader.find(output_name) is None:
        return
    shape = (arch.vocab_size, arch.hidden_size)
    for piece in (piece for piece in pieces if piece.hf == embedding_name):
        output, where = reader.slice(output_name, shape)
        embedding, _ = reader.slice(embedding_name, shape)
        if not torch.equal(read_box(output, piece.box), read_box(embedding, piece.box)):
            fix = "set tie_word_embeddings to false in config.json"
            raise ValueError(f"{where} differs from the embedding to which it is tied; {fix}")


def fill_value_head(weight: Tensor, arch: ModelArch, reader: CheckpointReader, source: ValueHeadSource, seed: int) -> None:
    """Fill the whole head [head_rows, hidden] as `load_pretrained` says. ValueError names tensor and file."""
    if source == "zero":
        weight.zero_()
    elif source == "normal":
        # Drawn on the host from the seed: the same on every tp rank and any device.
        generator = torch.Generator().manual_seed(seed)
        # Variance 1 / (hidden + 1), as Stiennon et al. 2020 start the head of their reward model.
        weight.copy_(torch.randn(arch.head_rows, arch.hidden_size, generator=generator) * (arch.hidden_size + 1) ** -0.5)
    else:
        name = next((name for name in _HEAD_NAMES if reader.find(name)), None)
        if name is None:
            known = ", ".join(_HEAD_NAMES)
            raise ValueError(f"{reader.path} has no value head ({known}); set critic.value_head to zero or normal")
        head, _ = reader.slice(name, (arch.head_rows, arch.hidden_size))
        weight.copy_(head[:])
        _refuse_bias(reader, name.removesuffix("weight") + "bias", arch.head_rows)


def _refuse_bias(reader: CheckpointReader, name: str, rows: int) -> None:
    if reader.find(name) is None:
        return
    bias, where = reader.slice(name, (rows,))
    if bool(bias[:].ne(0).any()):
        fix = "set critic.value_head to zero or normal"
        raise ValueError(f"{where} is {float(bias[:].flatten()[0]):g}, but the value head has no bias; {fix}")
