"""Writes the rectangles of a plan into a live vLLM model, module by module. A module's first rectangle returns its parameters to
loader format; after its last, vLLM's own processing packs them for its kernels and copies them into the storage that the engine and
its CUDA graphs use. Packed CPU weights and quantised layers are no special case. Importing this module imports vLLM."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from megappo.bridge.destination import Destination, Fill, Inspect, Land, Move, module_of
from megappo.bridge.sync import Route, WeightSource, WeightSync
from megappo.bridge.vllm_layout import record_destination
from megappo.bridge.vllm_reload import reload_api
from megappo.models.pieces import rectangle


@cache
def register() -> None:
    """Let vLLM's workers build a `VllmReceiver` for `weight_transfer_config={"backend": "megappo"}`."""
    WeightTransferEngineFactory.register_engine("megappo", VllmReceiver)


@dataclass
class Ends(WeightTransferInitInfo):
    """What another program gives `LLM.init_weight_transfer_engine`: the arguments of `WeightSync`. Its ranks run vLLM's workers in
    their own processes (`external_launcher`), since neither a policy nor a group can be sent to another."""

    route: Route
    policy: WeightSource | None = None
    group: dist.ProcessGroup | None = None


@dataclass
class Version(WeightTransferUpdateInfo):
    """What it gives `LLM.update_weights`."""

    version: int


class VllmReceiver(WeightTransferEngine[Ends, Version]):
    """The engine's end of the bridge on one rank (`destination.WeightReceiver`), as vLLM's worker builds it for its model. For
    programs that push through vLLM's own methods it is the engine too (`sync.BridgedEngine`)."""

    init_info_cls, update_info_cls = Ends, Version
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._api = reload_api()
        self._modules: dict[str, torch.nn.Module] = {}
        self._destination: Destination | None = None
        self._sync: WeightSync | None = None

    @property
    def receiver(self) -> VllmReceiver:
        return self

    def weights_changing(self) -> None:
        """Do nothing: the caller of vLLM's methods lets no request run from here on, nor after an update that failed."""

    def weights_changed(self, version: int) -> None:
        """Do nothing: that caller resets the prefix cache, as with every backend of vLLM."""

    def init_transfer_engine(self, init_info: Ends) -> None:
        """Plan the transfer. Collective over the group, as are updates; on ranks without vLLM `WeightSync` itself does both."""
        self._sync = WeightSync(init_info.policy, self, init_info.route, self.device, init_info.group)

    def start_weight_update(self) -> None:
        """Do nothing: a push opens the model itself, and closes it after an error too, when vLLM calls no finish."""

    def receive_weights(self, update_info: Version) -> None:
        assert self._sync is not None, "init_weight_transfer_engine() comes before the first update"
        self._sync.push(update_info.version)

    def finish_weight_update(self) -> None:
        """Do nothing: all has landed, and its checksums were compared."""

    def shutdown(self) -> None:
        self._sync = None

    def describe(self, tensors: Mapping[str, tuple[int, ...]]) -> Destination:
        with self._vllm_config(), lora_layers_apart(self.model):
            self._modules = dict(self.model.named_modules())
            self._destination = record_destination(self.model, self._api, tensors, self.model_config.dtype)
        for name in self._destination.shapes:
            if self._api.is_deferred(self._modules[module_of(name)]):
                raise ValueError(
                    f"vLLM loads {name} into an attention layer after all others; the bridge does not transfer such scales"
                )
        return self._destination

    @contextlib.contextmanager
    def session(self, moves: Sequence[Move], inspect: Inspect | None) -> Iterator[Land]:
        assert self._destination is not None, "describe() comes before the first session"
        with self._vllm_config(), torch.no_grad(), lora_layers_apart(self.model):
            self._api.initialize(self.model)
            landing = _Landing(self, moves, self._destination, inspect)
            try:
                yield landing.land
            except BaseException:
                self._close_all()  # for another session, if the fault was another rank's
                raise
            # Before `finalize`, which would process modules that are filled in part.
            landing.check_finished()
            self._restore_untouched({module_of(name) for name in self._destination.shapes})
            self._api.finalize(self.model, self.model_config)

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
        if self.device.type == "cpu" and method is not None and getattr(method, "moe_kernel", None) is not None:
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
        return set_current_vllm_config(self.vllm_config)


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
