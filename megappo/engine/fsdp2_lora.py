"""Low-rank adapters of transformers' own classes under FSDP2: the adapters of a model, their start, and their forward pass.

Under tensor parallel an adapter is cut as its module's weight (`lora_shards.py`) and needs no exchange of its own: A of a
column-parallel linear reads the input that tp ranks share, B of a row-parallel one adds to the partial sum of the output. The copy
that every tp rank has, of A or B, then has a part of its gradient on each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from megappo.config.role_sections import LoraConfig
from megappo.models.arch import ModelArch
from megappo.models.int8_linear import Int8Linear
from megappo.models.lora import ADAPTER_A, adapted_modules, adapter_shapes, initial_a, scaling, seed_of, tensors_to_adapt
from megappo.models.lora_shards import adapter_cuts
from megappo.models.pieces import Piece, PieceMap
from megappo.models.row_shards import plain_piece_map
from megappo.models.weight_rules import Cut, Shape
from megappo.parallel.layout import ParallelLayout


class Adapters:
    """Adapters of a model. seed: of the run. ValueError for targets that the model does not have.
    modules: name -> (out, in) of adapted modules. cuts: of the adapters' tensors over tp. scaling: of B A."""

    def __init__(self, arch: ModelArch, lora: LoraConfig, layout: ParallelLayout, seed: int) -> None:
        self.modules = adapted_modules(tensors_to_adapt(arch), lora.targets)
        self.cuts = adapter_cuts(arch, self.modules)
        self.lora, self.scaling, self._layout, self._seed = lora, scaling(lora), layout, seed
        self.are_on, self.dropout = True, 0.0

    def add_to(self, model: torch.nn.Module) -> None:
        """Add parameters `lora_A.weight` and `lora_B.weight` in fp32 to each module; its own keep their names.
        model: on the meta device, after `tensor_parallel.cut_over_tp`, whose hooks a module keeps."""
        for name in self.modules:
            linear = model.get_submodule(name)
            assert isinstance(linear, torch.nn.Linear), f"{name} is a {type(linear).__name__}"
            # Change the class of the object, as `fully_shard` does: the hooks of tensor parallel stay, and all layers run the same
            # code, which torch.compile compiles once.
            kind = Int8LoraLinear if isinstance(linear, Int8Linear) else LoraLinear
            cast(Any, linear).__class__ = kind
            cast(LoraLinear, linear).add(self, [self.cuts[f"{name}.{part}.weight"] for part in ("lora_A", "lora_B")])

    def start(self, local: Mapping[str, Tensor], pieces: Iterable[Piece]) -> None:
        """Fill this rank's parts (`pieces`) of all adapters: A with noise from the seed, B with zeros."""
        for piece in pieces:
            if piece.hf.endswith(ADAPTER_A):
                module, box = piece.hf.removesuffix(ADAPTER_A), piece.box
                whole = initial_a(module, self.modules[module][1], self.lora.rank, self._seed)
                local[piece.hf].copy_(whole[box.r0 : box.r1, box.c0 : box.c1])
            else:
                local[piece.hf].zero_()

    def pieces(self) -> PieceMap:
        """Rectangles of the adapters' tensors at every position of the layout."""
        return plain_piece_map(self.shapes, self.cuts, self._layout)

    @property
    def copied(self) -> set[str]:
        """Tensors of which every tp rank has a copy, with the gradient of its part of the linear."""
        return {name for name, cut in self.cuts.items() if cut.dim is None}

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of the adapters' tensors by name."""
        return adapter_shapes(self.modules, self.lora.rank)

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


class Int8LoraLinear(LoraLinear, Int8Linear):
    """`LoraLinear` whose base weight is in 8 bits."""


def _local(part: torch.nn.Linear) -> Tensor:
    weight = part.weight
    return weight.to_local() if isinstance(weight, DTensor) else weight
