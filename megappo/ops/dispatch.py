"""Dispatch of every op to the implementation selected for its device; `implementations.py` lists the implementations.
An op is `torch.ops.megappo.NAME` with a schema, a fake kernel and a reference; `op` registers it. A call runs what is selected
for the device of its first tensor. `kernels: auto` tries cuda, triton, reference on a GPU, and cpp, reference on the CPU; a
named implementation that is missing is an error. The choice holds for the whole process, as roles must compute the same numbers."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor
from torch.library import CustomOpDef

from megappo.ops.implementations import ORDER, Kernels, missing

Watch = Callable[[str, str, Callable[[], Any]], Any]
"""(op, implementation, call) -> the call's result."""


class _Signature(NamedTuple):
    """Arguments of an op: one by one in its schema and in compiled code, some of them as the fields of a record in Python."""

    schema: Callable[..., Any]
    """Stands for the reference in `infer_schema`."""
    positions: tuple[tuple[Callable[..., Any] | None, tuple[int, ...]], ...]
    """(record or None, positions of its fields in the schema) of every argument in Python."""

    @classmethod
    def of(cls, reference: Callable[..., Any], order: Sequence[str]) -> _Signature:
        hints = get_type_hints(reference)
        returns = hints.pop("return")  # NoneType for None, which `infer_schema` does not know
        fields = {name: get_type_hints(kind) if hasattr(kind, "_fields") else {name: kind} for name, kind in hints.items()}
        types = {name: kind for of_record in fields.values() for name, kind in of_record.items()}
        names = tuple(order or types)
        positions = tuple(
            (hints[at] if hasattr(hints[at], "_fields") else None, tuple(map(names.index, fields[at]))) for at in hints
        )

        def schema() -> None:
            """Have the signature below."""

        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=types[name]) for name in names]
        setattr(schema, "__signature__", inspect.Signature(parameters, return_annotation=None if returns is NoneType else returns))
        return cls(schema, positions)

    def flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of the schema's arguments that packs their records for `function`."""
        if all(record is None for record, _ in self.positions):
            return function
        return lambda *args: function(
            *(args[at[0]] if record is None else record(*(args[i] for i in at)) for record, at in self.positions)
        )


class _Selection:
    """The kernels chosen for this process, and the implementation found for each op and device."""

    def __init__(self) -> None:
        self.kernels: Kernels = "auto"
        self.device_type: str | None = None
        self.native = "megappo_native"
        self.watch: Watch | None = None
        self.resolved: dict[tuple[str, str], tuple[str, Callable[..., Any]]] = {}


_selection = _Selection()
_references: dict[str, Callable[..., Any]] = {}
_signatures: dict[str, _Signature] = {}
_files: dict[str, str] = {}
_row_ops: dict[str, str] = {}


def op(reference: Callable[..., Any], *, file: str | None = None, order: Sequence[str] = ()) -> CustomOpDef:
    """Register `reference` as `torch.ops.megappo.<its name>`, functional, with the schema of its annotations. Also a decorator.
    The schema has the fields of an argument that is a NamedTuple, one by one. file: module of ops/ that has the op, for a reference
    in algo/; Python kernels are in files of the same name, with the same arguments. order: names of the schema, which compiled code
    has too, if they are not in the order of the reference's. The caller adds `register_fake` (and `register_autograd`)."""
    return _register(reference, (), file, order)


