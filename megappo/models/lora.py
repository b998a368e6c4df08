"""Low-rank adapters (LoRA, arXiv:2106.09685): their modules, shapes and start, and a weight with its adapter added.

An adapted module computes `x W^T + scaling * (x A^T) B^T` with A [rank, in] and B [out, rank] trained in fp32, W frozen. Modules
have Hugging Face names, `model.layers.0.self_attn.q_proj`.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.config.role_sections import LoraConfig
from megappo.models.arch import ModelArch, MoeArch
from megappo.models.int8_linear import Quantised
from megappo.models.pieces import rectangle
from megappo.models.weight_map import VALUE_HEAD, hf_tensors
from megappo.models.weight_rules import Shape

ADAPTER_A, ADAPTER_B = ".lora_A.weight", ".lora_B.weight"
"""Endings of the names of an adapter's tensors, behind the name of its module."""
_LAYER = re.compile(r"\.layers\.\d+\.")
_EXPERTS = ".experts."
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


def adapted_modules(tensors: Mapping[str, Shape], targets: tuple[str, ...] | str) -> dict[str, tuple[int, int]]:
    """Name -> (out, in) of the modules with an adapter, in the order of `tensors` (from `tensors_to_adapt`).
    targets: endings of module names (`q_proj`, `self_attn.q_proj`), or `all-linear`, every linear layer of the decoder's layers,
    those of each expert too, but not what stands beside experts and chooses or weighs them.
    ValueError for a target that matches nothing, with the nearest names, for routers, for some experts of a layer without the
    others, and for experts that a checkpoint holds in one tensor."""
    linear = {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in tensors.items()
        if _LAYER.search(name) and name.endswith(".weight") and len(shape) == 2
    }
    sparse = {name.partition(_EXPERTS)[0] for name in tensors if _EXPERTS in name}
    routers = {name for name in linear if name.rpartition(".")[0] in sparse}
    joined = [name for name in tensors if _EXPERTS in name and expert_of(name) is None]
    # PEFT would apply a target with the name of experts' layers to the experts, even if a shared expert is meant.
    kinds = {name.rpartition(".")[2] for name in (*linear, *joined) if _EXPERTS in name}
    found = {name: size for name, size in linear.items() if name not in routers}
    if not isinstance(targets, str):
        for target in targets:
            if not any(_ends_with(name, target) for name in linear):
                raise ValueError(f"{target} matches no linear layer; {_nearest(target, linear)}")
        found = {name: size for name, size in linear.items() if any(_ends_with(name, target) for target in targets)}
    elif joined:
        # all-linear would silently leave experts out.
        others = ", ".join(_kinds(name for name in found if name.rpartition(".")[2] not in kinds))
        why = "which have no adapters if one tensor holds them all"
        raise ValueError(f"{min(sparse)} is a layer of experts, {why}; name others: {others}")
    of_experts = {name.rpartition(".")[2] for name in found if _EXPERTS in name}
    others = ", ".join(_kinds(name for name in linear if name not in routers and name.rpartition(".")[2] not in kinds - of_experts))
    for name in found:
        kind = name.rpartition(".")[2]
        if name in routers:
            raise ValueError(f"{name} chooses or weighs experts, which stays as it is; name others: {others}")
        if kind in kinds - of_experts:
            fix = f"name {kind}, and so those of experts too, or others: {others}"
            raise ValueError(f"{name} is called as the layers of experts, for which PEFT would take it; {fix}")
    whole = Counter(place[0] for name in linear if (place := expert_of(name)) is not None)
    for stack, count in Counter(place[0] for name in found if (place := expert_of(name)) is not None).items():
        if count < whole[stack]:
            kind = stack.rpartition(".")[2]
            raise ValueError(f"of {stack} {count} of {whole[stack]} experts are named; name {kind}, which is of all of them")
    if not found:
        raise ValueError("this model has no linear layer that could have an adapter; train all weights (lora: null)")
    return dict(found)


