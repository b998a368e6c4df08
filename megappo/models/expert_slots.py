"""Parameters of a transformers model and the checkpoint's tensors inside them, by transformers' own conversion.

transformers 5 keeps all experts of a layer in one parameter; a checkpoint has one tensor per expert. The conversion of a save runs
on tensors without memory: it returns views, whose offsets are their places. One that computes (transposes, interleaves) is refused.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from megappo.models.arch import OwnParameter, Part
from megappo.models.pieces import Box, check_tiling, shape_as_2d


class _WithoutCopies(TorchDispatchMode):
    """Return a tensor itself instead of a contiguous copy, so that views stay views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def parameters_in_checkpoint(model: PreTrainedModel) -> tuple[OwnParameter, ...]:
    """List the parameters of a model on the meta device and the buffers that its checkpoint brings. Tied ones appear once.
    ValueError if a tensor of the checkpoint is not a block of rows of one parameter."""
    head = _names_of_head(model)
    held = dict(model.named_parameters())
    constants = constants_of(model)
    # Each has a storage of its own, which tells whose view a tensor is.
    tensors = {name: torch.empty(tensor.shape, device="meta") for name, tensor in (held | constants).items()}
    parts: dict[str, list[Part]] = defaultdict(list)
    with _WithoutCopies():
        saved = revert_weight_conversion(model, dict(tensors))
    owners = {_storage(tensor): name for name, tensor in tensors.items()}
    for hf, view in saved.items():
        name = owners.get(_storage(view))
        row = None if name is None else _row(view, tensors[name])
        if name is None or row is None:
            raise ValueError(f"transformers computes the tensor {hf} of {type(model).__name__}; no rows of a parameter hold it")
        parts[name].append(Part(hf, tuple(view.shape), row))
    found = []
    for name, tensor in tensors.items():
        rows, cols = shape_as_2d(tensor.shape)
        inside = sorted(parts[name], key=lambda part: part.row)
        boxes = [Box(part.row, part.row + shape_as_2d(part.shape)[0], 0, cols) for part in inside]
        check_tiling(Box(0, rows, 0, cols), boxes, name)
        linear = inside[0].hf == name and type(model.get_submodule(name.rpartition(".")[0])) is torch.nn.Linear
        linear = linear and name.endswith(".weight")
        found.append(OwnParameter(name, tuple(tensor.shape), tuple(inside), name in head, name in constants, linear))
    return tuple(found)


def constants_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Persistent buffers by name, which a checkpoint brings: corrections of experts' scores."""
    found = {}
    for prefix, part in model.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}"] = buffer
    return found


def _names_of_head(model: PreTrainedModel) -> set[str]:
    decoder = {id(parameter) for parameter in model.base_model.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) not in decoder}


def _row(view: Tensor, whole: Tensor) -> int | None:
    """First row of `view` in its base tensor `whole`, both as matrices; None unless it is a block of whole rows."""
    (_, cols), (_, all_cols) = shape_as_2d(view.shape), shape_as_2d(whole.shape)
    row, rest = divmod(int(view.storage_offset()), all_cols)
    return row if cols == all_cols and rest == 0 and view.is_contiguous() else None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # the same for all views; a meta tensor has no data pointer to compare
