"""Records the place of every checkpoint element in vLLM's parameters, by watching vLLM's own loader on meta tensors.
`model.load_weights` runs with every copy into a parameter recorded and none executed. So fused qkv and gate/up, replicated KV
heads, vocabulary padding and tensor parallelism follow from vLLM's code instead of a table here. The live weights stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.bridge.destination import Destination, Fill, Shape, module_of
from megappo.models.pieces import Box, Piece, shape_as_2d
from megappo.models.vision_families import TOWER, checkpoint_name


class _Region(NamedTuple):
    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Region:
        return cls(name, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


class _LoaderRecorder(TorchDispatchMode):
    """Records copies and fills into the watched parameters instead of executing them; other operations run. sources, targets:
    storage -> name. A contiguous copy of a slice of a source is that slice."""

    def __init__(self, sources: Mapping[int, str], targets: Mapping[int, str]) -> None:
        super().__init__()
        self.sources, self.targets = sources, targets
        self.copies: list[tuple[_Region, _Region]] = []
        self.fills: list[tuple[_Region, float]] = []
        self.cleared: set[str] = set()
        self.emptied: list[_Region] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        aten = torch.ops.aten
        storage = _storage(args[0]) if args and isinstance(args[0], Tensor) else -1
        target, source = self.targets.get(storage), self.sources.get(storage)
        if source is not None and func is aten.clone.default:
            return args[0]
        if source is not None and func is aten.zero_.default:
            # A bias that one rank of a replica adds (gpt_oss): the others clear the checkpoint's tensor before they copy it.
            self.cleared.add(source)
            return args[0]
        if source is not None and func._schema.is_mutable:
            raise ValueError(f"vLLM's loader runs {func} on the checkpoint's {source}, so the bridge cannot plan it")
        if target is None or not func._schema.is_mutable:  # views and reads of a parameter run as usual
            return func(*args, **(kwargs or {}))
        region = _Region.of(target, args[0])
        if func is aten.copy_.default and len(region.size) == 3 and 1 not in region.size:  # all experts of a layer
            for into, part in zip(args[0].unbind(0), args[1].unbind(0), strict=True):
                self._record_copy(_Region.of(target, into), part)
        elif func is aten.copy_.default:
            self._record_copy(region, args[1])
        elif func is aten.fill_.Scalar:
            self.fills.append((region, float(args[1])))
        elif func is aten.zero_.default:
            self.fills.append((region, 0.0))
        else:
            raise ValueError(
                f"vLLM's loader of {target} runs {func} on it: not a copy of a checkpoint slice, so the bridge cannot plan it"
            )
        return args[0]

    def _record_copy(self, region: _Region, source: Tensor) -> None:
        name = self.sources.get(_storage(source))
        if name is None:
            raise ValueError(
                f"vLLM's loader copies a computed tensor into {region.name}: not a pure slice of a checkpoint "
                "tensor, so the bridge cannot plan it"
            )
        if tuple(source.shape) != region.size:
            raise ValueError(
                f"vLLM's loader broadcasts {name} {tuple(source.shape)} into {region.name} {region.size}: not a pure slice"
            )
        if name in self.cleared:
            self.emptied.append(region)
        else:
            self.copies.append((_Region.of(name, source), region))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # the same for all views; a meta tensor has no data pointer to compare


class _Place(NamedTuple):
    slot: int
    box: Box
    turned: bool  # the region's rows are the columns of the box


def _place(region: _Region, shape: Shape) -> _Place:
    """Find a region of a contiguous tensor of this shape. ValueError if it is not a rectangle."""
    size, stride = region.size, region.stride
    if len(size) == 3 and size[1] == 1:  # kernels of a depthwise convolution
        size, stride = size[::2], stride[::2]
    if len(size) > 3 and all(stride[at] == stride[at + 1] * size[at + 1] for at in range(len(size) - 1)):
        # A whole convolution over patches, which is one matrix (`pieces.as_2d`).
        size, stride = shape_as_2d(size), stride[-2:]
    while len(size) > 2 and size[0] == 1:  # one expert of a 3-D parameter
        size, stride = size[1:], stride[1:]
    if len(size) == 1 and shape.cols == 1:
        rows, cols = size[0], 1
        row_stride, col_stride = stride[0], 1
    elif len(size) == 1:
        rows, cols, row_stride, col_stride = 1, size[0], shape.cols, stride[0]
    elif len(size) == 2:
        (rows, cols), (row_stride, col_stride) = size, stride
    else:
        raise ValueError(f"{region.name}: a region of {len(size)} dimensions {size} is not a rectangle")
    turned = rows > 1 and cols > 1 and (row_stride, col_stride) == (1, shape.cols)
    if turned:
        rows, cols, row_stride, col_stride = cols, rows, shape.cols, 1
    # A stride over a single row or column is never used.
    if (rows > 1 and row_stride != shape.cols) or (cols > 1 and col_stride != 1):
        raise ValueError(f"{region.name}: the region {size} with strides {stride} is strided, not a rectangle of {shape}")
    slot, rest = divmod(region.offset, shape.rows * shape.cols)
    row, col = divmod(rest, shape.cols)
    box = Box(row, row + rows, col, col + cols)
    if box.r1 > shape.rows or box.c1 > shape.cols:
        raise ValueError(f"{region.name}: the region at {region.offset} of size {size} wraps around the rows of {shape}")
    return _Place(slot, box, turned)


def _piece(source: _Region, target: _Region, sources: Mapping[str, Shape], targets: Mapping[str, Shape]) -> Piece:
    expert, box, turned = _place(source, sources[source.name])
    first = expert * sources[source.name].rows  # a checkpoint's tensor of all experts is a matrix of their rows
    box = box._replace(r0=first + box.r0, r1=first + box.r1)
    slot, place, other_way = _place(target, targets[target.name])
    piece = Piece(source.name, box, target.name, place.r0, place.c0, slot, turned != other_way)
    if piece.place_of(box) != place:
        raise ValueError(f"{source.name}{tuple(box)} is reshaped into {target.name}{tuple(place)}: not a pure slice")
    return piece


@contextlib.contextmanager
def _loader_format(model: torch.nn.Module, api: SimpleNamespace) -> Iterator[None]:
    """Replace the parameters by meta tensors in loader format; restore the live ones unchanged at the end."""
    api.initialize(model)
    try:
        yield
    finally:
        for layer in model.modules():
            info = api.info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    api.restore(layer, info)
                info.reset()


def record_destination(
    model: torch.nn.Module, api: SimpleNamespace, tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> Destination:
    """Describe this worker's parameters as pieces of the checkpoint tensors `tensors` (name -> shape). dtype: the engine's. Call it
    inside vLLM's `set_current_vllm_config`. ValueError, with the tensor's name, for a loader that computes, for a parameter that
    the checkpoint does not fill, and for one of a dtype that would round."""
    # Attention's own are made of the others' after every load: latent attention absorbs kv_b_proj.
    derived = {name for name, layer in model.named_modules() if api.is_deferred(layer)}
    parameter_names = {name for name, _ in model.named_parameters() if module_of(name) not in derived}
    with _loader_format(model, api), torch.no_grad():
        watched: dict[str, Tensor] = {}
        held: set[int] = set()
        for module_name, module in model.named_modules():
            for name, tensor in api.layer_tensors(module).items():
                if _storage(tensor) in held:  # the correction of experts' scores, which gate and experts hold, is the gate's
                    continue
                held.add(_storage(tensor))
                # The reload's wrapper would process each filled layer.
                tensor.weight_loader = api.original_loader(tensor)
                watched[f"{module_name}.{name}"] = tensor
        pieces, fills = _recorded(model, tensors, watched, dtype)
        filled = {piece.local for piece in pieces} | {fill.target for fill in fills}  # a part of the vocabulary may be all padding
        _check_parameters(watched, filled, parameter_names, dtype)
        shapes = {name: Shape.of(tensor.shape) for name, tensor in watched.items() if name in filled}
        others = {name: watched[name].dtype for name in filled if watched[name].dtype != dtype}
    destination = Destination(pieces, fills, shapes, dtype, others)
    destination.check_complete()
    return destination


def _recorded(
    model: torch.nn.Module, tensors: Mapping[str, tuple[int, ...]], watched: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[tuple[Piece, ...], tuple[Fill, ...]]:
    """Return the pieces and fills that the model's loader makes of these tensors. watched: its parameters, on meta."""
    load_weights: Any = model.load_weights  # every model of vLLM has it
    # A model with a tower reads the names of its whole checkpoint.
    spelled = checkpoint_name if any(name.startswith(TOWER) for name in tensors) else str
    weights = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in tensors.items()}
    recorder = _LoaderRecorder(
        {_storage(tensor): name for name, tensor in weights.items()}, {_storage(tensor): name for name, tensor in watched.items()}
    )
    with recorder:
        load_weights((spelled(name), weight) for name, weight in weights.items())
    filled = {target.name for _, target in recorder.copies} | {target.name for target in recorder.emptied}
    shapes = {name: Shape.of(watched[name].shape) for name in filled}
    sources = {name: Shape.of(shape) for name, shape in tensors.items()}
    fills = []
    for region, value in (*recorder.fills, *((region, 0.0) for region in recorder.emptied)):
        if region.name in filled and 0 not in region.size:  # a vocabulary that needs no padding has an empty fill
            slot, box, _ = _place(region, shapes[region.name])
            fills.append(Fill(region.name, slot, box, value))
    pieces = (_piece(source, target, sources, shapes) for source, target in recorder.copies if 0 not in source.size)
    return tuple(pieces), tuple(fills)


def _check_parameters(watched: Mapping[str, Tensor], filled: set[str], parameters: set[str], dtype: torch.dtype) -> None:
    missing = sorted(parameters - filled)
    if missing:
        raise ValueError(f"vLLM's parameter {missing[0]} is filled by no tensor of the policy ({len(missing)} in all)")
    for name in sorted(filled):
        # vLLM keeps corrections of experts' scores in fp32, and on a CPU with AMX the biases of small bf16 layers.
        if torch.promote_types(watched[name].dtype, dtype) != watched[name].dtype:
            raise ValueError(f"vLLM keeps {name} in {watched[name].dtype}, which does not hold the {dtype} of the bridge")
        if not watched[name].is_contiguous():
            raise ValueError(f"vLLM's parameter {name} {tuple(watched[name].shape)} is not contiguous in loader format")
