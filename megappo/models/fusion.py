"""Settings that turn on fused kernels of layers in Megatron-core and TransformerEngine, exact up to rounding.

Off on the CPU: Megatron-core's would be compiled at run time, and TransformerEngine needs a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from megappo.models.arch import ModelArch
from megappo.models.implementation import Implementation


def fusion_config(arch: ModelArch, implementation: Implementation, *, on_gpu: bool) -> dict[str, Any]:
    """Arguments of TransformerConfig; empty if the model is not built on a GPU."""
    if not on_gpu:
        return {}
    has_te = implementation == "transformer_engine"
    return {
        # SwiGLU in one kernel, by torch.compile (TORCHDYNAMO_DISABLE=1 runs it unfused): only the product is written, and the
        # backward recomputes the rest from gate and up.
        "bias_activation_fusion": True,
        "moe_permute_fusion": has_te and arch.moe is not None,  # permutes the rows of experts, from TransformerEngine 2.1 on
        # True would let TransformerEngine overwrite main_grad in what it takes for the first micro-batch; only fp8 caches weights.
        "disable_parameter_transpose_cache": has_te,
    }


def accumulate_into_main_grad(model: torch.nn.Module) -> None:
    """Let TransformerEngine add a weight's gradient to its fp32 `main_grad` (from DDP) without a rounded copy in the weight's type.
    The protocol is that of `ops.linear_logprob.main_grad_of`."""
    # Set on the modules: Megatron's switch, `gradient_accumulation_fusion`, would also ask the output layer for Apex's kernel.
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation") and all(p.requires_grad for p in module.parameters(recurse=False)):
            setattr(module, "fuse_wgrad_accumulation", True)
