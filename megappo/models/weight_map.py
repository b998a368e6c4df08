"""Weight map of all model families: the place of every rectangle of a Hugging Face tensor in a Megatron rank.

Import, export, the bridge and the memory plan read the rules of a family through it. Pure arithmetic. Hugging Face names are those
of the text-only architecture (`model.layers.0...`); `hf_tensors.py` knows other spellings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from megappo.models.arch import Kind, ModelArch, check_ep, check_tp, padded_vocab, vocab_shard
from megappo.models.families.registry import FAMILIES
from megappo.models.pieces import Box, Held, Piece, PieceMap, Section, shape_as_2d
from megappo.models.weight_rules import CORRECTION, Cut, Rule, Shape
from megappo.parallel.layout import Coordinates, ParallelLayout

EMBEDDING, FINAL_NORM, OUTPUT, VALUE_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "score.weight"
LOCAL_EMBEDDING, LOCAL_FINAL_NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
LOCAL_OUTPUT, LOCAL_VALUE_HEAD = "output_layer.weight", "value_head.weight"


def hf_layer(layer: int) -> str:
    return f"model.layers.{layer}."


def local_layer(layer: int) -> str:
    """Prefix of a layer's parameters. layer: global number, from 0."""
    return f"decoder.layers.{layer}."


def layer_rules(arch: ModelArch, layer: int) -> tuple[Rule, ...]:
    """Rules of a layer without those of its experts (see `expert_rules`)."""
    return _kind_rules(arch, arch.kind(layer))


@cache
def _kind_rules(arch: ModelArch, kind: Kind) -> tuple[Rule, ...]:
    rules = ((rule, rule.hf(arch).values()) for rule in FAMILIES[arch.family].layer_rules(kind))
    return tuple(rule for rule, shapes in rules if shapes and not any(0 in shape for shape in shapes))


def constants(arch: ModelArch) -> frozenset[str]:
    """Names of the checkpoint's tensors that no gradient changes: buffers of transformers' class, such as corrections of experts'
    scores. They are fp32 in a model of any dtype."""
    if arch.own:
        return frozenset(part.hf for one in arch.own if one.constant for part in one.parts)
    return frozenset(name for name in hf_tensors(arch) if name.endswith(CORRECTION.name))


def expert_rules(arch: ModelArch, expert: int) -> tuple[Rule, ...]:
    """Rules of one expert of a layer. expert: global number, from 0."""
    experts = FAMILIES[arch.family].experts
    assert experts is not None, f"{arch.family} has no experts"
    return experts.rules(expert)


def expert_linears(arch: ModelArch) -> tuple[Rule, ...]:
    """Rules of the linear layers of a layer's first expert (`Experts.linears`)."""
    experts = FAMILIES[arch.family].experts
    assert experts is not None, f"{arch.family} has no experts"
    return experts.linears(0)


def rank_experts(arch: ModelArch, ep: int, ep_rank: int) -> range:
    """Numbers of the experts that an ep rank holds of every sparse layer: contiguous blocks, like Megatron's."""
    assert arch.moe is not None
    mine = arch.moe.num_experts // ep
    return range(ep_rank * mine, (ep_rank + 1) * mine)


def all_rules(arch: ModelArch, layer: int) -> Iterator[Rule]:
    """Yield the rules of a layer, then those of all its experts."""
    yield from layer_rules(arch, layer)
    for expert in rank_experts(arch, 1, 0) if arch.kind(layer).sparse else ():
        yield from expert_rules(arch, expert)


def _rank_rules(arch: ModelArch, layout: ParallelLayout, at: Coordinates, layer: int) -> Iterator[tuple[Rule, int, int]]:
    """Yield (rule, number of ranks that shard its tensor, this rank's index among them) for every tensor of a layer on a rank."""
    for rule in layer_rules(arch, layer):
        yield rule, layout.tp, at.tp
    if arch.kind(layer).sparse:
        for expert in rank_experts(arch, layout.ep, at.ep):
            for rule in expert_rules(arch, expert):
                yield rule, layout.etp, at.etp


