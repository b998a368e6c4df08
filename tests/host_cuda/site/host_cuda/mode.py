"""Every operation on CUDA tensors computes on CPU views of the same bytes, in the order of the current stream.

What torch does without a kernel (allocation, views, copies between host and device) stays torch's own CUDA code. As on a GPU, an
operation refuses tensors of another device; a CPU tensor may be a number (0-dim) or an index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from host_cuda import collectives, kernels, runtime

# No kernel runs in these: they allocate, or change a tensor's description.
METADATA = {
    "empty",
    "empty_strided",
    "empty_like",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "set_",
    "resize_",
    "resize_as_",
    "_resize_output_",
    "_unsafe_view",
    "detach_",
    "squeeze_",
    "unsqueeze_",
    "transpose_",
    "t_",
    "swapaxes_",
    "as_strided_",
}
# Besides those that return numbers, these make the host wait: the sizes of their results depend on the values, unless given.
HOST_WAITS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave"}
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
CPU = torch.device("cpu")
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


@dataclass(frozen=True)
class Rule:
    """Facts about an operation from its schema."""

    name: str
    compute: Callable[..., Any]
    is_collective: bool
    is_composite: bool
    is_metadata: bool
    is_copy: bool
    is_random: bool
    is_launch: bool
    written: tuple[str, ...]
    custom: Callable[..., Any] | None


def enter() -> None:
    """In this thread, for good."""
    HostDevice().__enter__()


def print_tensors() -> None:
    """torch leaves all modes where it formats a tensor, which computes."""
    text_of = torch._tensor_str._tensor_str

    def text_on_the_device(tensor: Tensor, indent: int) -> str:
        with HostDevice():
            return text_of(tensor, indent)

    torch._tensor_str._tensor_str = text_on_the_device


class HostDevice(TorchDispatchMode):
    """The mode; see the module."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(not issubclass(kind, torch.nn.Parameter) and kind is not Tensor for kind in types):
            return NotImplemented  # fake tensors and their like know what to do
        flat, spec = _flattened(args, kwargs)
        on_device = [x for x in flat if isinstance(x, Tensor) and x.is_cuda]
        device = on_device[0].device if on_device else _cuda_device(kwargs.get("device"))
        if device is None:
            return func(*args, **kwargs)
        rule = rule_of(func)
        if rule.is_collective:
            return collectives.run(func, args, kwargs)
        if rule.is_composite:  # where autograd is off, these arrive whole
            with self:
                return func.decompose(*args, **kwargs)
        if rule.is_metadata:
            return func(*args, **kwargs)
        if rule.is_copy:
            return _copy(self, func, rule, args, kwargs)
        if rule.custom is not None:
            with self:
                return rule.custom(*args, **kwargs)
        _refuse_mixed_devices(rule, args, kwargs, flat)
        if rule.is_launch:
            with self:  # one that is written in Python comes back with torch's operations
                return func.redispatch(CUDA, *args, **kwargs)
        return compute(rule, func, args, kwargs, flat, spec, device)


def _is_launch(func) -> bool:
    """A library's operation that has a CUDA kernel only: its launch tells, as that of any kernel that nothing runs."""
    has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    return func.namespace != "aten" and has("CUDA") and not (has("CPU") or has("CompositeExplicitAutograd"))


@cache
def rule_of(func) -> Rule:
    schema = func._schema
    namespace, name = schema.name.split("::")
    aliases = [a.alias_info for a in schema.arguments if a.alias_info is not None]
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    is_view = bool(aliases) and not written
    run = func
    if namespace == "aten":
        run = kernels.WRITTEN_OUT.get(f"{name}.{schema.overload_name}", kernels.WRITTEN_OUT.get(name, func))
    definition = torch._library.custom_ops.OPDEFS.get(schema.name)
    custom = None
    if definition is not None:
        # What torch would run for a CUDA tensor, without the dispatcher, which would compute on the CPU's behalf.
        custom = definition._backend_fns.get("cuda") or definition._backend_fns.get(None) or definition._init_fn
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return Rule(
        name,
        run,
        is_collective=namespace == "c10d",
        is_composite=composite and name not in METADATA,
        is_metadata=is_view or name in METADATA,
        is_copy=name in ("copy_", "_to_copy", "_foreach_copy_"),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        is_launch=run is func and custom is None and _is_launch(func),
        written=written,
        custom=custom,
    )


