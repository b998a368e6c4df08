"""Import of a Hugging Face checkpoint into a built model: each rank reads the rectangles it holds from safetensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megappo.models.arch import ModelArch
from megappo.models.gpt import CriticModel, PackedModel, named_parameters
from megappo.models.hf_tensors import CheckpointReader, LazySlice, read_box
from megappo.models.int8_linear import BLOCK, SCALE, quantise
from megappo.models.pieces import Box, Piece, rectangle
from megappo.models.weight_check import ValueHeadSource, check_tied, find_head
from megappo.models.weight_map import EMBEDDING, LOCAL_EMBEDDING, LOCAL_OUTPUT, LOCAL_VALUE_HEAD, hf_tensors, megatron_pieces
from megappo.parallel.groups import ProcessGroups


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
            fill_piece(parameters, piece, reader.slice(piece.hf, shapes[piece.hf])[0])
    if not is_critic and arch.tied_embeddings:
        check_tied(reader, arch, boxes=[piece.box for piece in pieces if piece.hf == EMBEDDING])
    if LOCAL_VALUE_HEAD in parameters:
        fill_value_head(parameters[LOCAL_VALUE_HEAD], arch, reader, value_head, seed)


def fill_piece(parameters: Mapping[str, Tensor], piece: Piece, source: LazySlice) -> None:
    """Read a piece of a tensor of a checkpoint into its place among a rank's parameters, in 8 bits if they have scales."""
    box = piece.box
    place = rectangle(parameters[piece.local], piece.slot, piece.row, piece.col, box.rows, box.cols)
    if (scales := parameters.get(piece.local.removesuffix(".weight") + SCALE)) is None:
        place.copy_(read_box(source, box))
    else:
        codes, steps = read_int8(source, box)
        place.copy_(codes)
        scales[piece.row : piece.row + box.rows] = steps


def read_int8(source: LazySlice, box: Box) -> tuple[Tensor, Tensor]:
    """Read a rectangle of a 2-D tensor in 8 bits: its codes, and the scales of every block of 64 columns that it touches.
    Both are what `int8_linear.quantise` makes of the whole tensor."""
    first, columns = box.c0 // BLOCK * BLOCK, source.get_shape()[1]
    # A scale is of all columns of its block, also of those that other ranks hold.
    codes, scales = quantise(read_box(source, box._replace(c0=first, c1=min(columns, -(-box.c1 // BLOCK) * BLOCK))))
    return codes[:, box.c0 - first : box.c1 - first], scales


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
        head = find_head(reader, arch)
        head.refuse_bias()
        weight.copy_(head.weight[:])
