"""PEFT's adapters on transformers' model in fp64 and torch's AdamW: what an engine with adapters is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

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


def write_noise(engine: Any) -> None:
    """Start an engine's adapters, and a critic's head, with `noise_of`."""
    from megappo.models.pieces import rectangle, sizes_of

    pieces = engine.adapters.pieces()
    sizes = sizes_of(pieces)
    if engine.value_head:
        sizes["score.weight"] = (1, engine.arch.hidden_size)
    parameters = engine.named_parameters()
    position = engine.placement.position_of(torch.distributed.get_rank())
    for piece in (*pieces[position], *(one for one in engine.pieces()[position] if one.hf == "score.weight")):
        whole = noise_of(piece.hf, sizes[piece.hf])
        rows = whole[piece.box.r0 : piece.box.r1, piece.box.c0 : piece.box.c1]
        place = piece.slot, piece.row, piece.col, piece.box.rows, piece.box.cols
        rectangle(parameters[piece.local], *place).copy_(rows)


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
        base: Any = kind.from_pretrained(path, dtype=torch.float32, **eager, **more).double()
        base.get_input_embeddings().padding_idx = None
        targets = lora.targets if lora.targets != "all-linear" else linear_in_layers(base)
        settings = peft.LoraConfig(r=lora.rank, lora_alpha=cast(Any, lora.alpha), target_modules=list(targets))
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


class MergedOracle(Oracle):
    """PEFT's definition on a model with experts, of which PEFT itself adapts some kinds alone: a plain model in fp64 computes with
    W + alpha / rank * B A in place of every linear weight of its layers and of every expert, and autograd goes through the sum.
    parts: parameter of all experts -> kinds of the checkpoint's modules in it. prefix: the checkpoint's name of `mlp`. turned: the
    parameters of experts are those of the checkpoint, [experts, in, out]."""

    PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

    def __init__(
        self,
        path: str,
        lora: LoraConfig,
        *,
        value_head: bool = False,
        parts: Mapping[str, tuple[str, ...]] = PARTS,
        prefix: str = "mlp",
        turned: bool = False,
    ) -> None:
        kind = transformers.AutoModelForTokenClassification if value_head else transformers.AutoModelForCausalLM
        more = {"num_labels": 1} if value_head else {}
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.model: Any = kind.from_pretrained(path, dtype=torch.float32, **eager, **more).double().eval().requires_grad_(False)
        self.scale, self.tensors, self.turned = lora.alpha / lora.rank, {}, turned
        parts = {kind: (kind,) for kind in parts} if turned else parts
        # Parameter -> its blocks of rows by expert, each with the name of its module.
        self.blocks: dict[str, list[list[str]]] = {}
        named = [(name, module) for name, module in self.model.named_modules() if isinstance(module, torch.nn.Linear)]
        linear = {f"{name}.weight" for name, module in named if module.out_features > 1}  # a gate of shared experts has one
        for name, parameter in self.model.named_parameters():
            stem, _, last = name.rpartition(".experts.")
            if name in linear and ".layers." in name:
                self.blocks[name] = [[name.removesuffix(".weight")]]
            elif stem and last in parts:
                experts = f"{stem.removesuffix('mlp')}{prefix}.experts"
                self.blocks[name] = [[f"{experts}.{number}.{part}" for part in parts[last]] for number in range(len(parameter))]
            elif value_head and name == "score.weight":
                self.tensors[name] = noise_of(name, tuple(parameter.shape)).double().requires_grad_()
            columns, rows = parameter.size(-1), parameter.size(-2) if parameter.dim() > 1 else 0
            if turned and stem:
                rows, columns = columns, rows
            for modules in self.blocks.get(name, ()):
                for module in modules:
                    for tensor, shape in (("A", (lora.rank, columns)), ("B", (rows // len(modules), lora.rank))):
                        ours = f"{module}.lora_{tensor}.weight"
                        self.tensors[ours] = noise_of(ours, shape).double().requires_grad_()
        if value_head:
            self.model.score.bias.data.zero_()

    def merged(self, name: str) -> Tensor:
        """The merged parameter of this name in transformers' class."""
        changes = [
            torch.cat([self.tensors[f"{m}.lora_B.weight"] @ self.tensors[f"{m}.lora_A.weight"] for m in modules])
            for modules in self.blocks[name]
        ]
        weight = self.model.get_parameter(name)
        if weight.dim() == 2:
            return weight + self.scale * changes[0]
        return weight + self.scale * (torch.stack(changes).mT if self.turned else torch.stack(changes))

    def weights(self) -> dict[str, Tensor]:
        """Module -> its merged weight."""
        found = {}
        for name, blocks in self.blocks.items():
            whole = self.merged(name).detach()
            for part, modules in zip(whole if whole.dim() == 3 else [whole], blocks):
                found |= dict(zip(modules, part.chunk(len(modules))))
        return found

    def logits(self, ids: Tensor) -> Tensor:
        """[T, V], or values [T, 1]. ids: [T]."""
        weights = {name: self.merged(name) for name in self.blocks} | {n: t for n, t in self.tensors.items() if n == "score.weight"}
        return torch.func.functional_call(self.model, weights, kwargs={"input_ids": ids[None], "use_cache": False}).logits[0]

    def rows(self, batch: PackedBatch) -> Tensor:
        ends = batch.cu_seqlens.tolist()
        return torch.cat([self.logits(batch.tokens[start:end]) for start, end in zip(ends, ends[1:])])


def worst(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Largest difference relative to the largest number of its tensor."""
    assert found.keys() == wanted.keys()
    return max(float((found[n].double() - w).abs().max() / w.abs().max().clamp(min=1e-12)) for n, w in wanted.items())
