"""Rules that assemble a tensor of a Megatron layer from Hugging Face tensors, for any tensor-parallel size.

`weight_map.py` applies a family's rules to the tensors of a rank. Pure arithmetic; names are relative to the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megappo.models.arch import ModelArch
from megappo.models.pieces import Box

Shape = tuple[int, ...]
# (HF tensor, its box, row and column in the local tensor)
Part = tuple[str, Box, int, int]


class Cut(NamedTuple):
    """Cut of a Hugging Face tensor over tp ranks."""

    dim: int | None  # None: every rank has a copy
    by_heads: bool = False  # a copy that sees only its rank's heads, so its gradient is a part of the sum


class Rule(Protocol):
    """One local tensor of a layer in terms of Hugging Face tensors. Sharded over tp ranks, an expert's over etp ranks."""

    @property
    def local(self) -> str: ...

    @property
    def cut(self) -> Cut:
        """Cut of each of its Hugging Face tensors."""
        ...

    def hf(self, arch: ModelArch) -> dict[str, Shape]: ...

    def shape(self, arch: ModelArch, tp: int) -> Shape: ...

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]: ...


@dataclass(frozen=True)
class Norm:
    """Norm weight, the same on every tp rank; `size` is a field of the architecture."""

    local: str
    name: str
    size: str = "hidden_size"

    @property
    def cut(self) -> Cut:
        return Cut(None, by_heads=self.size == "head_dim")

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        return {self.name: (getattr(arch, self.size),)}

    def shape(self, arch: ModelArch, tp: int) -> Shape:
        return (getattr(arch, self.size),)

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]:
        yield self.name, Box(0, getattr(arch, self.size), 0, 1), 0, 0


@dataclass(frozen=True)
class Router:
    """Router weight, one row per expert, the same on every rank."""

    local: str
    name: str
    cut = Cut(None)

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        return {self.name: self.shape(arch, 1)}

    def shape(self, arch: ModelArch, tp: int) -> Shape:
        assert arch.moe is not None
        return arch.moe.num_experts, arch.hidden_size

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]:
        rows, cols = self.shape(arch, tp)
        yield self.name, Box(0, rows, 0, cols), 0, 0


@dataclass(frozen=True)
class Qkv:
    """Column-parallel projection, rows ordered by KV group: [its query heads | its key head | its value head]."""

    local: str
    query: str
    key: str
    value: str
    bias: bool = False
    cut = Cut(0)

    def _cols(self, arch: ModelArch) -> tuple[int, ...]:
        return () if self.bias else (arch.hidden_size,)

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        rows, kv_rows = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        return {name: (n, *self._cols(arch)) for name, n in ((self.query, rows), (self.key, kv_rows), (self.value, kv_rows))}

    def shape(self, arch: ModelArch, tp: int) -> Shape:
        return ((arch.num_heads + 2 * arch.num_kv_heads) // tp * arch.head_dim, *self._cols(arch))

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]:
        cols = 1 if self.bias else arch.hidden_size
        query_rows, row = arch.heads_per_group * arch.head_dim, 0
        groups = arch.num_kv_heads // tp
        for group in range(rank * groups, (rank + 1) * groups):
            for name, rows in ((self.query, query_rows), (self.key, arch.head_dim), (self.value, arch.head_dim)):
                yield name, Box(group * rows, (group + 1) * rows, 0, cols), row, 0
                row += rows


@dataclass(frozen=True)
class GateUp:
    """Column-parallel SwiGLU input: this rank's rows of the gate above its rows of the up projection."""

    local: str
    gate: str
    up: str
    outputs: str = "ffn"
    cut = Cut(0)

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        return {name: (_width(arch, self.outputs), arch.hidden_size) for name in (self.gate, self.up)}

    def shape(self, arch: ModelArch, tp: int) -> Shape:
        return 2 * _width(arch, self.outputs) // tp, arch.hidden_size

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]:
        rows = _width(arch, self.outputs) // tp
        for index, name in enumerate((self.gate, self.up)):
            yield name, Box(rank * rows, (rank + 1) * rows, 0, arch.hidden_size), index * rows, 0


@dataclass(frozen=True)
class RowParallel:
    """Output projection with input columns sharded over tp; `inputs` says which columns (`_width`)."""

    local: str
    name: str
    inputs: str
    cut = Cut(1)

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        return {self.name: (arch.hidden_size, _width(arch, self.inputs))}

    def shape(self, arch: ModelArch, tp: int) -> Shape:
        return arch.hidden_size, _width(arch, self.inputs) // tp

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]:
        cols = _width(arch, self.inputs) // tp
        yield self.name, Box(0, arch.hidden_size, rank * cols, (rank + 1) * cols), 0, 0


def _width(arch: ModelArch, what: str) -> int:
    if what == "expert":
        assert arch.moe is not None
        return arch.moe.ffn_size
    return {"heads": arch.num_heads * arch.head_dim, "ffn": arch.ffn_size}[what]


MLP: tuple[Rule, ...] = (
    GateUp("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    RowParallel("mlp.linear_fc2.weight", "mlp.down_proj.weight", "ffn"),
)
PRE_NORM_LAYER: tuple[Rule, ...] = (
    Norm("input_layernorm.weight", "input_layernorm.weight"),
    Qkv("self_attention.linear_qkv.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    RowParallel("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "heads"),
    Norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    *MLP,
)
"""The layer of llama: a norm before attention and one before the MLP, no biases."""
QKV_BIAS: tuple[Rule, ...] = (
    Qkv("self_attention.linear_qkv.bias", "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", bias=True),
)
HEAD_NORMS: tuple[Rule, ...] = (
    Norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head_dim"),
    Norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head_dim"),
)
