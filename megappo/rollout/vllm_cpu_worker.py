"""vLLM's CPU worker with a sleep mode, which vLLM itself has on GPUs only. It really frees memory and fills what comes back with
NaN, so a CPU test runs the GPU's order of sleep, wake-up, push and generation through vLLM's engine, and a read of stale memory
shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.cpu_worker import CPUWorker

from megappo.rollout.vllm_memory import unregistered_tensors

_ANYTHING = 0xFF  # undefined contents: this in every byte is NaN in all float types


class SleepingCpuWorker(CPUWorker):
    """Worker for `vllm.LLM.sleep`, `release_kv_cache_memory` and `wake_up`, with the tags weights and kv_cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given_back: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}

    def sleep(self, level: int = 1) -> None:
        assert level == 2, f"vLLM's sleep of level {level} is not for weights that are pushed"
        self._sleep_saved_buffers = {name: buffer.clone() for name, buffer in self.get_model().named_buffers()}
        self.discard(("weights", "kv_cache"))

    def discard(self, tags: tuple[str, ...]) -> None:
        for tag in tags:
            if tag not in self._given_back:
                storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._tensors(tag)}
                self._given_back[tag] = [(storage, storage.nbytes()) for storage in storages.values()]
                for storage in storages.values():
                    storage.resize_(0)
        if "weights" in tags:
            for module in self.get_model().modules():
                if hasattr(module, "cpu_linear"):
                    setattr(module, "cpu_linear", _asleep)  # held a packed copy of the weight

    def wake_up(self, tags: list[str] | None = None) -> None:
        for tag in tuple(self._given_back) if tags is None else tags:
            for storage, num_bytes in self._given_back.pop(tag):
                storage.resize_(num_bytes)
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_ANYTHING)
            if tag == "weights":
                for name, buffer in self.get_model().named_buffers():
                    buffer.copy_(self._sleep_saved_buffers[name])

    def _tensors(self, tag: str) -> Iterator[Tensor]:
        if tag == "kv_cache":
            yield from self.model_runner.kv_caches
        else:
            yield from (*self.get_model().parameters(), *self.get_model().buffers(), *unregistered_tensors(self))


def _asleep(*args: Any) -> Tensor:
    raise RuntimeError("vLLM multiplies with weights that were given back and not pushed again")
