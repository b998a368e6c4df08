"""One weight map per model family: which rectangle of which Hugging Face tensor stands where in a Megatron rank.

A family is a tuple of rules; import, export, the bridge and the memory plan all read the same rules. Pure arithmetic. Hugging
Face names are those of the text-only architecture (`model.layers.0...`); `hf_import.py` knows how other files spell them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from megappo.models.arch import ModelArch, check_ep, check_tp, padded_vocab, vocab_shard
from megappo.models.pieces import Box, Piece
from megappo.parallel.layout import Coordinates, ParallelLayout

Shape = tuple[int, ...]
# (HF tensor, its box, row and column in the local tensor); names are relative to the layer
Part = tuple[str, Box, int, int]


class Rule(Protocol):
    """How one local tensor of a layer is made of Hugging Face tensors. It is cut over tp ranks, an expert's over etp ranks."""

    local: str

    def hf(self, arch: ModelArch) -> dict[str, Shape]: ...

    def shape(self, arch: ModelArch, tp: int) -> Shape: ...

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]: ...


@dataclass(frozen=True)
class Norm:
    """The same vector on every tp rank; `size` is a field of the architecture."""

    local: str
    name: str
    size: str = "hidden_size"

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        return {self.name: (getattr(arch, self.size),)}

    def shape(self, arch: ModelArch, tp: int) -> Shape:
        return (getattr(arch, self.size),)

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]:
        yield self.name, Box(0, getattr(arch, self.size), 0, 1), 0, 0


@dataclass(frozen=True)
class Router:
    """One row per expert, the same on every rank."""

    local: str
    name: str

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
    """Output projection whose input columns are cut over tp; `inputs` names what the columns are."""

    local: str
    name: str
    inputs: str

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        return {self.name: (arch.hidden_size, _width(arch, self.inputs))}

    def shape(self, arch: ModelArch, tp: int) -> Shape:
        return arch.hidden_size, _width(arch, self.inputs) // tp

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]:
        cols = _width(arch, self.inputs) // tp
        yield self.name, Box(0, arch.hidden_size, rank * cols, (rank + 1) * cols), 0, 0


def _width(arch: ModelArch, what: str) -> int:
    """Columns inside a block: all attention heads, the MLP's, or one expert's."""
    if what == "expert":
        assert arch.moe is not None
        return arch.moe.ffn_size
    return {"heads": arch.num_heads * arch.head_dim, "ffn": arch.ffn_size}[what]


# --------------------------------------------------------------------------------------------------------------- families

MLP: tuple[Rule, ...] = (
    GateUp("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    RowParallel("mlp.linear_fc2.weight", "mlp.down_proj.weight", "ffn"),
)
LLAMA: tuple[Rule, ...] = (
    Norm("input_layernorm.weight", "input_layernorm.weight"),
    Qkv("self_attention.linear_qkv.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    RowParallel("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "heads"),
    Norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    *MLP,
)
QWEN2: tuple[Rule, ...] = LLAMA + (
    Qkv("self_attention.linear_qkv.bias", "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", bias=True),
)
QWEN3: tuple[Rule, ...] = LLAMA + (
    Norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head_dim"),
    Norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head_dim"),
)
# Mistral and Ministral 3 differ from llama in attention arithmetic only; these are the dense layers of qwen3_moe.
FAMILIES: dict[str, tuple[Rule, ...]] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3,
    "mistral": LLAMA,
    "ministral3": LLAMA,
}
ROUTER = Router("mlp.router.weight", "mlp.gate.weight")

EMBEDDING, FINAL_NORM, OUTPUT, VALUE_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "score.weight"
LOCAL_EMBEDDING, LOCAL_FINAL_NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
LOCAL_OUTPUT, LOCAL_VALUE_HEAD = "output_layer.weight", "value_head.weight"


def hf_layer(layer: int) -> str:
    return f"model.layers.{layer}."


def local_layer(layer: int) -> str:
    """Prefix of a layer's parameters; the number is global, whatever stage and chunk hold it."""
    return f"decoder.layers.{layer}."


def layer_rules(arch: ModelArch, layer: int) -> tuple[Rule, ...]:
    """Rules of a layer without those of its experts (see `expert_rules`)."""
    rules = FAMILIES[arch.family]
    return tuple(rule for rule in rules if rule not in MLP) + (ROUTER,) if arch.is_sparse(layer) else rules


def expert_rules(expert: int) -> tuple[Rule, ...]:
    """Rules of one expert of a layer; its number is global, whatever rank holds it."""
    hf, local = f"mlp.experts.{expert}.", f"mlp.experts.local_experts.{expert}."
    return (
        GateUp(local + "linear_fc1.weight", hf + "gate_proj.weight", hf + "up_proj.weight", "expert"),
        RowParallel(local + "linear_fc2.weight", hf + "down_proj.weight", "expert"),
    )


def rank_experts(arch: ModelArch, ep: int, ep_rank: int) -> range:
    """Numbers of the experts that an ep rank holds of every sparse layer: contiguous blocks, as Megatron's."""
    assert arch.moe is not None
    mine = arch.moe.num_experts // ep
    return range(ep_rank * mine, (ep_rank + 1) * mine)


