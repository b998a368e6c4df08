"""Adapters (LoRA) on Megatron's parallel linears, TransformerEngine's too, for any tp, pp, vpp and sequence parallel.

Where Megatron fuses Hugging Face modules (q, k and v; gate and up) each keeps its own A and B, cut as its weight
(`lora_shards.py`). Only the product with A, rank numbers per token, travels between tp ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor
from torch.nn import functional

from megappo.config.role_sections import LoraConfig
from megappo.models.arch import ModelArch
from megappo.models.build import freeze_chunks
from megappo.models.gpt import CriticModel, PackedModel, named_parameters
from megappo.models.int8_linear import SCALE, Quantised
from megappo.models.int8_parallel import quantised
from megappo.models.kv_copies import mark_copy
from megappo.models.lora import (
    Adapted,
    AdaptedExperts,
    adapted_modules,
    initial_a,
    is_adapter,
    last_part,
    scaling,
    seed_of,
    tensors_to_adapt,
)
from megappo.models.lora_experts import ExpertAdapters
from megappo.models.lora_shards import AdaptedLinear, adapted_experts, adapted_linears, adapter_piece_map, check_stages, num_rows
from megappo.models.peft_files import AdapterTensors
from megappo.models.pieces import Box, Piece, PieceMap
from megappo.models.weight_map import LOCAL_VALUE_HEAD, VALUE_HEAD, rank_experts
from megappo.parallel.groups import ProcessGroups


class Adapter(torch.nn.Module):
    """This rank's part of one Hugging Face module's adapter, not filled: lora_A [rank, columns of boxes], lora_B [rows of boxes,
    rank]. size: (out, in) of the module's weight. boxes: blocks of that weight's rows on this rank. empty: dtype and device."""

    def __init__(self, module: str, size: tuple[int, int], boxes: Sequence[Box], rank: int, **empty: Any) -> None:
        super().__init__()
        self.module, self.size, self.columns = module, size, slice(boxes[0].c0, boxes[0].c1)
        self.lora_A = torch.nn.Parameter(torch.empty(rank, boxes[0].cols, **empty))
        self.lora_B = torch.nn.Parameter(torch.empty(num_rows(boxes), rank, **empty))

    @torch.no_grad()
    def start(self, seed: int) -> None:
        """Fill A as `lora.initial_a` does and B with zeros: the model computes what it did without the adapter."""
        rank, (_, columns) = self.lora_A.shape[0], self.size
        self.lora_A.copy_(initial_a(self.module, columns, rank, seed)[:, self.columns])
        self.lora_B.zero_()


class LinearAdapters(torch.nn.Module):
    """Adapters of the modules that one linear holds. dim: of its weight, which tp cuts; None if every rank has it whole.
    rows: (last name of a module, adapted or not, number of its rows) in the linear's output on this rank, in order. dropped: name
    of the random state that chooses the dropped inputs."""

    def __init__(
        self,
        adapters: Sequence[Adapter],
        rows: Sequence[tuple[str, int]],
        lora: LoraConfig,
        groups: ProcessGroupCollection,
        *,
        dim: int | None,
        sequence_parallel: bool,
        dropped: str,
    ) -> None:
        super().__init__()
        self.adapters = torch.nn.ModuleDict({last_part(adapter.module): adapter for adapter in adapters})
        self.enabled = True
        self.scaling = scaling(lora)
        self._rows, self._rank, self._dropout = tuple(rows), lora.rank, lora.dropout
        self._group, self._dim, self._sequence_parallel = groups.tp, dim, sequence_parallel
        self._dropped = dropped
        for adapter in adapters:
            cut = {None: None, 0: adapter.lora_B, 1: adapter.lora_A}[dim]
            for part in (adapter.lora_A, adapter.lora_B):
                if part is cut:
                    set_tensor_model_parallel_attributes(part, True, dim, 1)
                    if dim == 0 and (copies := part.shape[0] * groups.tp.size() // adapter.size[0]) > 1:
                        mark_copy(part, 0, counts=groups.tp.rank() % copies == 0)
                else:
                    # Each tp rank multiplies a copy with its part of the tokens: finalize_model_grads sums the partial gradients.
                    setattr(part, "sequence_parallel", sequence_parallel)

    def each(self) -> Iterator[Adapter]:
        return (cast(Adapter, adapter) for adapter in self.adapters.values())

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """Add the adapters' change to the linear's output [tokens, 1, rows]. x: its input [tokens, 1, columns].
        Tokens, rows and columns are this rank's; under sequence parallel the tokens are cut on one side of the linear."""
        if self.training and self._dropout > 0:
            tracker = get_cuda_rng_tracker()
            assert tracker is not None
            # A named state, which recomputation sets back.
            with tracker.fork(self._dropped):
                x = functional.dropout(x, self._dropout)
        hidden = self._exchanged(functional.linear(x, self.a())).flatten(0, -2)
        # One product for all rows of a fused linear, added as it is made: no second activation as wide as the output.
        return torch.addmm(output.flatten(0, -2), hidden, self.b().t(), alpha=self.scaling).view_as(output)

    def a(self) -> Tensor:
        """Stack A of each adapter: [rank of all adapters, columns]."""
        return torch.cat([adapter.lora_A for adapter in self.each()])

    def b(self) -> Tensor:
        """Build [rows of the linear, rank of all adapters]: B of each module in its rows and columns, 0 elsewhere."""
        width = self._rank * len(self.adapters)
        blocks: dict[str, Iterator[Tensor]] = {}
        for place, (name, adapter) in enumerate(zip(self.adapters, self.each())):
            before = self._rank * place
            wide = functional.pad(adapter.lora_B, (before, width - self._rank - before))
            blocks[name] = iter(wide.split([rows for owner, rows in self._rows if owner == name]))
        none = next(self.each()).lora_B
        return torch.cat([next(blocks[name]) if name in blocks else none.new_zeros(rows, width) for name, rows in self._rows])

    def _exchanged(self, hidden: Tensor) -> Tensor:
        """Complete the product with A [tokens, 1, rank of all adapters] for the tokens that B reads. Collective over tp."""
        # A row-parallel linear exchanges this beside the sum of its output: joining the two would take TransformerEngine's linear
        # apart.
        if self._dim is None:
            return hidden  # of this rank's tokens, as the output is
        if self._dim == 1:
            if self._sequence_parallel:
                return reduce_scatter_to_sequence_parallel_region(hidden, group=self._group)
            return reduce_from_tensor_model_parallel_region(hidden, group=self._group)
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self._group)
        # Backward sums over the ranks, each of which has some rows of B: gradients of A and of the input are then whole.
        return copy_to_tensor_model_parallel_region(hidden, group=self._group)

    @torch.no_grad()
    def merged(self, weight: Tensor | Quantised) -> Adapted:
        """Return the linear's weight on this rank with the adapters added to what is read of it."""
        return Adapted(weight, self.a(), self.b(), self.scaling)


