"""Low-rank adapters of transformers' own classes under FSDP2: the adapters of a model, their start, and their forward pass.

Under tensor parallel an adapter is cut as its module's weight (`lora_shards.py`) and needs no exchange of its own: A of a
column-parallel linear reads the input that tp ranks share, B of a row-parallel one adds to the partial sum of the output. The copy
that every tp rank has, of A or B, then has a part of its gradient on each.

transformers keeps all experts of a layer in one parameter, and their adapters are kept so too (`row_shards.Stack`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from megappo.config.role_sections import LoraConfig
from megappo.models.arch import ModelArch
from megappo.models.int8_linear import Int8Linear
from megappo.models.lora import (
    ADAPTER_A,
    ADAPTER_B,
    AdaptedExperts,
    adapted_modules,
    adapter_shapes,
    initial_a,
    scaling,
    seed_of,
    tensors_to_adapt,
)
from megappo.models.lora_experts import grouped_change, grouped_linear
from megappo.models.lora_shards import adapter_cuts
from megappo.models.pieces import Box, Piece, PieceMap, rectangle
from megappo.models.row_shards import Stack, plain_piece_map, rows_of_rank, stacks_of
from megappo.models.weight_rules import Cut
from megappo.parallel.layout import ParallelLayout


class Adapters:
    """Adapters of a model. seed: of the run. ValueError for targets that the model does not have.
    modules: name -> (out, in) of adapted modules. stacks: those of experts. alone: the others. cuts: of their tensors over tp.
    scaling: of B A."""

    def __init__(self, arch: ModelArch, lora: LoraConfig, layout: ParallelLayout, seed: int) -> None:
        self.modules = adapted_modules(tensors_to_adapt(arch), lora.targets)
        self.stacks = stacks_of(arch, self.modules)
        in_stacks = {module for stack in self.stacks for module in stack.modules}
        self.alone = {name: size for name, size in self.modules.items() if name not in in_stacks}
        self.cuts = adapter_cuts(arch, self.alone)
        self.lora, self.scaling, self._layout, self._seed = lora, scaling(lora), layout, seed
        self.are_on, self.dropout = True, 0.0

    def add_to(self, model: torch.nn.Module) -> None:
        """Add parameters `lora_A.weight` and `lora_B.weight` in fp32 to each module; its own keep their names.
        model: on the meta device, after `tensor_parallel.cut_over_tp`, whose hooks a module keeps."""
        for name in self.alone:
            linear = model.get_submodule(name)
            assert isinstance(linear, torch.nn.Linear), f"{name} is a {type(linear).__name__}"
            # Change the class of the object, as `fully_shard` does: the hooks of tensor parallel stay, and all layers run the same
            # code, which torch.compile compiles once.
            kind = Int8LoraLinear if isinstance(linear, Int8Linear) else LoraLinear
            cast(Any, linear).__class__ = kind
            cast(LoraLinear, linear).add(self, [self.cuts[f"{name}.{part}.weight"] for part in ("lora_A", "lora_B")])
        by_experts: dict[str, list[Stack]] = {}
        for stack in self.stacks:
            by_experts.setdefault(stack.parameter.rpartition(".")[0], []).append(stack)
        for name, stacks in by_experts.items():
            LoraExperts.add_to(model.get_submodule(name), self, stacks)

    def start(self, local: Mapping[str, Tensor], pieces: Iterable[Piece]) -> None:
        """Fill this rank's parts (`pieces`) of all adapters: A with noise from the seed, B with zeros."""
        for piece in pieces:
            if piece.hf.endswith(ADAPTER_A):
                module, box = piece.hf.removesuffix(ADAPTER_A), piece.box
                whole = initial_a(module, self.modules[module][1], self.lora.rank, self._seed)
                part = rectangle(local[piece.local], piece.slot, piece.row, piece.col, box.rows, box.cols)
                part.copy_(whole[box.r0 : box.r1, box.c0 : box.c1])
            else:
                local[piece.local].zero_()

    def pieces(self) -> PieceMap:
        """Rectangles of the adapters' tensors at every position of the layout."""
        alone = plain_piece_map(adapter_shapes(self.alone, self.lora.rank), self.cuts, self._layout)
        if not self.stacks:
            return alone
        return PieceMap.of({at: [*alone[at], *self._stacked_pieces(at)] for at in range(self._layout.world_size)})

    def _stacked_pieces(self, position: int) -> Iterator[Piece]:
        for stack in self.stacks:
            first, end = self._experts_of(stack, position)
            rows, columns = self.modules[stack.modules[0]]
            boxes = {ADAPTER_A: Box(0, self.lora.rank, 0, columns), ADAPTER_B: Box(0, rows, 0, self.lora.rank)}
            for slot, module in enumerate(stack.modules[first:end]):
                for tensor, box in boxes.items():
                    yield Piece(module + tensor, box, stack.name + tensor, 0, 0, slot)

    def _experts_of(self, stack: Stack, position: int) -> tuple[int, int]:
        return rows_of_rank(len(stack.modules), self._layout.world_size, position)  # with experts there is no tp

    def places(self, position: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Yield (parameter, first index in every dimension, shape) of the parts that a position holds."""
        for piece in plain_piece_map(adapter_shapes(self.alone, self.lora.rank), self.cuts, self._layout)[position]:
            yield piece.local, (piece.box.r0, piece.box.c0), (piece.box.rows, piece.box.cols)
        for stack in self.stacks:
            first, end = self._experts_of(stack, position)
            rows, columns = self.modules[stack.modules[0]]
            if end > first:
                yield stack.name + ADAPTER_A, (first, 0, 0), (end - first, self.lora.rank, columns)
                yield stack.name + ADAPTER_B, (first, 0, 0), (end - first, rows, self.lora.rank)

    def experts(self, base: Mapping[str, Tensor], shards: Mapping[str, Tensor]) -> Iterator[tuple[str, AdaptedExperts]]:
        """Yield the parameters of experts on this rank with their adapters. base, shards: of the weights and of the adapters."""
        blocks: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        turned = {stack.parameter: stack.turned for stack in self.stacks}
        for stack in self.stacks:
            if stack.parameter in base:
                a, b = (shards[stack.name + part] for part in (ADAPTER_A, ADAPTER_B))
                blocks.setdefault(stack.parameter, []).append((stack.row, a, b))
        return ((name, AdaptedExperts(base[name], tuple(found), self.scaling, turned[name])) for name, found in blocks.items())

    @property
    def copied(self) -> set[str]:
        """Tensors of which every tp rank has a copy, with the gradient of its part of the linear."""
        return {name for name, cut in self.cuts.items() if cut.dim is None}

    @contextmanager
    def off(self) -> Iterator[None]:
        self.are_on = False
        try:
            yield
        finally:
            self.are_on = True

    @contextmanager
    def dropping(self, step: int, replica: int, device: torch.device) -> Iterator[None]:
        """Drop inputs of A inside a training pass. step: number of the pass. replica: number of the dp x cp rank.
        Masks follow from seed, step and replica: a resumed run has the same, and tp ranks drop the same of the input that they
        share."""
        if self.lora.dropout == 0:
            yield
            return
        self.dropout = self.lora.dropout
        try:
            # Torch's own generator, which recomputation of activations knows how to rewind.
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed_of(self._seed, f"dropout/{step}/{replica}"))
                yield
        finally:
            self.dropout = 0.0


class LoraLinear(torch.nn.Linear):
    """Linear layer with an adapter: x W^T + bias + scaling * (x A^T) B^T.
    A and B are fp32 parameters, which FSDP2 gathers in the type of computation, like W."""

    _adapters: Adapters
    lora_A: torch.nn.Linear
    lora_B: torch.nn.Linear

    def add(self, adapters: Adapters, cuts: Sequence[Cut]) -> None:
        """Add A and B on the meta device; DTensors where they are cut, plain copies elsewhere, like norms. cuts: of A and B."""
        self._adapters = adapters
        made: dict[str, Any] = {"bias": False, "device": "meta", "dtype": torch.float32}
        self.lora_A = torch.nn.Linear(self.in_features, adapters.lora.rank, **made)
        self.lora_B = torch.nn.Linear(adapters.lora.rank, self.out_features, **made)
        for part, cut in zip((self.lora_A, self.lora_B), cuts, strict=True):
            if cut.dim is not None and isinstance(self.weight, DTensor):
                mesh = self.weight.device_mesh
                part.weight = torch.nn.Parameter(distribute_tensor(part.weight, mesh, [Shard(cut.dim)], src_data_rank=None))

    def forward(self, input: Tensor) -> Tensor:
        """Under tensor parallel input and output are DTensors; A and B give this rank's rows, or its part of the sum."""
        output, adapters = super().forward(input), self._adapters
        if not adapters.are_on:
            return output
        mine = input
        if isinstance(input, DTensor):
            whole = all(isinstance(placement, Replicate) for placement in input.placements)
            mine = input.to_local(grad_placements=[Partial()] if whole else input.placements)  # each rank's rows of B give a part
        kept = functional.dropout(mine, adapters.dropout) if adapters.dropout > 0 else mine
        change = adapters.scaling * functional.linear(functional.linear(kept, _local(self.lora_A)), _local(self.lora_B))
        if isinstance(output, DTensor):
            change = DTensor.from_local(change, output.device_mesh, output.placements, run_check=False)
        return output + change


class LoraExperts(torch.nn.Module):
    """Adapters of the experts of one layer by the kind of their module: A [experts, rank, in] and B [experts, out, rank] in fp32,
    beside transformers' module of these experts, whose forward becomes that of `_run`."""

    @staticmethod
    def add_to(experts: torch.nn.Module, adapters: Adapters, stacks: Sequence[Stack]) -> None:
        """Add adapters on the meta device. ValueError for a class that does not multiply its experts' rows as is usual."""
        if not getattr(experts, "has_gate", False) or experts.is_transposed != stacks[0].turned:
            kinds = ", ".join(sorted({stack.name.rpartition(".")[2] for stack in stacks}))
            raise ValueError(
                f"lora.targets: engine fsdp2 has no adapters for the experts of {type(experts).__name__}, which are not gated, "
                f"or whose class holds them transposed; name others than {kinds}"
            )
        added = LoraExperts()
        added.blocks = [(stack.parameter.rpartition(".")[2], stack.row, stack.name.rpartition(".")[2]) for stack in stacks]
        made: dict[str, Any] = {"device": "meta", "dtype": torch.float32}
        for stack in stacks:
            (rows, columns), number, rank = adapters.modules[stack.modules[0]], len(stack.modules), adapters.lora.rank
            pair = torch.nn.ModuleDict({name: torch.nn.Module() for name in ("lora_A", "lora_B")})
            for part, shape in zip(pair.values(), ((number, rank, columns), (number, rows, rank))):
                part.weight = torch.nn.Parameter(torch.empty(shape, **made))
            added.add_module(stack.name.rpartition(".")[2], pair)
        plain = experts.forward
        experts.add_module("lora", added)
        experts.forward = partial(added._run, plain, experts, adapters)  # type: ignore[method-assign]

    blocks: list[tuple[str, int, str]]
    """(parameter, first row of the module in an expert's part of it, kind of the module)"""

    def _run(
        self,
        plain: Callable[..., Tensor],
        experts: Any,
        adapters: Adapters,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        """Return the experts' outputs [T, H]. hidden_states: [T, H]. top_k_index, top_k_weights: [T, top_k].
        The operations of transformers' `grouped_mm_experts_forward`, with the change of every product added to it."""
        if not adapters.are_on:
            return plain(hidden_states, top_k_index, top_k_weights)
        (tokens, top_k), width = top_k_index.shape, hidden_states.size(-1)
        chosen, order = torch.sort(top_k_index.reshape(-1))
        numbers = torch.arange(len(experts.down_proj), device=chosen.device)
        ends = torch.searchsorted(chosen, numbers, right=True).to(torch.int32)
        rows = self._product(experts, adapters, "gate_up_proj", hidden_states[order // top_k], chosen, ends)
        rows = self._product(experts, adapters, "down_proj", experts._apply_gate(rows), chosen, ends)
        weighted = rows * top_k_weights.reshape(-1)[order][:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return weighted[back].view(tokens, top_k, width).sum(1).to(hidden_states.dtype)

    def _product(self, experts: Any, adapters: Adapters, parameter: str, x: Tensor, chosen: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows that are sorted by expert, [S, in] -> [S, out]. chosen: [S] their experts."""
        weight = getattr(experts, parameter)
        output = grouped_linear(x, weight.transpose(-2, -1) if experts.is_transposed else weight, ends)
        if experts.has_bias:
            output = output + getattr(experts, f"{parameter}_bias")[chosen]
        mine = sorted((row, kind) for of, row, kind in self.blocks if of == parameter)
        if not mine:
            return output
        kept = functional.dropout(x, adapters.dropout) if adapters.dropout > 0 else x
        parts, at = [], 0
        for row, kind in mine:
            pair: Any = self.get_submodule(kind)
            if row > at:
                parts.append(x.new_zeros(len(x), row - at))
            parts.append(grouped_change(kept, pair["lora_A"].weight, pair["lora_B"].weight, ends))
            at = row + parts[-1].size(1)
        if at < output.size(1):
            parts.append(x.new_zeros(len(x), output.size(1) - at))
        return torch.add(output, parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), alpha=adapters.scaling)


class Int8LoraLinear(LoraLinear, Int8Linear):
    """`LoraLinear` whose base weight is in 8 bits."""


def _local(part: torch.nn.Linear) -> Tensor:
    weight = part.weight
    return weight.to_local() if isinstance(weight, DTensor) else weight