def hf_tensors(arch: ModelArch, value_head: bool = False) -> dict[str, Shape]:
    """Name -> shape of every tensor of the checkpoint; a value model has `score.weight` in place of the output projection."""
    if arch.own:
        held = (part for parameter in arch.own if not (value_head and parameter.of_head) for part in parameter.parts)
        return {part.hf: part.shape for part in held} | ({VALUE_HEAD: (arch.head_rows, arch.hidden_size)} if value_head else {})
    tensors: dict[str, Shape] = {EMBEDDING: (arch.vocab_size, arch.hidden_size)}
    for layer in range(arch.num_layers):
        for rule in all_rules(arch, layer):
            tensors.update({hf_layer(layer) + name: shape for name, shape in rule.hf(arch).items()})
    tensors[FINAL_NORM] = (arch.hidden_size,)
    tensors.update(_tower(arch))
    if value_head:
        tensors[VALUE_HEAD] = (arch.head_rows, arch.hidden_size)
    elif not arch.tied_embeddings:
        tensors[OUTPUT] = (arch.vocab_size, arch.hidden_size)
    return tensors


def hf_cuts(arch: ModelArch, value_head: bool = False) -> dict[str, Cut]:
    """Cut over tp ranks of every tensor of `hf_tensors` but those of experts; a model without a family has only copies."""
    if arch.own:
        return dict.fromkeys(hf_tensors(arch, value_head), Cut(None))
    cuts = {EMBEDDING: Cut(0), OUTPUT: Cut(0), FINAL_NORM: Cut(None), VALUE_HEAD: Cut(None)}
    for layer in range(arch.num_layers):
        for rule in layer_rules(arch, layer):
            cuts.update({hf_layer(layer) + name: rule.cut for name in rule.hf(arch)})
    cuts.update((name, Cut(None)) for name, _ in _tower(arch))
    return {name: cuts[name] for name in hf_tensors(arch, value_head) if name in cuts}


def local_shapes(arch: ModelArch, layout: ParallelLayout, rank: int, value_head: bool = False) -> dict[str, Shape]:
    """Parameters of one rank by canonical name (`models/gpt.py`). ValueError if the layout does not fit the architecture."""
    at = layout.coordinates(rank)
    shapes, behind = end_shapes(arch, layout, at.pp, value_head)
    of_kind: dict[Kind, list[tuple[str, Shape]]] = {}
    for layer in layout.stage_layers(arch.num_layers, at.pp):
        kind, prefix = arch.kind(layer), local_layer(layer)
        if kind not in of_kind:
            of_kind[kind] = layer_shapes(arch, layout, at, layer)
        shapes.update((prefix + name, shape) for name, shape in of_kind[kind])
    return shapes | behind


