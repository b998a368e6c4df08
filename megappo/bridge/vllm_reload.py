"""Private functions of vLLM that the bridge depends on, in one place: the steps of vLLM's layer-by-layer reload
(`model_executor/model_loader/reload`). A layer's parameters return to the checkpoint loader's format, are filled, processed by its
kernel and copied into the engine's storage. `reload_api` refuses a vLLM that changed these steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_WRITTEN_FOR = "0.32"
_SIGNATURES = {
    "initialize_layerwise_reload": ["model"],
    "finalize_layerwise_processing": ["model", "model_config"],
    "get_layerwise_info": ["layer"],
    "_layerwise_process": ["layer", "info"],
    "_place_kernel_tensors": ["layer", "info"],
    "_get_original_loader": ["tensor"],
    "materialize_layer": ["layer", "info"],
    "get_layer_tensors": ["layer"],
    "is_deferred_attention_layer": ["layer"],
}
_INFO_FIELDS = {"kernel_tensors", "loaded_weights", "restore_device", "restore_metadata"}


@dataclass(frozen=True)
class ReloadApi:
    """vLLM's steps of a reload. `info(layer)` has `can_load()`, `kernel_tensors` and `reset()`."""

    initialize: Callable[[Any], None]
    """Return all layers of a model to loader format, on the meta device."""
    finalize: Callable[[Any, Any], None]
    """(model, model_config): finish the remaining layers, attention last."""
    info: Callable[[Any], Any]
    materialize: Callable[[Any, Any], None]
    """(layer, info): allocate a layer's meta tensors."""
    process: Callable[[Any, Any], None]
    """(layer, info): run the layer's kernel preparation and copy into live storage."""
    restore: Callable[[Any, Any], None]
    """(layer, info): restore the live tensors unchanged."""
    original_loader: Callable[[Any], Callable]
    layer_tensors: Callable[[Any], dict[str, Any]]
    is_deferred: Callable[[Any], bool]
    """True for a layer that is processed after all others (attention, which holds scales and no weights)."""


def reload_api() -> ReloadApi:
    """Look up the steps. RuntimeError if the installed vLLM lacks one or gives it other arguments."""
    import vllm
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

    problems = []
    for name, parameters in _SIGNATURES.items():
        function = getattr(layerwise, name, None)
        found = None if function is None else list(inspect.signature(function).parameters)
        if found != parameters:
            problems.append(f"{name}({', '.join(parameters)}) is " + ("gone" if found is None else f"now ({', '.join(found)})"))
    missing = _INFO_FIELDS - set(LayerReloadingInfo.__dataclass_fields__)
    if missing or not hasattr(LayerReloadingInfo, "can_load"):
        problems.append(f"LayerReloadingInfo lacks {sorted(missing) or 'can_load'}")
    if problems:
        raise RuntimeError(
            f"vLLM {vllm.__version__} reloads weights in another way than {_WRITTEN_FOR}, which the bridge is "
            f"written for: {'; '.join(problems)}"
        )
    return ReloadApi(
        initialize=layerwise.initialize_layerwise_reload,
        finalize=layerwise.finalize_layerwise_processing,
        info=layerwise.get_layerwise_info,
        materialize=layerwise.materialize_layer,
        process=layerwise._layerwise_process,
        restore=layerwise._place_kernel_tensors,
        original_loader=layerwise._get_original_loader,
        layer_tensors=layerwise.get_layer_tensors,
        is_deferred=layerwise.is_deferred_attention_layer,
    )
