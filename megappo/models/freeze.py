"""Frozen weights (`policy.freeze`, `critic.freeze`): which tensors of a model some patterns name. Imports no torch.

Names are those of the Hugging Face checkpoint, so a pattern means the same in every layout and engine.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from megappo.config.role_sections import RoleConfig, TrainableConfig
from megappo.models.arch import ModelArch
from megappo.models.row_shards import own_parameters, shard_piece_map
from megappo.models.weight_map import (
    VALUE_HEAD,
    all_rules,
    constants,
    hf_layer,
    hf_tensors,
    local_shapes,
    piece_map,
)
from megappo.parallel.layout import ParallelLayout

_RANGE = re.compile(r"(\d+)-(\d+)")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_BEFORE_LAYERS = re.compile(r"embed_tokens|^visual\.")


def frozen_of(section: RoleConfig, arch: ModelArch, *, value_head: bool) -> frozenset[str]:
    """Names of the tensors that a role's section freezes; none if it does not train. ValueError as from `frozen_tensors`."""
    if not isinstance(section, TrainableConfig) or not section.freeze:
        return frozenset()
    return frozen_tensors(arch, section.freeze, section.engine, value_head=value_head)


def frozen_tensors(
    arch: ModelArch, patterns: Sequence[str], engine: Literal["megatron", "fsdp2"], *, value_head: bool
) -> frozenset[str]:
    """Names of the tensors that `patterns` freeze.

    A pattern is consecutive parts of a name between its dots: `embed_tokens`, `mlp.down_proj`, `layers.3.self_attn`, `layers.0-15`
    (a range counts over the whole model, both ends included). ValueError, one line, for one that matches nothing, a range beyond
    the last layer, the value head, every tensor, or a part of what the engine holds as one parameter.
    """
    names = hf_tensors(arch, value_head).keys()
    found: set[str] = set()
    for pattern in patterns:
        matched = [name for name in names if _matches(pattern, name)]
        if not matched:
            raise ValueError(f"{pattern} matches no weight; {_nearest(pattern, names)}")
        _check_range(pattern, names)
        if VALUE_HEAD in matched:
            raise ValueError(f"{pattern} names the value head, which always trains; leave it out")
        found.update(matched)
    if found and found.issuperset(names - constants(arch)):
        raise ValueError("freezes every weight, so nothing would train; leave some out")
    for group in _parameters(arch, engine, value_head):
        if 0 < len(mine := found & set(group)) < len(group):
            others = ", ".join(dict.fromkeys(_module(name) for name in group if name not in mine))
            fix = f"{min(mine)} is one parameter with {others} under engine {engine}; name these too"
            raise ValueError(fix if engine == "fsdp2" else f"{fix}, or set the role's engine to fsdp2")
    return frozenset(found)


def _matches(pattern: str, name: str) -> bool:
    # Any run of consecutive parts of the name may match.
    wanted, parts = pattern.split("."), name.split(".")
    return any(all(map(_fits, wanted, parts[at : at + len(wanted)])) for at in range(len(parts) - len(wanted) + 1))


def _fits(wanted: str, part: str) -> bool:
    if found := _RANGE.fullmatch(wanted):
        return part.isdigit() and int(found[1]) <= int(part) <= int(found[2])
    return wanted == part


def _check_range(pattern: str, names: Iterable[str]) -> None:
    before, last = "", max((int(found[1]) for name in names if (found := _LAYER.search(name))), default=-1)
    for part in pattern.split("."):
        if before == "layers" and (found := _RANGE.fullmatch(part)) and int(found[2]) > last:
            raise ValueError(f"{pattern} ends beyond the model, which has layers 0 to {last}; use {found[1]}-{last}")
        before = part


def _nearest(pattern: str, names: Iterable[str]) -> str:
    kinds = sorted({part for name in names for part in name.split(".") if not part.isdigit() and part not in ("weight", "bias")})
    wanted = [part for part in pattern.split(".") if part not in kinds and not part.isdigit() and not _RANGE.fullmatch(part)]
    near = difflib.get_close_matches(wanted[0], kinds, n=2, cutoff=0.4) if wanted else []
    return f"did you mean {' or '.join(near)}?" if near else f"names are made of {', '.join(kinds)}, and ranges such as layers.0-3"


def _module(name: str) -> str:
    """Name for messages: `q_proj` of `model.layers.0.self_attn.q_proj.weight`; an expert's has its number."""
    parts = name.removesuffix(".weight").removesuffix(".bias").split(".")
    return ".".join(parts[-3:] if "experts" in parts[-3:] else parts[-1:])


def _parameters(arch: ModelArch, engine: Literal["megatron", "fsdp2"], value_head: bool) -> Iterator[list[str]]:
    """Yield, for every parameter that the engine makes of several tensors, the names of these tensors; whole model."""
    if engine == "fsdp2":
        for one in own_parameters(arch, value_head) if arch.own else ():
            yield [part.hf for part in one.parts]
        return
    for layer in range(arch.num_layers):
        for rule in all_rules(arch, layer):
            yield [hf_layer(layer) + name for name in rule.hf(arch)]


def frozen_on_rank(arch: ModelArch, layout: ParallelLayout, rank: int, frozen: frozenset[str], *, value_head: bool) -> set[str]:
    """Canonical names (`models/gpt.py`) of the frozen parameters of a Megatron rank."""
    # The stage's first rank too: one with nothing but padding of the vocabulary has no piece of the embedding.
    first, whole = layout.rank_of(pp=layout.coordinates(rank).pp), piece_map(arch, layout, value_head)
    pieces = [piece for one in {first, rank} for piece in whole[one]]
    held = local_shapes(arch, layout, rank, value_head)
    return {piece.local for piece in pieces if piece.hf in frozen and piece.local in held}


def frozen_whole(arch: ModelArch, frozen: frozenset[str], *, value_head: bool) -> set[str]:
    """Names of the frozen parameters of transformers' own class."""
    return {piece.local for piece in shard_piece_map(arch, ParallelLayout(1), value_head)[0] if piece.hf in frozen}


def check_frozen_stages(arch: ModelArch, layout: ParallelLayout, frozen: frozenset[str], *, value_head: bool) -> None:
    """Raise ValueError if a model chunk of a pipeline stage has nothing to train."""
    trained = hf_tensors(arch, value_head).keys() - frozen - constants(arch)
    outside = {name for name in trained if not _LAYER.search(name)}
    of_layers = {int(found[1]) for name in trained if (found := _LAYER.search(name))}
    for stage in range(layout.pp):
        for chunk in range(layout.vpp):
            layers = layout.chunk_layers(arch.num_layers, stage, chunk)
            is_first, is_last = stage == chunk == 0, stage == layout.pp - 1 and chunk == layout.vpp - 1
            here = [name for name in outside if (is_first if _BEFORE_LAYERS.search(name) else is_last)]
            if not here and not of_layers.intersection(layers):
                what = f"pipeline stage {stage}" + (f", chunk {chunk}" if layout.vpp > 1 else "")
                where = f"layers {layers.start} to {layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}"
                raise ValueError(f"freezes all of {what} ({where}), which must train some; leave some out, or lower pp")
