"""Peers: other packages' public functions for the same work, absent if not installed.

None of the cross entropies has an entropy: they are measured for the log-prob alone, which moves the same bytes, and say so.
Several write the gradient over the logits; they get a fresh copy before every repetition, untimed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.candidates import differentiable, peer
from benchmarks.harness.model import Calls, Candidate

NO_ENTROPY = "log-prob only, it has no entropy"
BF16 = torch.bfloat16


def logits_peers(logits: Tensor, target: Tensor, g_logprob: Tensor) -> list[Candidate]:
    """Cross entropies from logits [T, V]."""
    device = logits.device
    overwritten = f"{NO_ENTROPY}; overwrites the logits"

    def calls(function: Callable[[Tensor], Tensor], *, overwrites: bool, close: Callable[[], None] | None = None) -> Calls:
        scratch = logits.clone() if overwrites else logits
        hooks: dict[str, Callable[[], object]] = {"reset": lambda: scratch.copy_(logits)} if overwrites else {}
        if close is not None:
            hooks["close"] = close
        return differentiable(lambda x: (-function(x).float(),), {"dlogits": scratch}, {"logprob": g_logprob}, **hooks)

    def liger(module: ModuleType) -> Calls:
        return calls(lambda x: module.liger_cross_entropy(x, target, reduction="none"), overwrites=True)

    def quack(module: ModuleType) -> Calls:
        return calls(lambda x: module.cross_entropy(x, target, reduction="none"), overwrites=False)

    def transformer_engine(module: ModuleType) -> Calls:
        return calls(lambda x: module.parallel_cross_entropy(x[None], target[None], 0.0, False, None)[0], overwrites=True)

    def megatron_unfused(module: ModuleType) -> Calls:
        _megatron_group(device)
        return calls(
            lambda x: module.vocab_parallel_cross_entropy(x[:, None], target[:, None])[:, 0], overwrites=True, close=_leave_megatron
        )

    def megatron_fused(module: ModuleType) -> Calls:
        group = _megatron_group(device)
        return calls(
            lambda x: module.fused_vocab_parallel_cross_entropy(x[:, None], target[:, None], group)[:, 0],
            overwrites=True,
            close=_leave_megatron,
        )

    core = {"needs_gpu": False, "device": device}
    return [
        peer(
            "Liger cross entropy",
            "liger_kernel",
            "liger_kernel.transformers.functional",
            liger,
            device,
            note=overwritten,
            rounds_to=BF16,
        ),
        peer("QuACK cross entropy", "quack", "quack.cross_entropy", quack, device, note=NO_ENTROPY, rounds_to=BF16),
        peer(
            "TransformerEngine cross entropy",
            "transformer_engine",
            "transformer_engine.pytorch.cross_entropy",
            transformer_engine,
            device,
            note=overwritten,
            rounds_to=BF16,
        ),
        peer(
            "Megatron-core unfused",
            "megatron",
            "megatron.core.tensor_parallel.cross_entropy",
            megatron_unfused,
            note=f"{overwritten} where they are fp32",
            **core,
        ),
        peer(
            "Megatron-core fused",
            "megatron",
            "megatron.core.fusions.fused_cross_entropy",
            megatron_fused,
            note=f"{overwritten} where they are fp32; gradients are bf16; its fusion is torch.compile",
            rounds_to=BF16,
            **core,
        ),
    ]


def linear_peers(hidden: Tensor, weight: Tensor, target: Tensor, g_logprob: Tensor, g_entropy: Tensor) -> list[Candidate]:
    """Cross entropies from hidden states [T, H] and the output weight [V, H]."""
    device = hidden.device
    inputs = {"dhidden": hidden, "dweight": weight}

    def logprob_only(function: Callable[[Tensor, Tensor], Tensor]) -> Calls:
        return differentiable(lambda h, w: (-function(h, w).float(),), inputs, {"logprob": g_logprob})

    def cut_cross_entropy(module: ModuleType) -> Calls:
        return logprob_only(lambda h, w: module.linear_cross_entropy(h, w, target, reduction="none"))

    def liger(module: ModuleType) -> Calls:
        # it has no per-token upstream gradients: its gradient is computed in the forward, for a sum
        ones = torch.ones((), device=device)
        fused = module.liger_fused_linear_cross_entropy
        return differentiable(lambda h, w: (fused(h, w, target, reduction="sum").float(),), inputs, {"summed": ones})

    def verl(module: ModuleType) -> Calls:
        outputs = {"logprob": g_logprob, "entropy": g_entropy}
        return differentiable(lambda h, w: module.linear_cross_entropy(h, w, target, 1.0, "none"), inputs, outputs)

    return [
        peer(
            "cut-cross-entropy",
            "cut_cross_entropy",
            "cut_cross_entropy",
            cut_cross_entropy,
            device,
            note=f"{NO_ENTROPY}; skips gradients below 2^-12 by default",
            rounds_to=BF16,
        ),
        peer(
            "Liger fused linear cross entropy",
            "liger_kernel",
            "liger_kernel.transformers.functional",
            liger,
            device,
            note=f"{NO_ENTROPY}; a sum with upstream gradient 1, gradients made in the forward",
            rounds_to=BF16,
        ),
        peer(
            "verl linear cross entropy",
            "verl",
            "verl.utils.kernel.linear_cross_entropy",
            verl,
            device,
            note="log-prob and entropy",
            rounds_to=BF16,
        ),
    ]


def _megatron_group(device: torch.device) -> dist.ProcessGroup:
    """A tensor-parallel group of this process alone, which Megatron-core's cross entropies want."""
    from megatron.core import parallel_state

    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    return parallel_state.get_tensor_model_parallel_group()


def _leave_megatron() -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
