"""Silences warnings of libraries that state what is meant to be so, before those libraries are imported.

What is absent on a machine is told once by `megappo doctor`, not by every rank at every start. Imports nothing heavy.
"""

from __future__ import annotations

import os
import warnings

_MEANT_TO_BE = (
    # Megatron-core's imports, where neither TransformerEngine nor Apex is installed: the local layers are chosen on purpose.
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    # Megatron-core's TransformerConfig about its own default.
    "full scope is deprecated",
)


def quiet_libraries() -> None:
    """Call before torch is first imported; a level that the user set is kept."""
    # torch's C++ side warns about vLLM's memory binding at every start on a CPU.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for text in _MEANT_TO_BE:
        warnings.filterwarnings("ignore", message=text)
    # Megatron-core calls collectives by names that newer torch versions deprecate.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
