"""PEFT's adapters on transformers' model in fp64 and torch's AdamW: what an engine with adapters is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from megappo.config.role_sections import LoraConfig, OptimizerConfig
from megappo.data.packing import PackedBatch
from megappo.models.lora import is_adapter

PREFIX = "base_model.model."


def noise_of(name: str, shape: tuple[int, ...], scale: float = 0.2) -> Tensor:
    """A start of an adapter's tensor in which nothing is zero, the same for every engine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode()))) * scale


def linear_in_layers(model: Any) -> list[str]:
    """Last names of the linear layers of the decoder's layers."""
    linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and ".layers." in name)
    return sorted({name.rpartition(".")[2] for name in linear})


class Oracle:
    """Model of a checkpoint with adapters, whole and on one rank. tensors: its adapters, and a critic's head, by our names."""

    def __init__(self, path: str, lora: LoraConfig, *, value_head: bool = False) -> None:
        kind = transformers.AutoModelForTokenClassification if value_head else transformers.AutoModelForCausalLM
        more = {"num_labels": 1} if value_head else {}
        # eager: attention with sinks and caps, and experts in fp64.
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        base = kind.from_pretrained(path, dtype=torch.float32, **eager, **more).double()
        base.get_input_embeddings().padding_idx = None
        targets = lora.targets if lora.targets != "all-linear" else linear_in_layers(base)
        settings = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(targets))
        self.model = peft.get_peft_model(base, settings, autocast_adapter_dtype=False).eval()
        self.tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            ours = name.removeprefix(PREFIX).replace(".default.weight", ".weight")
            is_head = value_head and ours == "score.weight"
            parameter.requires_grad_(is_adapter(ours) or is_head)
            if parameter.requires_grad:
                self.tensors[ours] = parameter
                with torch.no_grad():
                    parameter.copy_(noise_of(ours, tuple(parameter.shape)))
        if value_head:
            base.score.bias.data.zero_()

    def rows(self, batch: PackedBatch) -> Tensor:
        """Logits [T, V] or values [T, 1] of every token, each sequence by itself."""
        ends = batch.cu_seqlens.tolist()
        parts = [batch.tokens[start:end] for start, end in zip(ends, ends[1:])]
        return torch.cat([self.model(input_ids=part[None]).logits[0] for part in parts])

    def train(self, loss: Callable[[Tensor], Tensor], batch: PackedBatch, optimizer: OptimizerConfig, steps: int) -> dict[str, Any]:
        """losses, gradients of the first step and adapters after the last."""
        found: dict[str, Any] = {"losses": [], "gradients": None}
        o = optimizer
        adam = torch.optim.AdamW(list(self.tensors.values()), o.lr, o.betas, o.eps, o.weight_decay)
        for _ in range(steps):
            adam.zero_grad()
            value = loss(self.rows(batch))
            value.backward()
            found["losses"].append(float(value.detach()))
            if found["gradients"] is None:
                found["gradients"] = {name: p.grad.clone() for name, p in self.tensors.items() if p.grad is not None}
            adam.step()
        return found | {"parameters": {name: p.detach().clone() for name, p in self.tensors.items()}}


def worst(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Largest difference relative to the largest number of its tensor."""
    assert found.keys() == wanted.keys()
    return max(float((found[n].double() - w).abs().max() / w.abs().max().clamp(min=1e-12)) for n, w in wanted.items())
