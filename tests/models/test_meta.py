"""Parameters on the meta device against models that are really built, for every family and every cut of the parity matrix."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megappo.commands.plan.memory import count_parameters
from megappo.models.arch import ModelArch
from megappo.models.hf_config import arch_of
from megappo.parallel.layout import ParallelLayout
from tests.models.checkpoints import CASES, EXPERT_CASES, hf_config
from tests.models.meta import meta_model, parameters_of_rank
from tests.parity.matrix import MODELS, SP, Sizes
from tests.worlds import spawn_world

RANKS = 4
OTHERS: list[Sizes] = [{**SP, "pp": 2}, {"pp": 2, "vpp": 2}]


@cache
def arch(model: str) -> ModelArch:
    stem, _ = {**CASES, **EXPERT_CASES}[model]
    config = hf_config(model, num_hidden_layers=4, num_key_value_heads=4, architectures=[f"{stem}ForCausalLM"])
    return arch_of(config.to_dict())


@cache
def cases() -> list[tuple[str, ParallelLayout, bool]]:
    """(model, layout, value head): the matrix's models in its layouts (those of two ranks with twice the data-parallel ranks), each
    cut of the parameters once, the other families in two. llama in each with and without a value head, the others in turn."""
    families = {arch(model).family: model for model in (*CASES, *MODELS)}  # of the matrix where it has the family
    found = []
    for model in dict.fromkeys((*families.values(), *MODELS)):
        sizes = [size for table in MODELS.get(model, {}).values() for case in table for size in as_pair(case)] or OTHERS
        cuts = {cut_of(layout): layout for layout in (ParallelLayout(RANKS, **size) for size in sizes)}
        heads = [(False, True) if model == "llama" else (number % 2 == 1,) for number in range(len(cuts))]
        found += [(model, layout, head) for layout, both in zip(cuts.values(), heads) for head in both]
    return found


def cut_of(layout: ParallelLayout) -> tuple[Any, ...]:
    """What the parameters depend on: not replicas, nor context ranks, nor where activations lie."""
    return layout.tp, layout.pp, layout.vpp, layout.layers_per_stage, layout.ep, layout.etp


def ranks_of(model: str, layout: ParallelLayout) -> list[int]:
    """Ranks whose parameters may differ."""
    places = [(rank, layout.coordinates(rank)) for rank in range(RANKS)]
    return [rank for rank, at in places if arch(model).moe is not None or at.dp == at.cp == 0]


def as_pair(case) -> tuple[Sizes, ...]:
    return case if isinstance(case, tuple) else (case,)


def build_all(rank: int) -> list[dict[str, tuple]]:
    """Of every case: name -> (shape, dtype) of this rank's parameters, on the CPU."""
    from megappo.models.build import build_model
    from megappo.models.gpt import named_parameters
    from megappo.parallel import cpu_patches
    from megappo.parallel.groups import build_groups, destroy_groups

    cpu_patches.install()
    built = []
    for model, layout, value_head in cases():
        groups = build_groups(layout)
        chunks = build_model(arch(model), groups, dtype=torch.bfloat16, value_head=value_head)
        assert {p.device.type for chunk in chunks for p in chunk.parameters()} == {"cpu"}
        built.append({name: (tuple(p.shape), p.dtype) for name, p in named_parameters(chunks).items()})
        del chunks
        destroy_groups(groups)
    return built


@pytest.fixture(scope="module")
def built() -> list[list[dict[str, tuple]]]:
    return spawn_world(build_all, RANKS)


def test_meta_models_have_the_parameters_of_built_ones(built) -> None:
    for index, (model, layout, value_head) in enumerate(cases()):
        for rank in ranks_of(model, layout):
            counted = parameters_of_rank(arch(model), layout, rank, value_head=value_head)
            assert {p.device.type for p in counted.values()} == {"meta"}
            found = {name: (tuple(p.shape), p.dtype) for name, p in counted.items()}
            assert found == built[rank][index], (model, layout, rank)


def test_the_plan_counts_what_is_built(built) -> None:
    for index, (model, layout, value_head) in enumerate(cases()):
        for rank in range(RANKS):
            stage = layout.coordinates(rank).pp
            total = sum(torch.Size(shape).numel() for shape, _ in built[rank][index].values())
            assert count_parameters(arch(model), layout, stage, value_head).total == total, (model, layout, rank)


def test_a_world_of_thousands_of_ranks_needs_none_of_them() -> None:
    layout = ParallelLayout(4096, tp=4, pp=4, sequence_parallel=True)
    with meta_model(arch("llama"), layout, 4095) as (chunk,):
        assert chunk.decoder.layers[0].layer_number == 4
    assert not dist.is_initialized()


def test_a_wrong_tp_is_seen() -> None:
    """Negative control."""
    halves, quarters = (parameters_of_rank(arch("llama"), ParallelLayout(RANKS, tp=tp), 0) for tp in (2, 4))
    assert {n: p.shape for n, p in halves.items()} != {n: p.shape for n, p in quarters.items()}
