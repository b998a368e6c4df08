"""Prepares a process for the libraries before they are imported: environment, order, and silence where they state the intended.

What is absent on a machine is told once by `megappo doctor`, not by every rank at every start. Imports nothing heavy.
"""

from __future__ import annotations

import os
import warnings

from megappo.platform.transformer_engine import look_before_megatron

_MEANT_TO_BE = (
    # Megatron-core's imports, where neither TransformerEngine nor Apex is installed: the local layers are chosen on purpose.
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    # Megatron-core's TransformerConfig about its own default.
    "full scope is deprecated",
    # Megatron-core about selective recomputation, which is asked for, and about experts that etp does not cut.
    "If you are using transformer_engine as the transformer implementation, the core_attn",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
    # Megatron-core's optimizer looks at .grad of its views into the gradient buffer, which is None as it expects.
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)


def quiet_libraries() -> None:
    """Call before torch is first imported; a level that the user set is kept."""
    # torch's C++ side warns about vLLM's memory binding at every start on a CPU.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Megatron-core wants one hardware queue, so that tensor-parallel collectives start before the products that they overlap.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    look_before_megatron()
    for text in _MEANT_TO_BE:
        warnings.filterwarnings("ignore", message=text)
    # Megatron-core calls collectives by names that newer torch versions deprecate.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
