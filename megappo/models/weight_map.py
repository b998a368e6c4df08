"""Weight map of all model families: the place of every rectangle of a Hugging Face tensor in a Megatron rank.

Import, export, the bridge and the memory plan all read the rules of the family through it. Pure arithmetic. Hugging Face names
are those of the text-only architecture (`model.layers.0...`); `hf_import.py` knows other spellings. Outside the layers all
families have the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

from megappo.models.arch import ModelArch, check_ep, check_tp, padded_vocab, vocab_shard
from megappo.models.families.registry import FAMILIES
from megappo.models.pieces import Box, Piece
from megappo.models.weight_rules import Rule, Shape
from megappo.parallel.layout import Coordinates, ParallelLayout

EMBEDDING, FINAL_NORM, OUTPUT, VALUE_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "score.weight"
LOCAL_EMBEDDING, LOCAL_FINAL_NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
LOCAL_OUTPUT, LOCAL_VALUE_HEAD = "output_layer.weight", "value_head.weight"


def hf_layer(layer: int) -> str:
    return f"model.layers.{layer}."


def local_layer(layer: int) -> str:
    """Prefix of a layer's parameters. layer: global number over all stages and chunks, from 0."""
    return f"decoder.layers.{layer}."


def layer_rules(arch: ModelArch, layer: int) -> tuple[Rule, ...]:
    """Rules of a layer without those of its experts (see `expert_rules`)."""
    return FAMILIES[arch.family].layer_rules(arch.is_sparse(layer))


def expert_rules(arch: ModelArch, expert: int) -> tuple[Rule, ...]:
    """Rules of one expert of a layer. expert: global number, from 0."""
    experts = FAMILIES[arch.family].experts
    assert experts is not None, f"{arch.family} has no experts"
    return experts.rules(expert)


def rank_experts(arch: ModelArch, ep: int, ep_rank: int) -> range:
    """Numbers of the experts that an ep rank holds of every sparse layer: contiguous blocks, as Megatron's."""
    assert arch.moe is not None
    mine = arch.moe.num_experts // ep
    return range(ep_rank * mine, (ep_rank + 1) * mine)


def _rank_rules(arch: ModelArch, layout: ParallelLayout, at: Coordinates, layer: int) -> Iterator[tuple[Rule, int, int]]:
    """(rule, number of ranks that shard its tensor, this rank's index among them) of every tensor of a layer on a rank."""
    for rule in layer_rules(arch, layer):
        yield rule, layout.tp, at.tp
    if arch.is_sparse(layer):
        for expert in rank_experts(arch, layout.ep, at.ep):
            for rule in expert_rules(arch, expert):
                yield rule, layout.etp, at.etp


def hf_tensors(arch: ModelArch, value_head: bool = False) -> dict[str, Shape]:
    """Every tensor of the Hugging Face checkpoint by name; a value model has `score.weight` in place of the output projection."""
    tensors: dict[str, Shape] = {EMBEDDING: (arch.vocab_size, arch.hidden_size)}
    for layer in range(arch.num_layers):
        rules = list(layer_rules(arch, layer))
        if arch.is_sparse(layer):
            rules += [rule for expert in rank_experts(arch, 1, 0) for rule in expert_rules(arch, expert)]
        for rule in rules:
            tensors.update({hf_layer(layer) + name: shape for name, shape in rule.hf(arch).items()})
    tensors[FINAL_NORM] = (arch.hidden_size,)
    if value_head:
        tensors[VALUE_HEAD] = (1, arch.hidden_size)
    elif not arch.tied_embeddings:
        tensors[OUTPUT] = (arch.vocab_size, arch.hidden_size)
    return tensors


def local_shapes(arch: ModelArch, layout: ParallelLayout, rank: int, value_head: bool = False) -> dict[str, Shape]:
    """Parameters of one rank by canonical name (`naming.py`). ValueError if the layout does not fit the architecture."""
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
        elif not arch.tied_embeddings or layout.pp > 1:  # tied: the last stage of a pipeline has its own copy
            shapes[LOCAL_OUTPUT] = vocab_rows
    return shapes


def megatron_pieces(arch: ModelArch, layout: ParallelLayout, rank: int, value_head: bool = False) -> list[Piece]:
    """Place of every Hugging Face rectangle in the parameters of one rank, by canonical name (`naming.py`).

    Elements of a local tensor that no piece covers are vocabulary padding, which is zero. With tied embeddings and pp > 1 the
    last stage holds its own copy of the embedding as output layer. ValueError if the layout does not fit the architecture.
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


def pieces_by_rank(arch: ModelArch, layout: ParallelLayout, value_head: bool = False) -> dict[int, list[Piece]]:
    """`megatron_pieces` of every rank of the layout. Ranks that hold copies (dp, cp) share one list."""
    by_place: dict[tuple[int, int, int, int], list[Piece]] = {}
    pieces = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        place = (at.tp, at.pp, at.etp, at.ep)
        if place not in by_place:
            by_place[place] = megatron_pieces(arch, layout, rank, value_head)
        pieces[rank] = by_place[place]
    return pieces


def _vocab_piece(arch: ModelArch, tp: int, tp_rank: int, hf: str, local: str) -> list[Piece]:
    start, rows = vocab_shard(arch, tp, tp_rank)
    # A rank with nothing but vocabulary padding has no piece.
    return [Piece(hf, Box(start, start + rows, 0, arch.hidden_size), local, 0, 0)] if rows else []
