"""RMSNorm for Megatron's local layer spec.

Megatron wraps torch.nn.RMSNorm, whose weight is not marked for sequence parallel: the partial gradients of the tp ranks would
never be summed. Rounds like transformers and vLLM: normalise in fp32, round to the activation's dtype, then scale.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """y = x / rms(x) * weight over the last dimension. weight: [hidden_size] in `config.params_dtype`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.eps = eps
        # finalize_model_grads sums the gradients of marked weights over the tp group.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(x.float(), (x.size(-1),), eps=self.eps)
        return normed.to(x.dtype) * self.weight
