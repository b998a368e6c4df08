"""Fused kernels that layers have on a GPU, and what of Megatron-core must be told to use them.

All are exact up to rounding and off on the CPU, where Megatron-core's would be compiled at run time and TransformerEngine is not.
"""

from __future__ import annotations

from typing import Any

import torch

from megappo.models.arch import ModelArch
from megappo.models.implementation import Implementation


def fusion_config(arch: ModelArch, implementation: Implementation, *, on_gpu: bool) -> dict[str, Any]:
    """Arguments of TransformerConfig; empty where the model is not made on a GPU.

    SwiGLU in one kernel, by torch.compile (TORCHDYNAMO_DISABLE=1 runs it unfused): the product alone is written, and the backward
    pass works the rest out again from gate and up. Permutation of the rows of experts: TransformerEngine's, from 2.1 on.
    """
    if not on_gpu:
        return {}
    has_te = implementation == "transformer_engine"
    return {
        "bias_activation_fusion": True,
        "moe_permute_fusion": has_te and arch.moe is not None,
        # TransformerEngine would overwrite main_grad in what it takes for the first micro-batch; only fp8 has anything to cache.
        "disable_parameter_transpose_cache": has_te,
    }


def accumulate_into_main_grad(model: torch.nn.Module) -> None:
    """Let TransformerEngine's products add the gradient of a weight to its `main_grad` (fp32): none in the weight's type is made,
    rounded and added. For weights that DDP gives one.

    Set on the modules: Megatron's switch, `gradient_accumulation_fusion`, would also ask the output layer for Apex's kernel. The
    protocol is that of `ops.linear_logprob.main_grad_of`.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            setattr(module, "fuse_wgrad_accumulation", True)