def compute(rule: Rule, func, args, kwargs, flat, spec, device: torch.device) -> Any:
    """The operation as a kernel of the current stream."""
    stream = runtime.current_stream(device.index)
    written = set()
    if rule.written:
        named = tree_leaves([_argument(func, args, kwargs, name) for name in rule.written])
        written = {id(x) for x in named if isinstance(x, Tensor)}
    ranges: list[int] = []
    for x in flat:
        if isinstance(x, Tensor) and x.is_cuda:
            ranges += (*extent(x), id(x) in written)
    runtime.begin(device.index, stream, rule.name, ranges)
    on_host = [_on_host(x) for x in flat]
    host_args, host_kwargs = _restored(on_host, spec, args, kwargs)
    if "pin_memory" in host_kwargs:
        host_kwargs["pin_memory"] = None
    generator = next((x for x in flat if isinstance(x, torch.Generator)), None)
    if rule.is_random:
        out = _drawn(rule.compute, host_args, host_kwargs, generator, device)
    else:
        out = rule.compute(*host_args, **host_kwargs)
    same = {id(host): x for host, x in zip(on_host, flat) if isinstance(host, Tensor) and isinstance(x, Tensor)}
    for host, x in zip(on_host, flat) if written else ():
        if id(x) in written and host is not x and host.shape != x.shape:
            x.resize_(host.shape)  # an out= that was empty
            host_view(x).copy_(host)
    results = [out] if isinstance(out, Tensor) else tree_leaves(out)
    depends = rule.name in HOST_WAITS and _argument(func, args, kwargs, "output_size") is None
    if depends or _counts_a_mask(rule, args) or any(not isinstance(x, Tensor) and x is not None for x in results):
        runtime.wait(device.index, stream)
    made: list[int] = []

    def back(x: Tensor) -> Tensor:
        if id(x) in same:
            return same[id(x)]
        result = to_device(x, device)
        made.extend((*extent(result), 1))
        return result

    out = back(out) if isinstance(out, Tensor) else tree_map_only(Tensor, back, out)
    if made:
        runtime.begin(device.index, stream, rule.name, made)
    return out


def _flattened(args: tuple, kwargs: dict[str, Any]) -> tuple[list, Any]:
    """(leaves, structure): None if nothing is nested, as in most calls."""
    flat = [*args, *kwargs.values()]  # torch's general way takes a third of an operation's time
    return tree_flatten((args, kwargs)) if any(isinstance(x, (list, tuple, dict)) for x in flat) else (flat, None)


def _restored(flat: list, spec: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """`_flattened` undone, with other leaves."""
    return tree_unflatten(flat, spec) if spec is not None else (flat[: len(args)], dict(zip(kwargs, flat[len(args) :])))


def host_view(t: Tensor) -> Tensor:
    """CPU tensor of the same bytes, shape and strides."""
    storage = t.untyped_storage()
    if storage.nbytes() == 0 or t.numel() == 0:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    same_bytes = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    out = torch.empty(0, dtype=t.dtype)
    out.set_(same_bytes, t.storage_offset(), t.shape, t.stride())
    out = out.conj() if t.is_conj() else out
    return torch._neg_view(out) if t.is_neg() else out


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """CUDA tensor with these numbers and strides, as a kernel writes it."""
    out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    if t.numel():
        host_view(out).copy_(t)
    return out


def extent(t: Tensor) -> tuple[int, int]:
    """(first byte, number of bytes up to the last)"""
    if t.numel() == 0 or t.untyped_storage().nbytes() == 0:
        return 0, 0
    if t.is_contiguous():
        return t.data_ptr(), t.nbytes
    return t.data_ptr(), (1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))) * t.element_size()


