"""Keep Megatron-core off the GPU while it builds a model on the meta device. Patches it, like `cpu.py`, but temporarily.

Megatron-core's modules name the GPU in a few places regardless of the requested device: `.cuda()` on the second copy of a tied
embedding, device=current_device() for the counts of a router, a stream for the dispatcher of tokens. On a meta tensor the first
is an error; the others open GPU 0 for a plan that only counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.overrides import TorchFunctionMode


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
