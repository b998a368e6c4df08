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

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        """Shapes of its tensors; none, or an empty one, if a model of this family may be without them and this one is."""
        ...

    def shape(self, arch: ModelArch, tp: int) -> Shape: ...

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]: ...


@dataclass(frozen=True)
class Matrix:
    """A matrix, or without `cols` a vector, that tp cuts along `dim` into equal parts; dim None: every rank has a copy.
    rows and cols are names of `_width`. of_heads: a norm of heads, which a model may be without."""

    local: str
    name: str
    rows: str
    cols: str | None = None
    dim: int | None = None
    of_heads: bool = False

    @property
    def cut(self) -> Cut:
        return Cut(self.dim, by_heads=self.of_heads)

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        return {} if self.of_heads and not arch.qk_norm else {self.name: self.shape(arch, 1)}

    def shape(self, arch: ModelArch, tp: int) -> Shape:
        sizes = [_width(arch, size) for size in (self.rows, self.cols) if size is not None]
        return tuple(size // tp if axis == self.dim else size for axis, size in enumerate(sizes))

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]:
        rows, cols = (*self.shape(arch, tp), 1)[:2]
        r, c = (rank * size if axis == self.dim else 0 for axis, size in enumerate((rows, cols)))
        yield self.name, Box(r, r + rows, c, c + cols), 0, 0


@dataclass(frozen=True)
class Qkv:
    """Column-parallel projection, rows ordered by KV group: [its query heads | its key head | its value head]. A gate of the output
    is part of its query head.
    With fewer groups than tp ranks each has a part of the query heads, and a copy of the key and value head."""

    local: str
    query: str
    key: str
    value: str
    bias: bool = False
    cut = Cut(0)

    def _cols(self, arch: ModelArch) -> tuple[int, ...]:
        return () if self.bias else (arch.hidden_size,)

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        if self.bias and not arch.qkv_bias:
            return {}
        rows, kv_rows = arch.num_heads * arch.query_rows, arch.num_kv_heads * arch.head_dim
        return {name: (n, *self._cols(arch)) for name, n in ((self.query, rows), (self.key, kv_rows), (self.value, kv_rows))}

    def shape(self, arch: ModelArch, tp: int) -> Shape:
        kv_heads = max(arch.num_kv_heads, tp)
        return (arch.num_heads // tp * arch.query_rows + 2 * kv_heads // tp * arch.head_dim, *self._cols(arch))

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]:
        cols = 1 if self.bias else arch.hidden_size
        if arch.kv_copies(tp) > 1:  # some query heads of a group, and a copy of its key and value head
            rows, group = arch.num_heads // tp * arch.query_rows, rank * arch.num_kv_heads // tp
            row = 0
            kv = ((name, group, arch.head_dim) for name in (self.key, self.value))
            for name, index, count in ((self.query, rank, rows), *kv):
                yield name, Box(index * count, (index + 1) * count, 0, cols), row, 0
                row += count
            return
        query_rows, row = arch.heads_per_group * arch.query_rows, 0
        groups = arch.num_kv_heads // tp
        for group in range(rank * groups, (rank + 1) * groups):
            for name, rows in ((self.query, query_rows), (self.key, arch.head_dim), (self.value, arch.head_dim)):
                yield name, Box(group * rows, (group + 1) * rows, 0, cols), row, 0
                row += rows


def row_parallel(local: str, name: str, inputs: str) -> Matrix:
    """An output projection, whose input columns tp cuts. inputs: names them in `_width`."""
    return Matrix(local, name, "hidden", inputs, 1)


@dataclass(frozen=True)
class Rows:
    """Column-parallel tensors, one below the other: of every block of rows this rank's part.
    tensors: (Hugging Face name, names in `_width` of its blocks). kernel: of a depthwise convolution, [rows, 1, width]."""

    local: str
    tensors: tuple[tuple[str, tuple[str, ...]], ...]
    kernel: bool = False
    cut = Cut(0)

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        columns = (1, _width(arch, "delta width")) if self.kernel else (arch.hidden_size,)
        return {name: (sum(_width(arch, block) for block in blocks), *columns) for name, blocks in self.tensors}

    def shape(self, arch: ModelArch, tp: int) -> Shape:
        shapes = list(self.hf(arch).values())
        return sum(shape[0] for shape in shapes) // tp, shapes[0][-1]

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]:
        row, columns = 0, self.shape(arch, tp)[1]
        for name, blocks in self.tensors:
            first = 0
            for block in blocks:
                rows = _width(arch, block) // tp
                start = first + rank * rows
                yield name, Box(start, start + rows, 0, columns), row, 0
                first, row = first + rows * tp, row + rows


def gate_up(local: str, gate: str, up: str, outputs: str = "ffn") -> Rows:
    """The input of a SwiGLU: this rank's rows of the gate above its rows of the up projection."""
    return Rows(local, ((gate, (outputs,)), (up, (outputs,))))


@dataclass(frozen=True)
class OfStack:
    """One expert's matrix [rows, cols], or without `rows` its vector as a row, in a checkpoint tensor of all experts of a layer;
    etp cuts `dim`. rows and cols are names of `_width`."""

    local: str
    name: str
    expert: int
    rows: str | None
    cols: str
    dim: int
    cut = Cut(None)

    def _size(self, arch: ModelArch) -> tuple[int, int]:
        return 1 if self.rows is None else _width(arch, self.rows), _width(arch, self.cols)

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        assert arch.moe is not None
        rows, cols = self._size(arch)
        return {self.name: (arch.moe.num_experts, cols) if self.rows is None else (arch.moe.num_experts, rows, cols)}

    def shape(self, arch: ModelArch, tp: int) -> Shape:
        return tuple(size // tp if axis == self.dim else size for axis, size in enumerate(self._size(arch)))

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]:
        rows, cols = self.shape(arch, tp)
        r, c = (rank * size if axis == self.dim else 0 for axis, size in enumerate((rows, cols)))
        r += self.expert * self._size(arch)[0]  # seen as a matrix, the experts lie one below the other
        yield self.name, Box(r, r + rows, c, c + cols), 0, 0


