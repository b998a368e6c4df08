"""NCCL's place is taken by gloo, and NCCL's rules are kept: what gloo would forgive, here is an error.

A group made for nccl has torch's own names, device types and time limits; only the class behind `ProcessGroupNCCL` is another.
Its collectives refuse CPU tensors and tensors that are not contiguous, compare their operation, number, shapes and types over
all ranks before they start, run on a stream of their own where they are asynchronous, and show their results only once that
stream has been waited for (`work.wait()` makes the current stream wait, not the host).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves, tree_map_only

from host_cuda import runtime

Group = torch._C._distributed_c10d.ProcessGroup
Work = torch._C._distributed_c10d.Work
CallbackWork = torch._C._distributed_c10d.PythonCallbackWork
POINT_TO_POINT = {"send", "recv_", "recv_any_source_"}
# The ranks' tensors may have other shapes.
UNEVEN = {"alltoall_base_", "alltoall_", "allgather_", "gather_", "scatter_", "reduce_scatter_"}
NOTE_BYTES = 192


class HostNccl(dist.ProcessGroupGloo):
    """A gloo backend that is registered for CUDA tensors under NCCL's name."""

    def __init__(self, store, rank: int, size: int, options) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        self.name, self.calls = options.group_name, 0
        # The same gloo, for the copies of the tensors on the host.
        self.on_host = Group(dist.PrefixStore("host_cuda", store), rank, size)
        self.on_host._set_default_backend(Group.BackendType.GLOO)
        self.on_host._register_backend(torch.device("cpu"), Group.BackendType.GLOO, self)
        self._streams: dict[int, torch.cuda.Stream] = {}
        _backends[self.name] = self

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device.index not in self._streams:
            self._streams[device.index] = torch.cuda.Stream(device)
        return self._streams[device.index]

    def same_call(self, note: str) -> None:
        """Raise RuntimeError if the ranks are not at the same call."""
        self.calls += 1
        note = f"{note} as call {self.calls}"
        mine = torch.tensor(list(note.encode()[:NOTE_BYTES].ljust(NOTE_BYTES)), dtype=torch.uint8)
        notes = [torch.empty_like(mine) for _ in range(self.on_host.size())]
        self.on_host.allgather([notes], [mine]).wait()
        texts = [bytes(x.tolist()).decode(errors="replace").strip() for x in notes]
        if len(set(texts)) > 1:
            calls = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise RuntimeError(f"nccl group {self.name}: the ranks are not at the same collective ({calls})")

    def _shutdown(self) -> None:
        _backends.pop(self.name, None)

    abort = _abort = shutdown = _shutdown


HostNccl.Options = dist.ProcessGroupNCCL.Options
_backends: dict[str, HostNccl] = {}  # keeps the Python halves alive


def serve_nccl() -> None:
    """From now on, groups for nccl are made of HostNccl."""
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = HostNccl


def run(func, args, kwargs) -> Any:
    """A collective of c10d on CUDA tensors."""
    return Call(func, args, kwargs).run()


