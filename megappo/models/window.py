"""Sliding-window attention as a Hugging Face config.json states it: how far back tokens see, and in which layers.

The families state it differently: Mistral gives one window for all layers, Qwen switches it on and names the first layer that has
it, or every layer in `layer_types`. Reads JSON only; the mask is `attention.band`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULT_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096, "qwen3_moe": 4096}
_SWITCHED = ("qwen2", "qwen3", "qwen3_moe")
"""Families whose window holds only where use_sliding_window is true."""
_BY_LAYER = ("qwen2", "qwen3")
# max_window_layers of these: the layers below it see everything.
_DEFAULT_FIRST_LAYER = 28


def read_window(config: Mapping[str, Any], family: str, num_layers: int, max_positions: int) -> tuple[int | None, tuple[bool, ...]]:
    """(tokens that a token sees, itself included; for every layer whether that holds there); (None, ()) where all layers see all.

    A window of max_positions or more hides nothing and counts as none. ValueError where the config contradicts itself, or where
    transformers and vLLM read it differently: the policy would be another model in the rollout.
    """
    window = config.get("sliding_window", _DEFAULT_WINDOW.get(family))
    if family in _SWITCHED and not config.get("use_sliding_window", False):
        window = None
    if window is None:
        if family in _BY_LAYER and _SLIDING in (config.get("layer_types") or ()):
            raise ValueError(f"layer_types has {_SLIDING}, but sliding_window is null or use_sliding_window is false; set both")
        return None, ()
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ValueError(f"sliding_window {window!r}: a positive integer is needed, or null for none")
    if window >= max_positions:
        return None, ()
    if family == "llama":
        raise ValueError(f"sliding_window {window}: llama models have no sliding attention; set it to null")
    layers = _sliding_layers(config, family, num_layers, window)
    return (window, layers) if any(layers) else (None, ())


def _sliding_layers(config: Mapping[str, Any], family: str, num_layers: int, window: int) -> tuple[bool, ...]:
    """For every layer whether it has the window."""
    kinds = config.get("layer_types")
    if kinds and family in _BY_LAYER:
        unknown = sorted(set(kinds) - {_FULL, _SLIDING})
        if unknown:
            raise ValueError(f"layer_types has {unknown[0]!r}, which is not supported; supported are {_FULL} and {_SLIDING}")
        if len(kinds) != num_layers:
            raise ValueError(f"layer_types has {len(kinds)} entries for num_hidden_layers {num_layers}")
        return tuple(kind == _SLIDING for kind in kinds)
    if kinds and set(kinds) != {_SLIDING}:
        readings = f"transformers' {family} has the window in every layer, vLLM in the named ones"
        raise ValueError(f"sliding_window {window} with layer_types: {readings}; set one of them to null")
    first = config.get("max_window_layers", _DEFAULT_FIRST_LAYER) if family in _BY_LAYER else 0
    return tuple(layer >= first for layer in range(num_layers))
