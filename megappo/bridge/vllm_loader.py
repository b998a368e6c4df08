"""Writes the rectangles of a plan into a live vLLM model, module by module. A module's first rectangle returns its parameters to
loader format; after its last, vLLM's own processing packs them for its kernels and copies them into the storage that the engine and
its CUDA graphs use. Packed CPU weights and quantised layers are no special case."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megappo.bridge.destination import Destination, Fill, Inspect, Land, Move, module_of
from megappo.bridge.vllm_layout import record_destination
from megappo.bridge.vllm_reload import reload_api
from megappo.models.pieces import rectangle


class VllmReceiver:
    """The engine's end of the bridge on one rank (see `destination.WeightReceiver`). worker: vLLM's in-process worker."""

    def __init__(self, worker: Any, dtype: torch.dtype) -> None:
        self._api = reload_api()
        self._worker = worker
        # By vLLM's accessor: the runner's own attribute may be a wrapper that captures CUDA graphs.
        self._model: torch.nn.Module = worker.get_model()
        with lora_layers_apart(self._model):
            self._modules = dict(self._model.named_modules())
        self._dtype = dtype
        self._destination: Destination | None = None

    def describe(self, tensors: Mapping[str, tuple[int, ...]]) -> Destination:
        with self._vllm_config(), lora_layers_apart(self._model):
            self._destination = record_destination(self._model, self._api, tensors, self._dtype)
        for name in self._destination.shapes:
            if self._api.is_deferred(self._modules[module_of(name)]):
                raise ValueError(
                    f"vLLM loads {name} into an attention layer after all others; the bridge does not transfer such scales"
                )
        return self._destination

    @contextlib.contextmanager
    def session(self, moves: Sequence[Move], inspect: Inspect | None) -> Iterator[Land]:
        assert self._destination is not None, "describe() comes before the first session"
        with self._vllm_config(), torch.no_grad(), lora_layers_apart(self._model):
            self._api.initialize(self._model)
            landing = _Landing(self, moves, self._destination, inspect)
            try:
                yield landing.land
            except BaseException:
                self._close_all()  # for another session, if the fault was another rank's
                raise
            # Before `finalize`, which would process modules that are filled in part.
            landing.check_finished()
            self._restore_untouched({module_of(name) for name in self._destination.shapes})
            self._api.finalize(self._model, self._worker.model_config)

    def _close_all(self) -> None:
        """Put the engine's tensors back, whatever they hold."""
        for layer in self._modules.values():
            info = self._api.info(layer)
            if info.can_load():
                self._api.restore(layer, info)
            info.reset()

    def open_module(self, name: str, fills: Sequence[Fill]) -> None:
        """Give the module loader-format parameters and set its constants."""
        layer = self._modules[name]
        self._api.materialize(layer, self._api.info(layer))
        for fill in fills:
            box = fill.box
            rectangle(self.parameter(fill.target), fill.slot, box.r0, box.c0, box.rows, box.cols).fill_(fill.value)

    def parameter(self, target: str) -> Tensor:
        module, _, name = target.rpartition(".")
        return getattr(self._modules[module], name).data

    def close_module(self, name: str) -> None:
        """Let vLLM process the module, after its last rectangle."""
        layer = self._modules[name]
        method = getattr(layer, "quant_method", None)
        if self._worker.device.type == "cpu" and method is not None and getattr(method, "moe_kernel", None) is not None:
            # vLLM 0.32 on a CPU prepacks experts only if there is no kernel yet: with the old one a reload leaves garbage.
            method.moe_kernel = None
        self._api.process(layer, self._api.info(layer))

    def _restore_untouched(self, landed: set[str]) -> None:
        """Restore live tensors of modules that received nothing; process those again that share a landed parameter."""
        untouched = []
        for layer in self._modules.values():
            info = self._api.info(layer)
            if info.can_load() and not self._api.is_deferred(layer):
                # Rotary tables, for example: vLLM would warn about each that nothing was loaded.
                self._api.restore(layer, info)
                info.reset()
                untouched.append(layer)
        renewed = {id(parameter) for name in landed for parameter in self._modules[name].parameters(recurse=False)}
        # Tied output layers: on a CPU they multiply with a packed copy of the embedding, which vLLM 0.32 does not renew.
        for layer in untouched:
            if any(id(parameter) in renewed for parameter in layer.parameters(recurse=False)):
                layer.quant_method.process_weights_after_loading(layer)

    def _vllm_config(self) -> contextlib.AbstractContextManager:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._worker.vllm_config)


class _Landing:
    """State of one session: the open modules, and how many rectangles each still expects."""

    def __init__(self, receiver: VllmReceiver, moves: Sequence[Move], destination: Destination, inspect: Inspect | None) -> None:
        self._receiver = receiver
        self._inspect = inspect
        self._expected = Counter(module_of(move.target) for move in moves)
        self._parameters: dict[str, list[str]] = defaultdict(list)
        for name in destination.shapes:
            self._parameters[module_of(name)].append(name)
        self._fills: dict[str, list[Fill]] = defaultdict(list)
        for fill in destination.fills:
            self._fills[module_of(fill.target)].append(fill)
        self._open: dict[str, dict[str, Tensor]] = {}
        for module in self._parameters:  # a rank whose part of the vocabulary is all padding receives nothing
            if not self._expected[module]:
                self._begin(module)
                self._end(module)

    def land(self, move: Move, values: Tensor) -> None:
        module = module_of(move.target)
        if module not in self._open:
            self._begin(module)
        target = self._open[module][move.target]
        rectangle(target, move.d_slot, move.d_row, move.d_col, move.rows, move.cols).copy_(values)
        self._expected[module] -= 1
        if self._expected[module] == 0:
            self._end(module)

    def _begin(self, module: str) -> None:
        self._receiver.open_module(module, self._fills[module])
        self._open[module] = {name: self._receiver.parameter(name) for name in self._parameters[module]}

    def _end(self, module: str) -> None:
        if self._inspect is not None:
            for name, tensor in self._open[module].items():
                self._inspect(name, tensor)
        self._receiver.close_module(module)
        del self._open[module]

    def check_finished(self) -> None:
        missing = {module: count for module, count in self._expected.items() if count}
        if missing:
            module, count = next(iter(missing.items()))
            raise RuntimeError(
                f"weight transfer ended with {count} rectangles of {module} missing ({len(missing)} modules incomplete)"
            )


@contextlib.contextmanager
def lora_layers_apart(model: torch.nn.Module) -> Iterator[None]:
    """Put the layers that vLLM wraps for adapters back in their places, under the names that its loader knows."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)