def attach_adapters(
    chunks: Sequence[PackedModel], arch: ModelArch, groups: ProcessGroups, lora: LoraConfig, *, role: str, seed: int
) -> ModelAdapters:
    """Freeze a built model, except a value head, and add adapters, at their start, to the modules that `lora.targets` names.
    ValueError, on every rank, for targets that match nothing, routers, or nothing on a stage of the pipeline."""
    model = ModelAdapters(chunks, arch, groups, lora, role, seed)
    check_stages(arch, groups.layout, model.modules)
    freeze_chunks(chunks, lambda name: name != LOCAL_VALUE_HEAD)
    for chunk in chunks:
        model.add_to(chunk)
    return model


class ModelAdapters:
    """Adapters of the model of a role. chunks: of this rank. seed: of the run."""

    def __init__(
        self, chunks: Sequence[PackedModel], arch: ModelArch, groups: ProcessGroups, lora: LoraConfig, role: str, seed: int
    ) -> None:
        self._chunks, self._arch, self._groups, self._seed = chunks, arch, groups, seed
        self.lora, self.modules = lora, adapted_modules(tensors_to_adapt(arch), lora.targets)
        self._dropped = f"inputs that adapters of the {role} drop"
        self._dropped_by_experts = f"inputs that adapters of the {role}'s experts drop"

    def add_to(self, chunk: PackedModel) -> None:
        """Make the adapters of a chunk's layers."""
        tp = self._groups.layout.tp, self._groups.coordinates.tp
        layout, at = self._groups.layout, self._groups.coordinates
        for layer in cast(Any, chunk.decoder.layers):  # Megatron's type is that of any module
            # Megatron counts layers from 1.
            for linear in adapted_linears(self._arch, *tp, layer.layer_number - 1, self.modules):
                device = layer.get_parameter(linear.local).device
                adapters = self._adapters_of(linear, {"dtype": chunk.config.params_dtype, "device": device})
                _attach(layer.get_submodule(linear.local.removesuffix(".weight")), adapters, self._seed)
            linears = list(adapted_experts(self._arch, layout.etp, at.etp, layer.layer_number - 1, self.modules))
            if linears:
                experts = layer.get_submodule("mlp.experts")
                empty = {"dtype": chunk.config.params_dtype, "device": next(experts.parameters()).device}
                numbers = rank_experts(self._arch, layout.ep, at.ep)
                dropped = self._dropped_by_experts
                ExpertAdapters(linears, numbers, self.modules, self.lora, self._groups, dropped=dropped, **empty).attach(
                    experts, self._seed
                )

    def _adapters_of(self, linear: AdaptedLinear, empty: dict[str, Any]) -> LinearAdapters:
        rank, groups = self.lora.rank, self._groups
        return LinearAdapters(
            [Adapter(module, self.modules[module], boxes, rank, **empty) for module, boxes in linear.boxes.items()],
            [(last_part(module), rows) for module, rows in linear.rows],
            self.lora,
            groups.collection,
            dim=linear.dim,
            sequence_parallel=groups.layout.sequence_parallel,
            dropped=self._dropped,
        )

    def start_dropping(self, step: int) -> None:
        """Choose the inputs that a training pass drops. step: of the schedule, which a resumed run knows too."""
        if self.lora.dropout == 0:
            return
        at, device, tracker = self._groups.coordinates, next(self._chunks[0].parameters()).device, get_cuda_rng_tracker()
        assert tracker is not None
        # No tp in the seed: a column-parallel linear has the same input on all tp ranks. Nor etp: an expert's tokens are on all of
        # its etp ranks; how many they are differs between tp ranks, so experts draw from a state of their own.
        seeds = {
            self._dropped: f"dropout/{step}/{at.pp}/{at.dp}/{at.cp}",
            self._dropped_by_experts: f"dropout/{step}/experts/{at.pp}/{at.ep}/{at.edp}",
        }
        states = {
            name: torch.Generator(device).manual_seed(seed_of(self._seed, purpose)).get_state() for name, purpose in seeds.items()
        }
        tracker.set_states({**tracker.get_states(), **states})

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model computes what its base does."""
        switched = list(adapters_of(self._chunks))
        for adapters in switched:
            adapters.enabled = False
        try:
            yield
        finally:
            for adapters in switched:
                adapters.enabled = True

    def pieces(self) -> PieceMap:
        """Rectangles of the adapters' tensors in the parameters of every rank of the role."""
        return adapter_piece_map(self._arch, self._groups.layout, self.modules, self.lora.rank)

    def tensors(self) -> AdapterTensors:
        """Collect adapters and value head for an export."""
        by_rank = {position: list(held) for position, held in self.pieces().items()}
        if isinstance(self._chunks[0], CriticModel):
            layout, (rows, columns) = self._groups.layout, (self._arch.head_rows, self._arch.hidden_size)
            head = Piece(VALUE_HEAD, Box(0, rows, 0, columns), LOCAL_VALUE_HEAD, 0, 0)
            by_rank[layout.rank_of(pp=layout.pp - 1)].append(head)
        parameters = {name: parameter.detach() for name, parameter in named_parameters(self._chunks).items()}
        return AdapterTensors(self.lora, parameters, PieceMap.of(by_rank), self._arch)