def _copy(mode: HostDevice, func, rule: Rule, args, kwargs) -> Any:
    if rule.name == "_foreach_copy_":
        for target, source in zip(*args[:2]):
            with mode:
                target.copy_(source, *args[2:], **kwargs)
        return None
    if rule.name == "_to_copy":
        source, device = args[0], _cuda_device(kwargs.get("device")) or kwargs.get("device") or args[0].device
        asynchronous = kwargs.get("non_blocking", False)
        pinned = bool(kwargs.get("pin_memory")) or (asynchronous and source.is_cuda and torch.device(device).type == "cpu")
        target = torch.empty_like(
            source,
            dtype=kwargs.get("dtype") or source.dtype,
            device=device,
            pin_memory=pinned,
            memory_format=kwargs.get("memory_format") or torch.preserve_format,
        )
    else:
        target, source, asynchronous = args[0], args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    if target.device == source.device:
        flat, spec = tree_flatten(((target, source), {}))
        copy = torch.ops.aten.copy_.default
        return compute(rule_of(copy), copy, (target, source), {}, flat, spec, target.device)
    _copy_across(mode, target, source, asynchronous)
    return target


def _copy_across(mode: HostDevice, target: Tensor, source: Tensor, asynchronous: bool) -> None:
    """By the runtime where the bytes are in one piece; else through the temporaries that torch makes (see Copy.cu)."""
    if target.dtype == source.dtype and target.shape == source.shape and _is_dense(target, source):
        target.copy_(source, non_blocking=asynchronous)
        return
    with mode:  # types are converted where the source is
        packed = source.to(target.dtype).expand(target.shape).contiguous()
    if target.is_contiguous():
        target.copy_(packed, non_blocking=asynchronous)
        return
    landing = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    landing.copy_(packed, non_blocking=asynchronous)
    with mode:
        target.copy_(landing)


def _is_dense(a: Tensor, b: Tensor) -> bool:
    if a.is_conj() or b.is_conj() or a.is_neg() or b.is_neg():
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    return a.stride() == b.stride() and torch._prims_common.is_non_overlapping_and_dense(a)


def _drawn(run, args, kwargs, generator: torch.Generator | None, device: torch.device) -> Any:
    """Random numbers that depend on the CUDA generator's seed and offset, which advances: its state can be saved and set."""
    if generator is None or generator.device.type != "cuda":
        generator = torch.cuda.default_generators[device.index]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + 4)
    before = torch.get_rng_state()
    torch.default_generator.manual_seed((seed + offset * 0x9E3779B97F4A7C15) % 2**63)
    try:
        return run(*args, **kwargs)
    finally:
        torch.set_rng_state(before)


def _on_host(x: Any) -> Any:
    if isinstance(x, Tensor):
        return host_view(x) if x.is_cuda else x
    if isinstance(x, torch.Generator) and x.device.type == "cuda":
        return torch.default_generator
    if isinstance(x, torch.device) and x.type == "cuda":
        return torch.device("cpu")
    return x


def _cuda_device(wanted: Any) -> torch.device | None:
    if wanted is None:
        return None
    device = torch.device(wanted)
    if device.type != "cuda":
        return None
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _argument(func, args, kwargs, name: str) -> Any:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) and not argument.kwarg_only else kwargs.get(name)
    return None


def _counts_a_mask(rule: Rule, args) -> bool:
    """True if an index by a mask looks for its true elements first; one number for all of them is filled in without that."""
    if rule.name not in INDEXES or (len(args) > 2 and isinstance(args[2], Tensor) and args[2].numel() == 1):
        return False
    return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1]))


def _refuse_mixed_devices(rule: Rule, args, kwargs, flat) -> None:
    if rule.name in INDEXES:  # indices may be on the host, the rest not
        flat = tree_leaves((args[0], args[2:], kwargs))
    tensors = [x for x in flat if isinstance(x, Tensor)]
    devices = {x.device for x in tensors if x.is_cuda}
    strangers = [x for x in tensors if not x.is_cuda and x.dim() > 0]
    if devices and (strangers or len(devices) > 1):
        found = " and ".join(sorted(map(str, devices | {x.device for x in strangers})))
        shapes = [tuple(x.shape) for x in strangers]
        raise RuntimeError(f"{rule.name}: Expected all tensors to be on the same device, but found {found} {shapes}")