def _width(arch: ModelArch, what: str) -> int:
    if what in ("expert", "gate and up", "experts", "shared"):
        assert arch.moe is not None
        ffn = arch.moe.ffn_size
        return {"expert": ffn, "gate and up": 2 * ffn, "experts": arch.moe.num_experts, "shared": arch.moe.shared_size}[what]
    if what.startswith("latent"):
        assert arch.latent is not None
        q_rank, kv_rank, nope, rope, value = arch.latent
        queries, heads = arch.num_heads * (nope + rope), arch.num_heads
        of_queries = {"latent q": q_rank or 0, "latent queries": queries, "latent q alone": 0 if q_rank else queries}
        return {**of_queries, "latent kv": kv_rank, "latent down": kv_rank + rope, "latent up": heads * (nope + value)}[what]
    if what.startswith("delta"):
        assert arch.delta is not None
        keys, values, heads = arch.delta.keys, arch.delta.values, arch.delta.value_heads
        of_projections = {"delta qkvz": 2 * (keys + values), "delta ba": 2 * heads, "delta keys": keys, "delta values": values}
        return {**of_projections, "delta heads": heads, "delta head": arch.delta.value_dim, "delta width": arch.delta.width}[what]
    sizes = {"heads": arch.num_heads * arch.head_dim, "each head": arch.num_heads, "channels": arch.head_dim, "one": 1}
    return {**sizes, "ffn": arch.ffn_size, "hidden": arch.hidden_size}[what]


MLP: tuple[Rule, ...] = (
    gate_up("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    row_parallel("mlp.linear_fc2.weight", "mlp.down_proj.weight", "ffn"),
)
PRE_NORM_LAYER: tuple[Rule, ...] = (
    Matrix("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    Qkv("self_attention.linear_qkv.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    row_parallel("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "heads"),
    Matrix("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
    *MLP,
)
"""The layer of llama: a norm before attention and one before the MLP, no biases."""
SANDWICH_LAYER: tuple[Rule, ...] = (
    *PRE_NORM_LAYER[:3],
    Matrix("post_self_attn_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
    Matrix("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight", "hidden"),
    *MLP,
    Matrix("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight", "hidden"),
)
"""The layer of Gemma 2 and 3: norms before and behind attention and the MLP."""
QKV_BIAS: tuple[Rule, ...] = (
    Qkv("self_attention.linear_qkv.bias", "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", bias=True),
)
OUTPUT_BIAS = Matrix("self_attention.linear_proj.bias", "self_attn.o_proj.bias", "hidden")
SINKS = Matrix("self_attention.core_attention.sinks", "self_attn.sinks", "each head", None, 0)
HEAD_NORMS: tuple[Rule, ...] = (
    Matrix("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "channels", of_heads=True),
    Matrix("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "channels", of_heads=True),
)
ROUTER = Matrix("mlp.router.weight", "mlp.gate.weight", "experts", "hidden")
CORRECTION = Matrix("mlp.router.correction", "mlp.gate.e_score_correction_bias", "experts")


def _shared(module: str) -> tuple[Rule, ...]:
    local = "mlp.shared_experts.linear_fc"
    gate, up, down = (f"mlp.{module}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return gate_up(f"{local}1.weight", gate, up, "shared"), row_parallel(f"{local}2.weight", down, "shared")


SHARED_EXPERTS = _shared("shared_experts")
_ATTENTION = "self_attention."
LATENT_LAYER: tuple[Rule, ...] = (
    *(rule for rule in PRE_NORM_LAYER if not rule.local.startswith(_ATTENTION)),
    Matrix(_ATTENTION + "linear_q_proj.weight", "self_attn.q_proj.weight", "latent q alone", "hidden", 0),
    Matrix(_ATTENTION + "linear_q_down_proj.weight", "self_attn.q_a_proj.weight", "latent q", "hidden"),
    Matrix(_ATTENTION + "q_layernorm.weight", "self_attn.q_a_layernorm.weight", "latent q"),
    Matrix(_ATTENTION + "linear_q_up_proj.weight", "self_attn.q_b_proj.weight", "latent queries", "latent q", 0),
    Matrix(_ATTENTION + "linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "latent down", "hidden"),
    Matrix(_ATTENTION + "kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", "latent kv"),
    Matrix(_ATTENTION + "linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", "latent up", "latent kv", 0),
    row_parallel(_ATTENTION + "linear_proj.weight", "self_attn.o_proj.weight", "heads"),
)
"""The layer of DeepSeek-V3 (`models/latent.py`)."""
DELTA_NET: tuple[Rule, ...] = (
    Rows(_ATTENTION + "conv1d.weight", (("linear_attn.conv1d.weight", ("delta keys", "delta keys", "delta values")),), kernel=True),
    Matrix(_ATTENTION + "A_log", "linear_attn.A_log", "delta heads", None, 0),
    Matrix(_ATTENTION + "dt_bias", "linear_attn.dt_bias", "delta heads", None, 0),
    Matrix(_ATTENTION + "norm.weight", "linear_attn.norm.weight", "delta head"),
    row_parallel(_ATTENTION + "out_proj.weight", "linear_attn.out_proj.weight", "delta values"),
)
"""A gated delta net without its input projections (`models/delta.py`)."""
GATED_SHARED_EXPERT: tuple[Rule, ...] = (
    *_shared("shared_expert"),
    Matrix("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", "one", "hidden"),
)
