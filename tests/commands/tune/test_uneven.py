"""Experts whose rows are uneven, layers that differ, and evaluations, in the model of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy
import pytest

from megappo.commands.plan.activations import RoleWork
from megappo.commands.plan.memory import RolloutMemory, role_memory
from megappo.commands.tune.cost import workload_of
from megappo.commands.tune.generation import evaluations_s, vllm_cost
from megappo.commands.tune.lengths import Lengths
from megappo.commands.tune.search import fullest_stages
from megappo.commands.tune.work import fullest_load
from megappo.config.loading import validated
from megappo.config.schema import TrainConfig
from megappo.models.arch import MoeArch
from megappo.parallel.layout import ParallelLayout
from tests.commands.plan.archs import llama
from tests.commands.tune.test_cost import ARCH, H100, SPARSE, cost


def test_all_ranks_wait_for_the_one_with_the_most_rows():
    """Unless a term of the routers balances the experts: products of experts, traffic of their rows and their exchange grow."""
    wide = replace(SPARSE, moe=MoeArch(128, 8, 1024, True))
    uneven, even = (cost(ParallelLayout(8, ep=8), wide, router_aux_coef=coef) for coef in (0.0, 0.001))
    load = fullest_load(128, 8, 8)
    assert uneven.parts["ep"] == pytest.approx(load * even.parts["ep"], rel=0.05)
    assert even.parts["matmul"] < uneven.parts["matmul"] < load * even.parts["matmul"]
    same = [part for part in even.parts if part not in ("ep", "matmul", "memory")]
    assert [uneven.parts[part] for part in same] == [even.parts[part] for part in same]
    alone, balanced = (cost(ParallelLayout(8), wide, router_aux_coef=coef) for coef in (0.0, 0.001))
    assert alone == balanced, "a rank with all experts has all rows"


def test_the_fullest_rank_is_that_of_drawn_loads():
    """Against draws by numpy of rows whose logarithms are spread evenly."""
    random, reach = numpy.random.default_rng(1), 0.8 * 16384
    rows = numpy.exp(random.random((2000, 128)) * math.log(reach))
    for _ in range(40):  # an expert has every token at most once: the rest goes to the others
        most = numpy.minimum(rows, rows.sum(1, keepdims=True)).sum(1, keepdims=True) / 8
        rows = numpy.minimum(rows, most)
    for ranks in (2, 8, 16):
        loads = rows.reshape(2000, ranks, -1).sum(2)
        assert fullest_load(128, 8, ranks) == pytest.approx((loads.max(1) / loads.mean(1)).mean(), rel=0.05)
    assert fullest_load(128, 8, 1) == pytest.approx(1.0) and 1 < fullest_load(128, 8, 4) < fullest_load(128, 8, 32) < 16


def test_evaluations_cost_their_share_of_a_step():
    keys = {"policy": {"model": "none"}, "data": {"train": "none", "prompts_per_step": 64}, "rollout": {"samples_per_prompt": 4}}
    sets = {"one": {"data": "none", "prompts": 64, "n": 4, "temperature": 1.0, "every": 5}}
    config = validated({**keys, "evaluations": sets}, TrainConfig)
    work, rollout = workload_of(config, 256, 300.0, Lengths(300.0, 512.0, 0.8)), config.rollout
    memory = RolloutMemory(int(2e9), 65536, int(20e9))

    def cost_of(rollout, work):
        return vllm_cost(ARCH, rollout, "bf16", memory, work, 8, H100)

    whole = cost_of(rollout, work).total_s
    assert evaluations_s(config, work, cost_of) == pytest.approx(whole / 5), "as many responses as a step, every fifth"
    shorter = validated({**keys, "evaluations": {"one": sets["one"] | {"max_response_tokens": 128}}}, TrainConfig)
    assert 0 < (evaluations_s(shorter, work, cost_of) or 0.0) < 0.5 * whole / 5
    open_ended = validated({**keys, "evaluations": {"one": sets["one"] | {"prompts": None}}}, TrainConfig)
    assert evaluations_s(open_ended, work, cost_of) is None, "the data says how many, and no model of hardware"
    assert evaluations_s(validated(keys, TrainConfig), work, cost_of) == 0


@pytest.mark.parametrize("dense_layers", [(0,), (0, 1, 2), (1, 9, 20)])
def test_of_stages_with_and_without_experts_the_fullest_is_among_those_that_are_counted(dense_layers):
    arch = replace(llama(24), family="qwen3_moe", architecture="Qwen3MoeForCausalLM", moe=MoeArch(8, 2, 512, True, dense_layers))
    counted = every = 0
    uneven = ParallelLayout(8, pp=8, layers_per_stage=(2, *[3] * 6, 4))
    for layout in (ParallelLayout(8, pp=8), ParallelLayout(12, pp=4, vpp=3), uneven):
        for recompute, count in product(("none", "full"), (1, 6, 40)):
            work = RoleWork(dtype="bf16", trained=True, micro_batch_tokens=4096, num_micro_batches=count, recompute=recompute)
            memory = [role_memory(arch, layout, stage, work) for stage in range(layout.pp)]
            stages = fullest_stages(arch, layout)
            assert max(one.active for one in memory) == max(memory[stage].active for stage in stages)
            assert max(one.resident for one in memory) == max(memory[stage].resident for stage in stages)
            counted, every = counted + len(stages), every + layout.pp
    assert counted < 0.8 * every
