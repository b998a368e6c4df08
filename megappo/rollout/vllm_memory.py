"""Memory that vLLM releases between generations, by its own sleep mode (`rollout.sleep`). The KV cache exists while requests are
answered, the weights from a push until the models train. Addresses stay, so CUDA graphs stay valid; contents do not. Tensors that
no push writes are saved here, except the sampler's state of penalties, bad words and grammars, which megappo never uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from megappo.runtime.versions import pinned

Sleep = Literal["none", "cache", "all"]


def require_sleep(llm: type, sleep: Sleep) -> None:
    """Raise ValueError if this vLLM cannot release its cache alone. llm: its class `LLM`."""
    if sleep != "none" and not hasattr(llm, "release_kv_cache_memory"):
        raise ValueError(
            f"rollout.sleep = {sleep}: this vLLM cannot give its cache back; pip install {pinned('vllm')}, or set "
            "rollout.sleep=none"
        )


class VllmMemory:
    """Memory of an engine, asleep or awake. llm: a `vllm.LLM`. worker: of this rank."""

    def __init__(self, llm: Any, worker: Any, sleep: Sleep) -> None:
        self._llm, self._worker, self._sleep = llm, worker, sleep
        self._asleep: set[str] = set()
        self._saved: list[tuple[Tensor, Tensor]] = []

    @property
    def weights_asleep(self) -> bool:
        return "weights" in self._asleep

    def wake_weights(self) -> None:
        """Wake the weights for a push. Parameters are then undefined; all other tensors are restored."""
        if not self.weights_asleep:
            return
        self._llm.wake_up(["weights"])
        with torch.inference_mode():  # vLLM creates some of them in it, and only there may they be written
            for tensor, value in self._saved:
                tensor.copy_(value)
        self._saved = []
        self._asleep.remove("weights")

    def wake_cache(self) -> None:
        """Wake the KV cache, zeroed, before requests are answered. The weights must be awake."""
        if "kv_cache" not in self._asleep:
            return
        self._llm.wake_up(["kv_cache"])
        self._asleep.remove("kv_cache")
        with torch.inference_mode():
            for cache in self._worker.model_runner.kv_caches:
                # New pages hold data of the trainer. A kernel may multiply a masked position by 0, and 0 x NaN is NaN.
                cache.zero_()

    def sleep_cache(self) -> None:
        """Release the KV cache, after requests were answered."""
        if self._sleep == "none" or "kv_cache" in self._asleep:
            return
        self._llm.sleep(level=0)  # no request may run
        self._llm.release_kv_cache_memory()
        self._asleep.add("kv_cache")

    def sleep_weights(self) -> None:
        """Release the weights and the KV cache until the next push."""
        if self._sleep != "all" or self.weights_asleep:
            return
        # vLLM saves registered buffers, but no other tensors of its layers.
        self._saved = [(tensor, tensor.to("cpu", copy=True)) for tensor in unregistered_tensors(self._worker)]
        self._llm.sleep(level=2)
        self._asleep |= {"weights", "kv_cache"}


def unregistered_tensors(worker: Any) -> list[Tensor]:
    """Return tensors of a worker's model besides parameters, buffers and KV cache, one per storage: attributes of modules, or of
    vLLM objects that a module owns (attention backend, linear method)."""
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
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return
    # Keeps the object alive, so that its id stays unique
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