def expert_of(module: str) -> tuple[str, int] | None:
    """(name without the expert's number, number) of an expert's module, or of an adapter's tensor; None for others."""
    found = _EXPERT.fullmatch(module)
    return None if found is None else (f"{found[1]}.{found[3]}", int(found[2]))


def of_expert(name: str, number: int) -> str:
    """Undo `expert_of`."""
    before, _, kind = name.rpartition(_EXPERTS)
    return f"{before}{_EXPERTS}{number}.{kind}"


def products_per_token(modules: Iterable[str], moe: MoeArch | None) -> dict[str, int]:
    """Adapted module -> products of its adapter for a token. Of a layer's experts one stands for all: a token passes the chosen
    ones."""
    found: dict[str, int] = {}
    for module in modules:
        place = expert_of(module)
        if place is None:
            found[module] = 1
        elif place[1] == 0:
            assert moe is not None
            found[module] = moe.top_k
    return found


def int8_modules(arch: ModelArch, lora: LoraConfig | None) -> dict[str, tuple[int, int]]:
    """Name -> (out, in) of the decoder's linear layers, adapted or not, that `lora.base_bits` keeps in 8 bits."""
    return {} if lora is None or lora.base_bits is None else adapted_modules(tensors_to_adapt(arch), "all-linear")


def tensors_to_adapt(arch: ModelArch, value_head: bool = False) -> dict[str, Shape]:
    """Shapes of the checkpoint's tensors (`weight_map.hf_tensors`) without matrices that belong to no linear layer; experts that
    are stacked in one (`MoeArch.stacked`) have a weight each."""
    # In transformers' own class of a model without a family: routers, for example.
    others = {part.hf for one in arch.own if not one.linear and len(one.shape) == 2 for part in one.parts}
    in_layers = {name for name in others if _LAYER.search(name) and _EXPERTS not in name}
    tensors = {name: shape for name, shape in hf_tensors(arch, value_head).items() if name not in in_layers}
    return tensors if arch.moe is None or not arch.moe.stacked else _each_expert(tensors)


def _each_expert(tensors: Mapping[str, Shape]) -> dict[str, Shape]:
    """Give every expert of a stack [experts, in, out] a weight of its own, [out, in]; leave out their biases."""
    found: dict[str, Shape] = {}
    for name, shape in tensors.items():
        if _EXPERTS not in name:
            found[name] = shape
        elif len(shape) == 3:
            found |= {f"{of_expert(name, expert)}.weight": (shape[2], shape[1]) for expert in range(shape[0])}
    return found


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def last_part(name: str) -> str:
    """Return the kind of a module: `q_proj` of `model.layers.0.self_attn.q_proj`."""
    return name.rpartition(".")[2]


def _kinds(names: Iterable[str]) -> list[str]:
    return sorted(set(map(last_part, names)))


def _nearest(target: str, linear: Mapping[str, tuple[int, int]]) -> str:
    kinds = _kinds(linear)
    near = difflib.get_close_matches(target.rpartition(".")[2], kinds, n=2, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"name some of {', '.join(kinds)}, or all-linear"


def adapter_shapes(modules: Mapping[str, tuple[int, int]], rank: int) -> dict[str, Shape]:
    """Tensor name -> shape of all adapters: A [rank, in] and B [out, rank] of each module."""
    shapes: dict[str, Shape] = {}
    for module, (rows, columns) in modules.items():
        shapes[module + ADAPTER_A] = (rank, columns)
        shapes[module + ADAPTER_B] = (rows, rank)
    return shapes


def is_adapter(name: str) -> bool:
    return name.endswith((ADAPTER_A, ADAPTER_B))


def is_beside_base(name: str) -> bool:
    """True for what trains on a frozen base and is in its checkpoints: adapters and a value head."""
    return is_adapter(name) or name == VALUE_HEAD


def shapes_beside_base(arch: ModelArch, lora: LoraConfig, value_head: bool = False) -> dict[str, Shape]:
    """Name -> shape of the adapters and a value head, which train on a frozen base. ValueError as from `adapted_modules`."""
    tensors = tensors_to_adapt(arch, value_head)
    adapters = adapter_shapes(adapted_modules(tensors, lora.targets), lora.rank)
    return {**adapters, **{name: shape for name, shape in tensors.items() if name == VALUE_HEAD}}


def adapted_of(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.removesuffix(ADAPTER_A).removesuffix(ADAPTER_B) for name in names if is_adapter(name)))


