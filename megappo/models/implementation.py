"""Which transformer layers a run uses: TransformerEngine's, or Megatron-core's own with our norm and attention.

Both have the same parameter names and shapes, so weights and checkpoints are interchangeable. Imports neither library.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

Implementation = Literal["transformer_engine", "local"]


def choose_implementation(requested: Literal["auto", "transformer_engine", "local"], device_type: str) -> Implementation:
    """auto takes TransformerEngine on a GPU where it is importable. ValueError where it is asked for and cannot work."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    if requested == "transformer_engine" and device_type != "cuda":
        raise ValueError("model.impl = transformer_engine: it needs a CUDA device; set model.impl=local, or auto")
    if requested == "transformer_engine" and not installed:
        raise ValueError("model.impl = transformer_engine: it is not installed; pip install 'megappo[gpu]', or set model.impl=auto")
    if requested == "auto":
        return "transformer_engine" if installed and device_type == "cuda" else "local"
    return requested
