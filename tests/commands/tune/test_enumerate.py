"""The enumerator proposes what `megappo plan` accepts, all of it, and nothing else."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.commands.tune.enumerate import layouts, nearly_even, recompute_choices, rollout_sizes, token_budgets
from megappo.config.errors import ConfigError
from megappo.config.layout_checks import parallel_problems
from megappo.config.loading import validated
from megappo.config.role_sections import ParallelConfig
from megappo.config.schema import TrainConfig
from megappo.models.arch import ModelArch, MoeArch, Rope
from megappo.trainer.prepare.layouts import check_layouts


def config_with(parallel: ParallelConfig, rollout_tp: int = 1) -> TrainConfig:
    return validated(
        {
            "policy": {"model": "none", "parallel": parallel.model_dump(mode="python")},
            "data": {"train": "none"},
            "rollout": {"tp": rollout_tp, "max_response_tokens": 8},
            "algorithm": {"kl": {"placement": "none"}},
        },
        TrainConfig,
    )


def accepted(parallel: ParallelConfig, arch: ModelArch, world: int, rollout_tp: int = 1) -> bool:
    if next(parallel_problems("policy.parallel", parallel, world), None) is not None:
        return False
    try:
        check_layouts(config_with(parallel, rollout_tp), {"policy": arch, "critic": arch}, world)
    except ConfigError:
        return False
    return True


@st.composite
def archs(draw):
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    moe = None
    if draw(st.booleans()):
        experts, columns, dense = (draw(st.sampled_from(sizes)) for sizes in ([4, 6, 8, 16], [12, 64], [(), (0,)]))
        moe = MoeArch(experts, 2, columns, True, dense)
    return ModelArch(
        "qwen3_moe" if moe else "llama",
        "Qwen3MoeForCausalLM" if moe else "LlamaForCausalLM",
        draw(st.integers(2, 14)),
        64,
        kv_heads * draw(st.sampled_from([1, 2, 4])),
        kv_heads,
        8,
        draw(st.sampled_from([48, 64, 96])),
        128,
        4096,
        False,
        1e-6,
        Rope(),
        moe=moe,
    )


@settings(max_examples=25, deadline=None)
@given(arch=archs(), world=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
def test_nothing_is_proposed_that_the_plan_refuses_and_nothing_twice(arch, world):
    found = list(layouts(arch, world))
    assert found, "one layer of everything fits every model"
    assert len(found) == len({parallel.model_dump_json() for parallel in found})
    for parallel in found[:: max(1, len(found) // 40)]:
        assert accepted(parallel, arch, world), parallel
    assert all(accepted(ParallelConfig(), arch, world, tp) for tp in rollout_sizes(arch, world))


@settings(max_examples=10, deadline=None)
@given(arch=archs(), world=st.sampled_from([2, 4, 6]))
def test_every_even_layout_that_the_plan_accepts_is_proposed(arch, world):
    """Against trying every size of every axis."""
    proposed = {p.model_dump_json() for p in layouts(arch, world) if not p.layers_per_stage}
    sizes = range(1, world + 1)
    experts = sizes if arch.moe is not None else [1]
    for tp, cp, pp, ep, etp, sp in product(sizes, sizes, sizes, experts, experts, (False, True)):
        if world % (tp * cp * pp):
            continue
        for vpp in range(1, arch.num_layers // pp + 1) if pp > 1 else [1]:
            parallel = ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, sequence_parallel=sp, vpp=vpp)
            assert accepted(parallel, arch, world) == (parallel.model_dump_json() in proposed), parallel


def test_a_layout_that_the_plan_refuses_would_be_noticed():
    """Negative control."""
    arch = ModelArch("llama", "LlamaForCausalLM", 4, 64, 4, 2, 8, 64, 128, 4096, False, 1e-6, Rope())
    assert accepted(ParallelConfig(tp=2), arch, 4)
    assert not accepted(ParallelConfig(tp=3), arch, 3) and not accepted(ParallelConfig(pp=3), arch, 3)
    assert not accepted(ParallelConfig(), arch, 4, rollout_tp=3)


@pytest.mark.parametrize(
    "layers, parts, split",
    [
        (126, 16, (7, *[8] * 14, 7)),
        (126, 64, (1, *[2] * 62, 1)),
        (7, 4, (2, 2, 2, 1)),
        (10, 4, (2, 3, 3, 2)),
        (9, 4, None),
        (3, 4, None),
    ],
)
def test_uneven_stages_are_short_at_the_ends(layers, parts, split):
    assert nearly_even(layers, parts) == split


def test_secondary_choices_hold_what_is_configured():
    assert token_budgets(16384, 1536) == [1536, 3072, 6144, 12288, 16384]
    assert token_budgets(100, 1536) == [1536, 3072, 6144, 12288], "a longer sequence gets a micro-batch of its own"
    assert recompute_choices("none") == ["none", "full"] and recompute_choices("selective")[-1] == "selective"
    assert recompute_choices(None) == ["none"]
