"""Megatron model of any rank of any world, built on the meta device in one process: shapes without memory or peers.

Megatron-core builds its modules by the sizes of process groups and the rank in them. A fake process group (of torch's own tests)
stands for a world of any size, so the parameters counted are those of the model that the rank would build.

Keep Megatron-core off the GPU while it builds a model on the meta device. Patches it, like `cpu.py`, but temporarily.

Megatron-core's modules name the GPU in a few places regardless of the requested device: `.cuda()` on the second copy of a tied
embedding, device=current_device() for the counts of a router, a stream for the dispatcher of tokens. On a meta tensor the first
is an error; the others open GPU 0 for a plan that only counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.overrides import TorchFunctionMode

from megappo.models.arch import ModelArch
from megappo.models.build import build_model
from megappo.models.gpt import PackedModel, named_parameters
from megappo.models.implementation import Implementation
from megappo.parallel import cpu_patches
from megappo.parallel.groups import build_groups
from megappo.parallel.layout import ParallelLayout


@contextmanager
def only_meta() -> Iterator[None]:
    """Create every tensor on the meta device, and keep it there."""
    stream = MoEAlltoAllTokenDispatcher.cuda_dtoh_stream
    # Anything but None: the constructor then creates no stream. Restored below, for models that need one.
    setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", only_meta)
    try:
        with _StayOnMeta(), torch.device("meta"):
            yield
    finally:
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stream


class _StayOnMeta(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:  # an error on a meta tensor
            return args[0]
        named = dict(kwargs or {})
        if named.get("device") is not None:
            named["device"] = "meta"
        return func(*args, **named)


@contextmanager
def meta_model(
    arch: ModelArch,
    layout: ParallelLayout,
    rank: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    value_head: bool = False,
    implementation: Implementation = "local",
) -> Iterator[Sequence[PackedModel]]:
    """Build the model chunks of `rank` on the meta device. ValueError if the layout does not fit the architecture.

    Needs a process without a default process group; the fake one is removed afterwards. Does not touch a GPU.
    """
    # Imported here: a private module of torch, used nowhere else.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    cpu_patches.install()
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        groups = build_groups(layout)
        with only_meta():
            chunks = build_model(
                arch, groups, dtype=dtype, value_head=value_head, implementation=implementation, device=torch.device("meta")
            )
        yield chunks
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch's prints the fake rank before every line of a traceback, and stays


def parameters_of_rank(
    arch: ModelArch, layout: ParallelLayout, rank: int, *, dtype: torch.dtype = torch.bfloat16, value_head: bool = False
) -> dict[str, torch.nn.Parameter]:
    """Canonical name (`naming.py`) -> parameter on the meta device, of a policy or (value_head) a critic."""
    with meta_model(arch, layout, rank, dtype=dtype, value_head=value_head) as chunks:
        return named_parameters(chunks)
