"""Private functions of vLLM that the bridge depends on, in one place: the steps of vLLM's layer-by-layer reload
(`model_executor/model_loader/reload`). A layer's parameters return to the checkpoint loader's format, are filled, processed by its
kernel and copied into the engine's storage. `reload_api` refuses a vLLM that changed these steps."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

_WRITTEN_FOR = "0.32"
_STEPS = {
    "initialize": ("initialize_layerwise_reload", ["model"]),  # return all layers to loader format, on the meta device
    "materialize": ("materialize_layer", ["layer", "info"]),  # allocate a layer's meta tensors
    "process": ("_layerwise_process", ["layer", "info"]),  # run the layer's kernel preparation, and copy into live storage
    "restore": ("_place_kernel_tensors", ["layer", "info"]),  # restore the live tensors unchanged
    "finalize": ("finalize_layerwise_processing", ["model", "model_config"]),  # finish the remaining layers, attention last
    "info": ("get_layerwise_info", ["layer"]),
    "original_loader": ("_get_original_loader", ["tensor"]),
    "layer_tensors": ("get_layer_tensors", ["layer"]),
    # True for a layer that is processed after all others: attention, which holds scales and no weights.
    "is_deferred": ("is_deferred_attention_layer", ["layer"]),
}
"""Our name of a step -> vLLM's function, and its arguments."""
_INFO_FIELDS = {"kernel_tensors", "loaded_weights", "restore_device", "restore_metadata"}


def reload_api() -> SimpleNamespace:
    """Return vLLM's steps of a reload by the names in `_STEPS`; `info(layer)` has `can_load()`, `kernel_tensors` and `reset()`.
    RuntimeError if the installed vLLM lacks a step or gives it other arguments."""
    import vllm
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

    problems, steps = [], {}
    for step, (name, parameters) in _STEPS.items():
        steps[step] = function = getattr(layerwise, name, None)
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
    return SimpleNamespace(**steps)