def mutating_op(*mutates_args: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Like `op`, for a function `NAME_` that writes into the arguments named here and returns nothing."""
    return lambda reference: _register(reference, mutates_args)


def _register(
    reference: Callable[..., Any], mutates_args: tuple[str, ...], file: str | None = None, order: Sequence[str] = ()
) -> CustomOpDef:
    name = reference.__name__.lstrip("_")
    signature = _signatures[name] = _Signature.of(reference, order)
    _references[name] = signature.flat(reference)
    _files[name] = (file or reference.__module__).rpartition(".")[2]

    def run(*args: Any) -> Any:
        chosen, call = _choice(name, args)
        return call(*args) if _selection.watch is None else _selection.watch(name, chosen, lambda: call(*args))

    schema = torch.library.infer_schema(signature.schema, mutates_args=mutates_args)
    return torch.library.custom_op(f"megappo::{name}", run, mutates_args=mutates_args, schema=schema)


def op_around(row_op: str, *mutates_args: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Like `op`, for a reference of torch's own code around the op `row_op`: it runs if this op has no kernel but `row_op` has."""

    def decorate(reference: Callable[..., Any]) -> CustomOpDef:
        _row_ops[reference.__name__] = row_op
        return _register(reference, mutates_args)

    return decorate


def implementation(name: str, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Function that a call of the op with these arguments runs."""
    return _choice(name, args)[1]


def is_reference(name: str, args: tuple[Any, ...]) -> bool:
    """True if a call of the op with these arguments runs its reference."""
    return implementation(name, args) is _references[name]


def _choice(name: str, args: tuple[Any, ...]) -> tuple[str, Callable[..., Any]]:
    first = next(x for x in args if isinstance(x, Tensor))  # its device and type are the call's
    if first.dtype == torch.float64:  # gradient checks only, which hold kernels against the reference
        return "reference", _references[name]
    return _resolve(name, first.device.type)


def selected(device_type: str) -> dict[str, str]:
    """Implementation of each op on this kind of device ("cpu", "cuda"). Raises ValueError if the requested one is missing."""
    return {name: _resolve(name, device_type)[0] for name in sorted(_references)}


def unavailable(device_type: str) -> list[str]:
    """Reasons, one line each, why `auto` cannot take better implementations on this kind of device."""
    if _wanted(device_type) != "auto":
        return []
    reasons = [missing(candidate, device_type) for candidate in ORDER[device_type]]
    # There is a None: nothing is missing for the reference, the last in the order.
    return [reason for reason in reasons[: reasons.index(None)] if reason is not None]


def select(kernels: Kernels, device_type: str | None = None) -> None:
    """Choose the kernels of this process from the next call on; "auto" at the start. Raises ValueError for an unknown name.
    device_type: the run's. A name applies to that kind of device only, and `auto` to others, since a GPU's kernels cannot take
    tensors on the host. "reference" applies to all devices, and so does any name if device_type is None."""
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels = {kernels}: use one of {', '.join(get_args(Kernels))}")
    _selection.kernels, _selection.device_type = kernels, device_type
    _selection.resolved.clear()


@contextmanager
def using(kernels: Kernels, *, native: str | None = None) -> Iterator[None]:
    """Apply `select` to a block. native: another namespace of compiled ops (the tests' build of the CUDA kernels for the CPU)."""
    with _restored():
        _selection.native = native or _selection.native
        select(kernels)
        yield


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Pass every call of an op through `watch` for a block, including calls by other ops and by autograd's threads."""
    before, _selection.watch = _selection.watch, watch
    try:
        yield
    finally:
        _selection.watch = before


@contextmanager
def _restored() -> Iterator[None]:
    # Copies: `select` changes the selection and clears `resolved` in place.
    before = dict(vars(_selection))
    resolved = dict(_selection.resolved)
    try:
        yield
    finally:
        vars(_selection).update(before)
        _selection.resolved.clear()
        _selection.resolved.update(resolved)


def _wanted(device_type: str) -> Kernels:
    applies = _selection.kernels == "reference" or _selection.device_type in (None, device_type)
    return _selection.kernels if applies else "auto"


def _resolve(name: str, device_type: str) -> tuple[str, Callable[..., Any]]:
    key = name, device_type
    if key not in _selection.resolved:
        _selection.resolved[key] = _find(name, device_type)
    return _selection.resolved[key]


def _find(name: str, device_type: str) -> tuple[str, Callable[..., Any]]:
    wanted = _wanted(device_type)
    if device_type not in ORDER:  # "meta", and devices without kernels of ours
        return "reference", _references[name]
    for candidate in ORDER[device_type] if wanted == "auto" else (wanted,):
        reason = missing(candidate, device_type)
        found = None if reason else _lookup(candidate, name)
        # Products around a row op are the reference's code with that op's kernel: reported under both names, below.
        if found is not None and not (candidate == "reference" and name in _row_ops):
            return candidate, found
    if name in _row_ops and not reason:
        row_op = _resolve(_row_ops[name], device_type)[0]
        return "reference" if row_op == "reference" else f"gemm + {row_op}", _references[name]
    raise ValueError(f"kernels = {wanted}: {reason or f'there is no such implementation of {name}'}; use kernels=auto")


def _lookup(candidate: str, name: str) -> Callable[..., Any] | None:
    if candidate == "reference":
        return _references[name]
    if candidate == "triton":
        return _in_python("triton", name)
    # A CUDA kernel that does not cover every call has a Python file that routes the rest; its `usable` decides for this GPU.
    found = _in_python("cuda", name) if candidate == "cuda" else None
    return found or native_op(name)


def _in_python(folder: str, name: str) -> Callable[..., Any] | None:
    # The function NAME in the op's file below ops/<folder>, if there is one that can run here.
    path = f"megappo.ops.{folder}.{_files[name]}"
    if importlib.util.find_spec(path) is None:
        return None
    module = importlib.import_module(path)
    usable: Callable[[], bool] = getattr(module, "usable", lambda: True)
    function = getattr(module, name, None) if usable() else None
    return None if function is None else _signatures[name].flat(function)


def native_op(name: str) -> Callable[..., Any] | None:
    """Compiled op of this name; None if there is none."""
    # The library is loaded by now: `missing` did it.
    return getattr(getattr(torch.ops, _selection.native), name, None)
