"""Memory that vLLM gives back between generations, by its own sleep mode (`rollout.sleep`).

The KV cache is there while requests are answered, the weights from a push until the models train. vLLM keeps the addresses, so
that its CUDA graphs stay right, and brings nothing back but addresses: what the push does not write is put back here, but for the
sampler's state of penalties, bad words and grammars, which no request of megappo has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from megappo.versions import pinned

Sleep = Literal["none", "cache", "all"]


def require_sleep(llm: type, sleep: Sleep) -> None:
    """ValueError where this vLLM cannot give back its cache alone. llm: its class `LLM`."""
    if sleep != "none" and not hasattr(llm, "release_kv_cache_memory"):
        raise ValueError(
            f"rollout.sleep = {sleep}: this vLLM cannot give its cache back; pip install {pinned('vllm')}, or set "
            "rollout.sleep=none"
        )


class VllmMemory:
    """What of an engine's memory is there. llm: a `vllm.LLM`; worker: the worker of this rank. Methods run vLLM's code."""

    def __init__(self, llm: Any, worker: Any, sleep: Sleep) -> None:
        self._llm, self._worker, self._sleep = llm, worker, sleep
        self._asleep: set[str] = set()
        self._saved: list[tuple[Tensor, Tensor]] = []

    @property
    def weights_asleep(self) -> bool:
        return "weights" in self._asleep

    def wake_weights(self) -> None:
        """Before a push. Whatever is no parameter holds what it did; parameters hold anything."""
        if not self.weights_asleep:
            return
        self._llm.wake_up(["weights"])
        with torch.inference_mode():  # in which vLLM makes some of them
            for tensor, value in self._saved:
                tensor.copy_(value)
        self._saved = []
        self._asleep.remove("weights")

    def wake_cache(self) -> None:
        """Before requests are answered; the weights are there. The cache comes back empty: no block of it is known."""
        if "kv_cache" not in self._asleep:
            return
        self._llm.wake_up(["kv_cache"])
        self._asleep.remove("kv_cache")
        with torch.inference_mode():
            for cache in self._worker.model_runner.kv_caches:
                # New pages hold what the trainer left there. A kernel may multiply a masked position with 0, and 0 x NaN is NaN.
                cache.zero_()

    def rest_cache(self) -> None:
        """After requests were answered: nothing of the cache is read again."""
        if self._sleep == "none" or "kv_cache" in self._asleep:
            return
        self._llm.sleep(level=0)  # no request may run
        self._llm.release_kv_cache_memory()
        self._asleep.add("kv_cache")

    def rest_weights(self) -> None:
        """Until the next push."""
        if self._sleep != "all" or self.weights_asleep:
            return
        # vLLM itself saves buffers, but not the tensors that its layers hold without having registered them.
        self._saved = [(tensor, tensor.to("cpu", copy=True)) for tensor in unregistered_tensors(self._worker)]
        self._llm.sleep(level=2)
        self._asleep |= {"weights", "kv_cache"}


def unregistered_tensors(worker: Any) -> list[Tensor]:
    """Tensors that a worker's model holds beside its parameters, its buffers and the KV cache, one of each storage.

    They are attributes of modules, or of objects of vLLM's that a module owns (its attention, its way to multiply).
    """
    model = worker.get_model()
    owned = (*model.parameters(), *model.buffers(), *worker.model_runner.kv_caches)
    known = {tensor.untyped_storage()._cdata for tensor in owned}
    found: list[Tensor] = []
    seen: dict[int, Any] = {}
    for module in model.modules():
        attributes = {name: value for name, value in vars(module).items() if name not in _REGISTERED}
        for tensor in _tensors_in(attributes, seen):
            storage = tensor.untyped_storage()._cdata
            if storage not in known and tensor.numel() and not tensor.is_meta:
                known.add(storage)
                found.append(tensor)
    return found


_REGISTERED = ("_parameters", "_buffers", "_modules")
_SHARED = ("vllm.config", "vllm.distributed")  # objects of the whole engine, whose memory does not sleep


def _tensors_in(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Depth first, every object once; modules are left to the caller. seen: id -> object, kept so that no other gets its id."""
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item, seen)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, seen)
    elif type(value).__module__.startswith("vllm.") and not type(value).__module__.startswith(_SHARED):
        yield from _tensors_in(getattr(value, "__dict__", {}), seen)
