"""One weight map per model family: which rectangle of which Hugging Face tensor stands where in a Megatron rank.

A family is a tuple of rules; import, export, the bridge and the memory plan all read the same rules. Pure arithmetic. Hugging
Face names are those of the text-only architecture (`model.layers.0...`); `hf_import.py` knows how other files spell them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Protocol

from megappo.models.arch import ModelArch, check_tp, padded_vocab, vocab_shard
from megappo.models.pieces import Box, Piece
from megappo.parallel.layout import stage_layers

Shape = tuple[int, ...]
# (HF tensor, its box, row and column in the local tensor); names are relative to the layer
Part = tuple[str, Box, int, int]


class Rule(Protocol):
    """How one local tensor of a layer is made of Hugging Face tensors."""

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

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        return {name: (arch.ffn_size, arch.hidden_size) for name in (self.gate, self.up)}

    def shape(self, arch: ModelArch, tp: int) -> Shape:
        return 2 * arch.ffn_size // tp, arch.hidden_size

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]:
        rows = arch.ffn_size // tp
        for index, name in enumerate((self.gate, self.up)):
            yield name, Box(rank * rows, (rank + 1) * rows, 0, arch.hidden_size), index * rows, 0


@dataclass(frozen=True)
class RowParallel:
    """Output projection whose input columns are cut over tp; `inputs` names what the columns are."""

    local: str
    name: str
    inputs: str

    def _width(self, arch: ModelArch) -> int:
        return {"heads": arch.num_heads * arch.head_dim, "ffn": arch.ffn_size}[self.inputs]

    def hf(self, arch: ModelArch) -> dict[str, Shape]:
        return {self.name: (arch.hidden_size, self._width(arch))}

    def shape(self, arch: ModelArch, tp: int) -> Shape:
        return arch.hidden_size, self._width(arch) // tp

    def parts(self, arch: ModelArch, tp: int, rank: int) -> Iterator[Part]:
        cols = self._width(arch) // tp
        yield self.name, Box(0, arch.hidden_size, rank * cols, (rank + 1) * cols), 0, 0


# --------------------------------------------------------------------------------------------------------------- families

LLAMA: tuple[Rule, ...] = (
    Norm("input_layernorm.weight", "input_layernorm.weight"),
    Qkv("self_attention.linear_qkv.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    RowParallel("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "heads"),
    Norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    GateUp("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    RowParallel("mlp.linear_fc2.weight", "mlp.down_proj.weight", "ffn"),
)
QWEN2: tuple[Rule, ...] = LLAMA + (
    Qkv("self_attention.linear_qkv.bias", "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", bias=True),
)
QWEN3: tuple[Rule, ...] = LLAMA + (
    Norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head_dim"),
    Norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head_dim"),
)
# Mistral and Ministral 3 differ from llama in attention arithmetic only.
FAMILIES: dict[str, tuple[Rule, ...]] = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "mistral": LLAMA, "ministral3": LLAMA}

EMBEDDING, FINAL_NORM, OUTPUT, VALUE_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "score.weight"
LOCAL_EMBEDDING, LOCAL_FINAL_NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
LOCAL_OUTPUT, LOCAL_VALUE_HEAD = "output_layer.weight", "value_head.weight"


def hf_layer(layer: int) -> str:
    return f"model.layers.{layer}."


def hf_tensors(arch: ModelArch, value_head: bool = False) -> dict[str, Shape]:
    """Every tensor of the Hugging Face checkpoint; a value model has `score.weight` in place of the output projection."""
    tensors: dict[str, Shape] = {EMBEDDING: (arch.vocab_size, arch.hidden_size)}
    for layer in range(arch.num_layers):
        for rule in FAMILIES[arch.family]:
            tensors.update({hf_layer(layer) + name: shape for name, shape in rule.hf(arch).items()})
    tensors[FINAL_NORM] = (arch.hidden_size,)
    if value_head:
        tensors[VALUE_HEAD] = (1, arch.hidden_size)
    elif not arch.tied_embeddings:
        tensors[OUTPUT] = (arch.vocab_size, arch.hidden_size)
    return tensors


def local_shapes(arch: ModelArch, tp: int, pp: int, tp_rank: int, stage: int, value_head: bool = False) -> dict[str, Shape]:
    """Parameters of one rank, by the names of the built model's `named_parameters()`. ValueError where tp or pp does not fit."""
    check_tp(arch, tp)
    assert 0 <= tp_rank < tp and 0 <= stage < pp
    vocab_rows = (padded_vocab(arch, tp) // tp, arch.hidden_size)
    shapes: dict[str, Shape] = {}
    if stage == 0:
        shapes[LOCAL_EMBEDDING] = vocab_rows
    for index in range(len(stage_layers(arch.num_layers, pp, stage))):
        for rule in FAMILIES[arch.family]:
            shapes[f"decoder.layers.{index}.{rule.local}"] = rule.shape(arch, tp)
    if stage == pp - 1:
        shapes[LOCAL_FINAL_NORM] = (arch.hidden_size,)
        if value_head:
            shapes[LOCAL_VALUE_HEAD] = (1, arch.hidden_size)
        elif not arch.tied_embeddings or pp > 1:
            shapes[LOCAL_OUTPUT] = vocab_rows
    return shapes


def megatron_pieces(arch: ModelArch, tp: int, pp: int, tp_rank: int, stage: int, value_head: bool = False) -> list[Piece]:
    """Where every Hugging Face rectangle stands in the parameters of one rank.

    Elements of a local tensor that no piece covers are vocabulary padding, which is zero. With tied embeddings and pp > 1 the
    last stage holds its own copy of the embedding as output layer. ValueError where tp or pp does not fit the architecture.
    """
    check_tp(arch, tp)
    assert 0 <= tp_rank < tp and 0 <= stage < pp
    pieces: list[Piece] = []
    if stage == 0:
        pieces += _vocab_piece(arch, tp, tp_rank, EMBEDDING, LOCAL_EMBEDDING)
    parts = [(rule.local, list(rule.parts(arch, tp, tp_rank))) for rule in FAMILIES[arch.family]]
    for index, layer in enumerate(stage_layers(arch.num_layers, pp, stage)):
        hf_prefix, local_prefix = hf_layer(layer), f"decoder.layers.{index}."
        for local, rule_parts in parts:
            pieces += [Piece(hf_prefix + name, box, local_prefix + local, row, col) for name, box, row, col in rule_parts]
    if stage == pp - 1:
        pieces.append(Piece(FINAL_NORM, Box(0, arch.hidden_size, 0, 1), LOCAL_FINAL_NORM, 0, 0))
        if value_head:
            pieces.append(Piece(VALUE_HEAD, Box(0, 1, 0, arch.hidden_size), LOCAL_VALUE_HEAD, 0, 0))
        elif not arch.tied_embeddings:
            pieces += _vocab_piece(arch, tp, tp_rank, OUTPUT, LOCAL_OUTPUT)
        elif pp > 1:
            pieces += _vocab_piece(arch, tp, tp_rank, EMBEDDING, LOCAL_OUTPUT)
    return pieces


def _vocab_piece(arch: ModelArch, tp: int, tp_rank: int, hf: str, local: str) -> list[Piece]:
    start, rows = vocab_shard(arch, tp, tp_rank)
    # A rank that holds padding only has no piece.
    return [Piece(hf, Box(start, start + rows, 0, arch.hidden_size), local, 0, 0)] if rows else []
