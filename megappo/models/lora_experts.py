"""Adapters (LoRA) on the experts of Megatron's sparse layers, for any ep, etp and dp, sequential experts and grouped ones.

The dispatcher gathers the tokens of an expert over its etp ranks and adds their outputs up, and its backward does the reverse. So
an adapter needs no exchange of its own: from A of a row-parallel linear a rank has its part of the sum, and the copy that every
etp rank has, of A or B, has a part of its gradient on each (`sum_gradients_of_copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn import functional

from megappo.config.role_sections import LoraConfig
from megappo.models.kv_copies import sum_together
from megappo.models.lora import AdaptedExperts, initial_a, last_part, of_expert, scaling
from megappo.models.lora_shards import AdaptedLinear, Modules, stack_of
from megappo.models.moe import ClampedExperts
from megappo.models.pieces import Box
from megappo.parallel.groups import ProcessGroups

ONE_BY_ONE = (SequentialMLP, ClampedExperts)
"""Modules of a layer's experts that are modules themselves; others multiply with all at once."""
_MULTIPLE = 8  # numbers: 16 bytes in bf16, to which rows of a grouped product have to be aligned
_Product = Callable[[str, Tensor], Tensor]


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [S, in] that are sorted by group with weight [groups, out, in] of their group: [S, out].
    ends: [groups] int32, one behind the last row of each group."""
    return functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)


def grouped_change(x: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """x A^T B^T for rows [S, in] sorted by expert: [S, out]. a: [experts, rank, in], b: [experts, out, rank], ends as above."""
    if more := -a.size(1) % _MULTIPLE:
        a, b = functional.pad(a, (0, 0, 0, more)), functional.pad(b, (0, more))
    return grouped_linear(grouped_linear(x, a, ends), b, ends)


class ExpertAdapter(torch.nn.Module):
    """This rank's part of the adapters of one matrix of its experts, not filled: lora_A [experts, rank, columns of box], lora_B
    [experts, rows of box, rank]. modules: of the experts, in order. size: (out, in) of the matrix. box: its rectangle on this rank.
    empty: dtype and device."""

    def __init__(self, modules: Sequence[str], size: tuple[int, int], box: Box, rank: int, **empty: Any) -> None:
        super().__init__()
        self.module, self.by_expert, self.size, self.box = stack_of(modules[0]), tuple(modules), size, box
        self.lora_A = torch.nn.Parameter(torch.empty(len(modules), rank, box.cols, **empty))
        self.lora_B = torch.nn.Parameter(torch.empty(len(modules), box.rows, rank, **empty))

    @torch.no_grad()
    def start(self, seed: int) -> None:
        """Fill A as `lora.initial_a` does and B with zeros."""
        for a, module in zip(self.lora_A, self.by_expert):
            a.copy_(initial_a(module, self.size[1], a.size(0), seed)[:, self.box.c0 : self.box.c1])
        self.lora_B.zero_()


class ExpertAdapters(torch.nn.Module):
    """Adapters of a layer's experts on this rank. linears: of expert 0 (`lora_shards.adapted_experts`). experts: the numbers of
    this rank's. modules: all adapted ones of the model. dropped: name of the random state that chooses the dropped inputs."""

    def __init__(
        self,
        linears: Sequence[AdaptedLinear],
        experts: range,
        modules: Modules,
        lora: LoraConfig,
        groups: ProcessGroups,
        *,
        dropped: str,
        **empty: Any,
    ) -> None:
        super().__init__()
        self.enabled, self.scaling, self._dropout, self._dropped = True, scaling(lora), lora.dropout, dropped
        self.adapters = torch.nn.ModuleDict()
        # (kind of module, adapted or not; its rows) in the order of the weight's rows.
        self._rows: dict[str, list[tuple[str, int]]] = {}
        self._each: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for linear in linears:
            self._rows[linear.local.split(".")[-2]] = [(last_part(module), rows) for module, rows in linear.rows]
            for module, (box,) in linear.boxes.items():
                names = [of_expert(stack_of(module), number) for number in experts]
                adapter = ExpertAdapter(names, modules[module], box, lora.rank, **empty)
                self.adapters[last_part(module)] = adapter
                cut = {None: None, 0: adapter.lora_B, 1: adapter.lora_A}[linear.dim]
                for part in (adapter.lora_A, adapter.lora_B):
                    setattr(part, "allreduce", False)  # as `moe.mark_experts` says
                    setattr(part, "tensor_model_parallel", True)
                    # The gradient norm leaves out what is marked so: copies of another etp rank's.
                    setattr(part, "shared", part is not cut and groups.coordinates.etp > 0)
                    setattr(part, "is_copy", part is not cut and groups.layout.etp > 1)

    def each(self) -> Iterator[ExpertAdapter]:
        return (cast(ExpertAdapter, adapter) for adapter in self.adapters.values())

    def attach(self, experts: torch.nn.Module, seed: int) -> None:
        """Fill the adapters with their start and add them to Megatron's module of a layer's experts."""
        for adapter in self.each():
            adapter.start(seed)
        experts.add_module("lora", self)
        if not isinstance(experts, ONE_BY_ONE):
            for name in self._rows:  # inputs of TransformerEngine's grouped linear: (tokens sorted by expert, tokens of each)
                experts.get_submodule(name).register_forward_hook(lambda _, x, out, name=name: self._of_all(name, x[0], x[1], out))
            return
        experts.register_forward_pre_hook(lambda _module, _inputs: self._take_apart())
        experts.register_forward_hook(lambda _module, _inputs, _output: self._each.clear())
        for number, expert in enumerate(experts.local_experts):
            for name in self._rows:
                expert.get_submodule(name).register_forward_hook(
                    lambda _, x, out, name=name, number=number: self._of_one(name, number, x[0], out)
                )

    def _take_apart(self) -> None:
        # Once for all experts: their gradients are then put together once.
        self._each = {
            kind: list(zip(cast(Any, adapter).lora_A.unbind(), cast(Any, adapter).lora_B.unbind()))
            for kind, adapter in self.adapters.items()
        }

    def _of_one(self, linear: str, number: int, x: Tensor, output: Any) -> Any:
        def product(kind: str, kept: Tensor) -> Tensor:
            a, b = self._each[kind][number]
            return functional.linear(functional.linear(kept, a), b)

        return self._added(linear, x, output, product)

    def _of_all(self, linear: str, x: Tensor, sizes: Any, output: Any) -> Any:
        def product(kind: str, kept: Tensor) -> Tensor:
            adapter = cast(ExpertAdapter, self.adapters[kind])
            return grouped_change(kept, adapter.lora_A, adapter.lora_B, ends)

        ends = torch.as_tensor(sizes, device=x.device).cumsum(0).to(torch.int32)
        return self._added(linear, x, output, product)

    def _added(self, linear: str, x: Tensor, output: Any, product: _Product) -> Any:
        """Add the change to a linear's (output [tokens, rows], bias). x: its input [tokens, columns]."""
        if not self.enabled:
            return output
        if self.training and self._dropout > 0:
            tracker = get_cuda_rng_tracker()
            assert tracker is not None
            with tracker.fork(self._dropped):
                x = functional.dropout(x, self._dropout)
        parts = [product(kind, x) if kind in self.adapters else x.new_zeros(x.size(0), rows) for kind, rows in self._rows[linear]]
        change = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return torch.add(output[0], change, alpha=self.scaling), output[1]

    @torch.no_grad()
    def merged(self, experts: torch.nn.Module) -> Iterator[tuple[Tensor, AdaptedExperts]]:
        """Yield (weight of an expert on this rank, the same with the adapters added to what is read of it)."""
        for linear, rows in self._rows.items():
            firsts = {kind: sum(size for _, size in rows[:place]) for place, (kind, _) in enumerate(rows)}
            held = [(firsts[kind], cast(ExpertAdapter, self.adapters[kind])) for kind in firsts if kind in self.adapters]
            for number in range(len(next(self.each()).by_expert)):
                one = slice(number, number + 1)
                blocks = tuple((first, adapter.lora_A[one], adapter.lora_B[one]) for first, adapter in held)
                weight = _weight(experts, linear, number)
                yield weight, AdaptedExperts(weight[None], blocks, self.scaling, isinstance(experts, ClampedExperts))


def _weight(experts: torch.nn.Module, linear: str, number: int) -> Tensor:
    if isinstance(experts, ONE_BY_ONE):
        return experts.get_parameter(f"local_experts.{number}.{linear}.weight")
    return experts.get_parameter(f"{linear}.weight{number}")


def sum_gradients_of_copies(chunks: Sequence[torch.nn.Module], groups: ProcessGroups) -> None:
    """Sum over etp, in DDP's buffers, the gradients of adapters' tensors of which every etp rank has a copy. Once, after a pass and
    before its reduction over edp. Collective over etp."""
    if groups.layout.etp == 1:
        return
    copies = [
        cast(Any, parameter).main_grad
        for chunk in chunks
        for parameter in chunk.parameters()
        if parameter.requires_grad and getattr(parameter, "is_copy", False)
    ]
    sum_together(copies, groups.collection.expt_tp)