class Call:
    """One collective: checked, staged on the host for gloo, landed on the current stream or on the group's."""

    def __init__(self, func, args, kwargs) -> None:
        names = [argument.name for argument in func._schema.arguments]
        self.func, self.args, self.name = func, (*args, *kwargs.values()), func._schema.name.split("::")[1]
        self.given = {**dict(zip(names, args)), **kwargs}
        self.keywords = tuple(kwargs)
        self.group = Group.unbox(self.given["process_group"])
        self.backend = _backends.get(self.group.group_name)  # None: a group for gloo
        self.outputs, self.inputs = _direction(self.name, self.given)
        self.tensors = [x for x in tree_leaves(self.args) if isinstance(x, Tensor)]
        self.device = next(x.device for x in self.tensors if x.is_cuda)
        self.is_late = self.backend is not None and (self.name in POINT_TO_POINT or self.given.get("async_op", True))
        self.copies: dict[int, Tensor] = {}

    def run(self) -> Any:
        if self.backend is not None:
            _check(self.name, self.tensors, self.backend)
            if self.name not in POINT_TO_POINT:
                self.backend.same_call(_note(self.name, self.given, self.inputs + self.outputs))
        if self.is_late:
            self.own_stream.wait_stream(torch.cuda.current_stream(self.device))
        runtime.begin(self.device.index, self.stream, self.name, _ranges(self.inputs, 0))
        self.gloo = self.start()
        if self.name in POINT_TO_POINT:  # the peer may come to it after other work of ours
            return self.work(self.land).boxed()
        try:
            self.land()
        except RuntimeError as error:
            if "AVG" not in str(error):
                raise
            self.gloo = self.start(_boxed_sum())
            self.gloo.wait()
            for x in self.outputs:
                self.copies[id(x)].div_(self.group.size())
            self.land()
        work = self.work(lambda: None).boxed()
        return (self.args[0], work) if len(self.func._schema.returns) == 2 else work

    @property
    def own_stream(self) -> torch.cuda.Stream:
        assert self.backend is not None
        return self.backend.stream(self.device)

    @property
    def stream(self) -> int:
        return self.own_stream.cuda_stream if self.is_late else runtime.current_stream(self.device.index)

    def start(self, reduce_op: Any = None) -> Any:
        """gloo's work on copies of the tensors."""
        from host_cuda.mode import host_view

        def staged(x: Tensor) -> Tensor:
            self.copies[id(x)] = host_view(x).clone() if x.is_cuda else x
            return self.copies[id(x)]

        group = self.backend.on_host if self.backend is not None else self.group
        instead = {id(self.given["process_group"]): group.boxed()}
        if reduce_op is not None:
            instead[id(self.given["reduce_op"])] = reduce_op
        values = [instead.get(id(x), x) for x in tree_map_only(Tensor, staged, self.args)]
        split = len(values) - len(self.keywords)
        result = self.func(*values[:split], **dict(zip(self.keywords, values[split:])))
        return Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)

    def land(self) -> None:
        """Waits for gloo, then writes the results: at once, or when the group's stream is waited for."""
        from host_cuda.mode import host_view

        try:
            self.gloo.wait()
        except RuntimeError as error:
            if self.backend is None or "imed out" not in str(error):
                raise
            limit = f"{self.name} ran past the group's limit of {self.backend.options._timeout}"
            raise dist.DistBackendError(f"nccl group {self.backend.name}: {limit}") from error
        if not self.is_late:
            runtime.begin(self.device.index, self.stream, self.name, _ranges(self.outputs, 1))
        for x in self.outputs:
            if self.is_late:
                runtime.queue_copy(self.device.index, self.stream, x, self.copies[id(x)])
            else:
                host_view(x).copy_(self.copies[id(x)])

    def work(self, finish: Callable[[], None]) -> Any:
        """`wait` makes the current stream wait for the group's. The tensors live until then, as NCCL's work keeps them."""
        held = [self]

        def wait(_: Any) -> bool:
            if held:
                finish()
                if self.is_late:
                    torch.cuda.current_stream(self.device).wait_stream(self.own_stream)
                held.clear()
            return True

        return CallbackWork(wait)


def _direction(name: str, given: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """(tensors that are written, tensors that are read)"""
    outputs, inputs = [], []
    for key, value in given.items():
        found = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        if key.startswith("output") or (key == "tensors" and name != "send"):
            outputs += found
        if key.startswith("input") or (key == "tensors" and name not in ("recv_", "recv_any_source_")):
            inputs += found
    return outputs, inputs


def _check(name: str, tensors: list[Tensor], backend: HostNccl) -> None:
    for x in tensors:
        if not x.is_cuda:
            raise ValueError(f"nccl group {backend.name}: {name} on a CPU tensor {tuple(x.shape)}: NCCL takes CUDA tensors")
        if not x.is_contiguous():
            raise ValueError(f"nccl group {backend.name}: {name}: Tensors must be contiguous, and {tuple(x.shape)} is not")
    if len({x.device for x in tensors}) > 1:
        raise ValueError(f"nccl group {backend.name}: {name}: the tensors are on several devices")


def _note(name: str, given: dict[str, Any], tensors: list[Tensor]) -> str:
    tensors = list({id(x): x for x in tensors}.values())  # what is read and written is in both lists
    shapes = "" if name in UNEVEN else " ".join(str(list(x.shape)) for x in tensors[:4])
    root = f" root {given['root_rank']}" if "root_rank" in given else ""
    kinds = sorted({str(x.dtype).removeprefix("torch.") for x in tensors})
    number = "" if name in UNEVEN else f"of {len(tensors)} tensors"
    return " ".join(f"{name}{root} {shapes} {'/'.join(kinds)} {number}".split())


def _ranges(tensors: list[Tensor], written: int) -> list[int]:
    from host_cuda.mode import extent

    return [number for x in tensors if x.is_cuda for number in (*extent(x), written)]


@cache
def _boxed_sum() -> Any:
    """ReduceOp.SUM as the dispatcher hands it on. gloo has no mean, and a boxed ReduceOp cannot be made from Python."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.extend(a for a in args if "ReduceOp" in str(a))
            return func(*args, **(kwargs or {}))

    alone = Group(dist.HashStore(), 0, 1)
    alone._register_backend(torch.device("cpu"), Group.BackendType.GLOO, dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
    with Listen():
        alone.allreduce([torch.zeros(1)], dist.AllreduceOptions()).wait()
    return seen[0]