def scaling(lora: LoraConfig) -> float:
    """Factor of B A."""
    return lora.alpha / lora.rank


def initial_a(module: str, columns: int, rank: int, seed: int) -> Tensor:
    """Draw the start of a module's A, [rank, columns] fp32 on the host: uniform within 1 / sqrt(columns), PEFT's Kaiming start.
    It depends on the run's seed and the module's name alone, so it is the same in every layout and engine. B starts as zeros."""
    generator = torch.Generator().manual_seed(seed_of(seed, module))
    return (torch.rand(rank, columns, generator=generator) * 2 - 1) / math.sqrt(columns)


def seed_of(run_seed: int, purpose: str) -> int:
    # 63 bits, which a signed integer holds.
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{purpose}".encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Adapted:
    """A weight with its adapter, which is added to the part that is read: the merged weight never exists as a whole."""

    base: Tensor | Quantised  # [rows, columns]
    a: Tensor  # [rank, columns]
    b: Tensor  # [rows, rank]
    scaling: float

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    def rectangle(self, row: int, col: int, rows: int, cols: int) -> Tensor:
        """Part [rows, cols] of the merged weight, base + scaling * b a, in fp32."""
        rows_of, cols_of = slice(row, row + rows), slice(col, col + cols)
        part = part_of(self.base, 0, row, col, rows, cols).float()
        return torch.addmm(part, self.b.detach()[rows_of].float(), self.a.detach()[:, cols_of].float(), alpha=self.scaling)


@dataclass(frozen=True)
class AdaptedExperts:
    """`Adapted` of several experts in one parameter. base: [experts, rows, columns], or [experts, columns, rows] if `turned`.
    blocks: (first row in an expert's matrix, A [experts, rank, columns], B [experts, rows of the block, rank]) of every adapter."""

    base: Tensor
    blocks: tuple[tuple[int, Tensor, Tensor], ...]
    scaling: float
    turned: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    def rectangle(self, slot: int, row: int, col: int, rows: int, cols: int) -> Tensor:
        """Part [rows, cols] of the merged weight of expert `slot`, as `base` holds it, in fp32."""
        part = self.base.detach()[slot, row : row + rows, col : col + cols].to(torch.float32, copy=True)
        whole = part.t() if self.turned else part  # a view
        if self.turned:
            row, col, rows, cols = col, row, cols, rows
        for first, a, b in self.blocks:
            start, stop = max(row, first), min(row + rows, first + b.size(1))
            if start < stop:
                left, right = b.detach()[slot, start - first : stop - first], a.detach()[slot, :, col : col + cols]
                whole[start - row : stop - row].addmm_(left.float(), right.float(), alpha=self.scaling)
        return part


Weights = Mapping[str, Tensor | Adapted | AdaptedExperts | Quantised]
"""Parameters of a rank by name, as others read them (`engine.base.Engine.merged_parameters`)."""


def part_of(weight: Tensor | Adapted | AdaptedExperts | Quantised, slot: int, row: int, col: int, rows: int, cols: int) -> Tensor:
    """Part [rows, cols] of a 1-D, 2-D or 3-D tensor (a view), or of a weight with its adapter or in 8 bits (fp32)."""
    if isinstance(weight, AdaptedExperts):
        return weight.rectangle(slot, row, col, rows, cols)
    if isinstance(weight, Adapted | Quantised):
        return weight.rectangle(row, col, rows, cols)
    return rectangle(weight.detach(), slot, row, col, rows, cols)