def end_shapes(
    arch: ModelArch, layout: ParallelLayout, stage: int, value_head: bool = False
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Parameters of a rank of a stage (before its layers, behind them) by canonical name. ValueError as in `local_shapes`."""
    check_tp(arch, layout.tp)
    check_ep(arch, layout.ep, layout.etp)
    vocab_rows = (padded_vocab(arch, layout.tp) // layout.tp, arch.hidden_size)
    before: dict[str, Shape] = {LOCAL_EMBEDDING: vocab_rows, **dict(_tower(arch))} if stage == 0 else {}
    if stage < layout.pp - 1:
        return before, {}
    behind: dict[str, Shape] = {LOCAL_FINAL_NORM: (arch.hidden_size,)}
    if value_head:
        behind[LOCAL_VALUE_HEAD] = (arch.head_rows, arch.hidden_size)
    elif not arch.tied_embeddings or layout.pp > 1:  # tied: the last stage of a pipeline has its own copy
        behind[LOCAL_OUTPUT] = vocab_rows
    return before, behind


def layer_shapes(arch: ModelArch, layout: ParallelLayout, at: Coordinates, layer: int) -> list[tuple[str, Shape]]:
    """(name behind `local_layer`, shape) of the parameters of a layer on a rank."""
    return [(rule.local, rule.shape(arch, ranks)) for rule, ranks, _ in _rank_rules(arch, layout, at, layer)]


def megatron_pieces(arch: ModelArch, layout: ParallelLayout, rank: int, value_head: bool = False) -> list[Piece]:
    """Place of every Hugging Face rectangle in the parameters of one rank, by canonical name (`models/gpt.py`).
    Elements without a piece are vocabulary padding, which is zero. With tied embeddings and pp > 1 the last stage holds its own
    copy of the embedding as output layer. ValueError if the layout does not fit the architecture."""
    return piece_map(arch, layout, value_head)[rank]


def piece_map(arch: ModelArch, layout: ParallelLayout, value_head: bool = False) -> PieceMap:
    """Places of all Hugging Face rectangles in the parameters of every rank (`megatron_pieces` has those of one rank), from
    one template for each kind of layer. ValueError if the layout does not fit the architecture."""
    check_tp(arch, layout.tp)
    check_ep(arch, layout.ep, layout.etp)
    at = [layout.coordinates(rank) for rank in range(layout.world_size)]
    stage = at[: layout.ranks_per_stage]  # every stage is laid out like the first
    templates = [PieceMap.of({rank: _outside_layers(arch, layout, one, value_head) for rank, one in enumerate(at)}).templates[0]]
    sections = [Section("", "", 0, 0)]
    kinds: dict[Kind, int] = {}
    stage_of = {layer: pp for pp in range(layout.pp) for layer in layout.stage_layers(arch.num_layers, pp)}
    for layer in range(arch.num_layers):
        kind = arch.kind(layer)
        if kind not in kinds:
            kinds[kind] = len(templates)
            templates.append(_layer_template(arch, layout, stage, layer))
        first = stage_of[layer] * layout.ranks_per_stage
        sections.append(Section(hf_layer(layer), local_layer(layer), kinds[kind], first))
    return PieceMap(layout.world_size, tuple(templates), tuple(sections))


def _layer_template(arch: ModelArch, layout: ParallelLayout, stage: list[Coordinates], layer: int) -> tuple[Held, ...]:
    held = [_held(arch, rule, layout.tp, [at.tp for at in stage]) for rule in layer_rules(arch, layer)]
    if arch.kind(layer).sparse:
        for ep in range(layout.ep):
            # Positions with another ep coordinate hold nothing of these experts.
            etp = [at.etp if at.ep == ep else None for at in stage]
            for expert in rank_experts(arch, layout.ep, ep):
                held += [_held(arch, rule, layout.etp, etp) for rule in expert_rules(arch, expert)]
    return tuple(one for tensor in held for one in tensor)


def _held(arch: ModelArch, rule: Rule, ranks: int, indices: Iterable[int | None]) -> Iterator[Held]:
    """Pieces of a rule's tensor. indices: of every position among the `ranks` that shard it; None if it holds no part."""
    positions: list[list[int]] = [[] for _ in range(ranks)]
    for position, index in enumerate(indices):
        if index is not None:
            positions[index].append(position)
    by_piece: dict[Piece, list[int]] = {}  # norms and routers are the same on all shards
    for index in range(ranks):
        for name, box, row, col in rule.parts(arch, ranks, index):
            by_piece.setdefault(Piece(name, box, rule.local, row, col), []).extend(positions[index])
    return (Held(piece, tuple(sorted(at))) for piece, at in by_piece.items())


def _outside_layers(arch: ModelArch, layout: ParallelLayout, at: Coordinates, value_head: bool) -> list[Piece]:
    pieces = [*_vocab_piece(arch, layout.tp, at.tp, EMBEDDING, LOCAL_EMBEDDING), *_tower_pieces(arch)] if at.pp == 0 else []
    if at.pp < layout.pp - 1:
        return pieces
    pieces.append(Piece(FINAL_NORM, Box(0, arch.hidden_size, 0, 1), LOCAL_FINAL_NORM, 0, 0))
    if value_head:
        pieces.append(Piece(VALUE_HEAD, Box(0, arch.head_rows, 0, arch.hidden_size), LOCAL_VALUE_HEAD, 0, 0))
    elif not arch.tied_embeddings:
        pieces += _vocab_piece(arch, layout.tp, at.tp, OUTPUT, LOCAL_OUTPUT)
    elif layout.pp > 1:
        pieces += _vocab_piece(arch, layout.tp, at.tp, EMBEDDING, LOCAL_OUTPUT)
    return pieces


def _tower(arch: ModelArch) -> tuple[tuple[str, Shape], ...]:
    """Tensors of the tower of a vision-language model, whole on every rank of the first stage; none of a text-only one."""
    return () if arch.vision is None else arch.vision.tensors


def _tower_pieces(arch: ModelArch) -> Iterator[Piece]:
    for name, shape in _tower(arch):
        rows, cols = shape_as_2d(shape)
        yield Piece(name, Box(0, rows, 0, cols), name, 0, 0)


def _vocab_piece(arch: ModelArch, tp: int, tp_rank: int, hf: str, local: str) -> list[Piece]:
    start, rows = vocab_shard(arch, tp, tp_rank)
    # A rank with nothing but vocabulary padding has no piece.
    return [Piece(hf, Box(start, start + rows, 0, arch.hidden_size), local, 0, 0)] if rows else []