def _rank_rules(arch: ModelArch, layout: ParallelLayout, at: Coordinates, layer: int) -> Iterator[tuple[Rule, int, int]]:
    """(rule, over how many ranks its tensor is cut, this rank among them) of every tensor of a layer that a rank holds."""
    for rule in layer_rules(arch, layer):
        yield rule, layout.tp, at.tp
    if arch.is_sparse(layer):
        for expert in rank_experts(arch, layout.ep, at.ep):
            for rule in expert_rules(expert):
                yield rule, layout.etp, at.etp


def hf_tensors(arch: ModelArch, value_head: bool = False) -> dict[str, Shape]:
    """Every tensor of the Hugging Face checkpoint; a value model has `score.weight` in place of the output projection."""
    tensors: dict[str, Shape] = {EMBEDDING: (arch.vocab_size, arch.hidden_size)}
    for layer in range(arch.num_layers):
        rules = list(layer_rules(arch, layer))
        if arch.is_sparse(layer):
            rules += [rule for expert in rank_experts(arch, 1, 0) for rule in expert_rules(expert)]
        for rule in rules:
            tensors.update({hf_layer(layer) + name: shape for name, shape in rule.hf(arch).items()})
    tensors[FINAL_NORM] = (arch.hidden_size,)
    if value_head:
        tensors[VALUE_HEAD] = (1, arch.hidden_size)
    elif not arch.tied_embeddings:
        tensors[OUTPUT] = (arch.vocab_size, arch.hidden_size)
    return tensors


def local_shapes(arch: ModelArch, layout: ParallelLayout, rank: int, value_head: bool = False) -> dict[str, Shape]:
    """Parameters of one rank by canonical name (`naming.py`). ValueError where the layout does not fit the architecture."""
    check_tp(arch, layout.tp)
    check_ep(arch, layout.ep, layout.etp)
    at = layout.coordinates(rank)
    vocab_rows = (padded_vocab(arch, layout.tp) // layout.tp, arch.hidden_size)
    shapes: dict[str, Shape] = {}
    if at.pp == 0:
        shapes[LOCAL_EMBEDDING] = vocab_rows
    for layer in layout.stage_layers(arch.num_layers, at.pp):
        for rule, ranks, _ in _rank_rules(arch, layout, at, layer):
            shapes[local_layer(layer) + rule.local] = rule.shape(arch, ranks)
    if at.pp == layout.pp - 1:
        shapes[LOCAL_FINAL_NORM] = (arch.hidden_size,)
        if value_head:
            shapes[LOCAL_VALUE_HEAD] = (1, arch.hidden_size)
        elif not arch.tied_embeddings or layout.pp > 1:
            shapes[LOCAL_OUTPUT] = vocab_rows
    return shapes


def megatron_pieces(arch: ModelArch, layout: ParallelLayout, rank: int, value_head: bool = False) -> list[Piece]:
    """Where every Hugging Face rectangle stands in the parameters of one rank, by their canonical names (`naming.py`).

    Elements of a local tensor that no piece covers are vocabulary padding, which is zero. With tied embeddings and pp > 1 the
    last stage holds its own copy of the embedding as output layer. ValueError where the layout does not fit the architecture.
    """
    check_tp(arch, layout.tp)
    check_ep(arch, layout.ep, layout.etp)
    at = layout.coordinates(rank)
    pieces: list[Piece] = []
    if at.pp == 0:
        pieces += _vocab_piece(arch, layout.tp, at.tp, EMBEDDING, LOCAL_EMBEDDING)
    for layer in layout.stage_layers(arch.num_layers, at.pp):
        hf, local = hf_layer(layer), local_layer(layer)
        for rule, ranks, mine in _rank_rules(arch, layout, at, layer):
            parts = rule.parts(arch, ranks, mine)
            pieces += [Piece(hf + name, box, local + rule.local, row, col) for name, box, row, col in parts]
    if at.pp == layout.pp - 1:
        pieces.append(Piece(FINAL_NORM, Box(0, arch.hidden_size, 0, 1), LOCAL_FINAL_NORM, 0, 0))
        if value_head:
            pieces.append(Piece(VALUE_HEAD, Box(0, 1, 0, arch.hidden_size), LOCAL_VALUE_HEAD, 0, 0))
        elif not arch.tied_embeddings:
            pieces += _vocab_piece(arch, layout.tp, at.tp, OUTPUT, LOCAL_OUTPUT)
        elif layout.pp > 1:
            pieces += _vocab_piece(arch, layout.tp, at.tp, EMBEDDING, LOCAL_OUTPUT)
    return pieces


def _vocab_piece(arch: ModelArch, tp: int, tp_rank: int, hf: str, local: str) -> list[Piece]:
    start, rows = vocab_shard(arch, tp, tp_rank)
    # A rank that holds padding only has no piece.
    return [Piece(hf, Box(start, start + rows, 0, arch.hidden_size), local, 0, 0)] if rows else []