def _attach(parallel_linear: torch.nn.Module, adapters: LinearAdapters, seed: int) -> None:
    for adapter in adapters.each():
        adapter.start(seed)
    # A hook, not a class around the linear: the base keeps its names, by which weights are imported, pushed and exported.
    # Megatron's linears return (output, bias).
    parallel_linear.add_module("lora", adapters)
    parallel_linear.register_forward_hook(
        lambda _module, inputs, output: (adapters(inputs[0], output[0]), output[1]) if adapters.enabled else output
    )


def adapters_of(chunks: Sequence[PackedModel]) -> Iterator[LinearAdapters | ExpertAdapters]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, LinearAdapters | ExpertAdapters))


def merged_parameters(chunks: Sequence[PackedModel]) -> dict[str, Tensor | Adapted | AdaptedExperts | Quantised]:
    """Canonical name -> parameter of this rank's base model, adapters added when a part of it is read."""
    merged: dict[int, Tensor | Adapted | AdaptedExperts | Quantised] = {}
    for module in (module for chunk in chunks for module in chunk.modules()):
        weight = quantised(module, chunks[0].config.params_dtype)
        if isinstance(adapters := getattr(module, "lora", None), ExpertAdapters):
            merged |= {id(base): adapted for base, adapted in adapters.merged(module)}
        elif adapters is not None:
            base = cast(Tensor, module.weight)
            merged[id(base)] = cast(LinearAdapters, adapters).merged(base if weight is None else weight)
        elif weight is not None:
            merged[id(weight.codes)] = weight
    return {
        name: merged.get(id(parameter), parameter)
        for name, parameter in named_parameters(chunks).items()
        if not is_adapter(name) and not name.endswith(SCALE)
    }
