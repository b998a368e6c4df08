"""Low-rank adapters of transformers' own classes under FSDP2: the layer, the adapters of a model, their start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from megappo.config.role_sections import LoraConfig
from megappo.models.lora import ADAPTER_A, adapted_modules, adapter_shapes, initial_a, scaling, seed_of
from megappo.models.pieces import Piece
from megappo.models.weight_rules import Shape


class Adapters:
    """Adapters of a model with these tensors. modules: name -> (out, in) of those that have one. scaling: of B A. seed: of the run.

    Inside `off` the model is its base. Inside `dropping` inputs of A are dropped with the probability of the configuration.
    ValueError for targets that the model does not have.
    """

    def __init__(self, tensors: Mapping[str, Shape], lora: LoraConfig, seed: int) -> None:
        self.modules = adapted_modules(tensors, lora.targets)
        self.lora, self.scaling, self._seed = lora, scaling(lora), seed
        self.are_on, self.dropout = True, 0.0

    def add_to(self, model: torch.nn.Module) -> None:
        """Put an adapter into each module. model: on the meta device. ValueError for a module that is not torch's linear layer."""
        for name in self.modules:
            base = model.get_submodule(name)
            if type(base) is not torch.nn.Linear:
                raise ValueError(f"{name} is a {type(base).__name__}, not a linear layer; leave it out of lora.targets")
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, LoraLinear(base, self))

    def start(self, local: Mapping[str, Tensor], pieces: Iterable[Piece]) -> None:
        """Fill this rank's rows of all adapters, which are `pieces`: A with noise from the seed, B with zeros."""
        for piece in pieces:
            if piece.hf.endswith(ADAPTER_A):
                module = piece.hf.removesuffix(ADAPTER_A)
                whole = initial_a(module, self.modules[module][1], self.lora.rank, self._seed)
                local[piece.hf].copy_(whole[piece.box.r0 : piece.box.r1])
            else:
                local[piece.hf].zero_()

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of all tensors of the adapters, by name."""
        return adapter_shapes(self.modules, self.lora.rank)

    @contextmanager
    def off(self) -> Iterator[None]:
        self.are_on = False
        try:
            yield
        finally:
            self.are_on = True

    @contextmanager
    def dropping(self, step: int, rank: int, device: torch.device) -> Iterator[None]:
        """Around a training pass. step: number of the pass; with rank and seed it gives the masks, so that a resumed run has the
        same."""
        if self.lora.dropout == 0:
            yield
            return
        self.dropout = self.lora.dropout
        try:
            # Torch's own generator, which recomputation of activations knows how to rewind.
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed_of(self._seed, f"dropout/{step}/{rank}"))
                yield
        finally:
            self.dropout = 0.0


class LoraLinear(torch.nn.Linear):
    """`base` with an adapter: x W^T + bias + scaling * (x A^T) B^T. W keeps its name; the adapter is `lora_A` and `lora_B`.

    A and B are fp32 parameters, which FSDP2 gathers in the type of computation, like W.
    """

    def __init__(self, base: torch.nn.Linear, adapters: Adapters) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight, base.bias
        rank, made = adapters.lora.rank, {"bias": False, "device": "meta", "dtype": torch.float32}
        self.lora_A = torch.nn.Linear(base.in_features, rank, **made)
        self.lora_B = torch.nn.Linear(rank, base.out_features, **made)
        self._adapters = adapters

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if not self._adapters.are_on:
            return output
        dropout = self._adapters.dropout
        kept = torch.nn.functional.dropout(input, dropout) if dropout > 0 else input
        return output + self._adapters.scaling * self.lora_B(self.lora_A(kept))
