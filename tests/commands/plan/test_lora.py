"""Plan of a role with adapters: numbers by hand, and what engines with adapters really allocate on two ranks."""

from dataclasses import replace
from typing import Any

import pytest

from megappo.commands.plan.activations import RoleWork
from megappo.commands.plan.memory import role_memory
from megappo.config.role_sections import LoraConfig
from megappo.parallel.layout import ParallelLayout
from tests.commands.plan import live
from tests.commands.plan.archs import MOE, llama
from tests.commands.plan.test_engines import BF16, BUDGET, FP32, LENGTHS, SP, WIDE
from tests.worlds import spawn_world

LORA, HALF = LoraConfig(rank=8), LoraConfig(rank=4)
SOME = LoraConfig(rank=4, targets=("q_proj", "v_proj", "down_proj"))
# axes of two ranks, type, value head, adapters
BUILT = [
    ({}, BF16, False, LORA),
    ({"tp": 2}, BF16, True, LORA),
    (SP, FP32, False, SOME),
    ({"pp": 2, "layers_per_stage": (3, 1)}, BF16, True, SOME),
    ({"cp": 2}, FP32, False, LORA),
]
# axes of two ranks, type, recompute, value head
PEAKS = [({}, BF16, "none", False), (SP, BF16, "none", False), ({"pp": 2}, FP32, "none", True), ({}, BF16, "full", False)]


def measure(rank):
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    return (
        [allocated(*case) for case in BUILT],
        [live.peaks(WIDE, axes, dtype, how, critic, LENGTHS, BUDGET, LORA) for axes, dtype, how, critic in PEAKS],
    )


def allocated(axes, dtype, critic, lora):
    """(numbers of all parameters, bytes of weights, of gradients, of optimizer state) of this rank."""
    role, wrapped = live.role_of(llama(), axes, dtype, "none", critic, 64, lora=lora)
    engine = role.engine
    parameters = list(engine.named_parameters().values())
    gradients = sum(tensor.nbytes for tensor in engine.named_gradients().values())
    return (
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.nbytes for parameter in parameters),
        gradients,
        sum(tensor.nbytes for tensor in engine._optimizer_tensors()),
    )


@pytest.fixture(scope="module")
def measured():
    return spawn_world(measure, 2)


def planned(arch, axes, rank, **sizes):
    layout = ParallelLayout(2, **axes)
    how = {"trained": True, "micro_batch_tokens": 1, "num_micro_batches": 1} | sizes
    return role_memory(arch, layout, layout.coordinates(rank).pp, RoleWork(**how))


def test_what_is_counted_is_what_a_model_with_adapters_allocates(measured):
    for index, (axes, dtype, critic, lora) in enumerate(BUILT):
        name = "bf16" if dtype == BF16 else "fp32"
        plans = [planned(llama(), axes, rank, dtype=name, value_head=critic, lora=lora) for rank in (0, 1)]
        for rank, plan in enumerate(plans):
            assert measured[rank][0][index][:3] == (plan.parameters, plan.weights, plan.gradients), (BUILT[index], rank)
            assert plan.gradients < planned(llama(), axes, rank, dtype=name, value_head=critic).gradients / 5
        # The optimizer's shards end at the borders of its buffers, whose starts are padded.
        found = sum(measured[rank][0][index][3] for rank in (0, 1))
        assert found == pytest.approx(sum(plan.optimizer for plan in plans), rel=0.02), BUILT[index]


def test_the_peak_of_a_pass_is_the_estimate_within_a_tenth(measured):
    for index, (axes, dtype, recompute, critic) in enumerate(PEAKS):
        layout = ParallelLayout(2, **axes)
        for rank in (0, 1):
            plan = planned(
                WIDE,
                axes,
                rank,
                dtype="bf16" if dtype == BF16 else "fp32",
                micro_batch_tokens=BUDGET,
                num_micro_batches=len(LENGTHS) // layout.dp // (BUDGET // LENGTHS[0]),
                value_head=critic,
                recompute=recompute,
                lora=LORA,
            )
            forward, trained = measured[rank][1][index]
            assert plan.forward == pytest.approx(forward, rel=0.1), (PEAKS[index], rank)
            assert plan.activations == pytest.approx(trained, rel=0.1), (PEAKS[index], rank)


def test_adapters_by_hand():
    """128 wide, 4 heads of 32, 2 KV heads, ffn 384, 4 layers: rank times columns of A and rows of B, q to down."""
    whole = (128 + 128) + (128 + 64) + (128 + 64) + (128 + 128) + (128 + 384) + (128 + 384) + (384 + 128)
    # tp cuts the rows of q, k, v, gate and up, and the columns of o and down.
    half = (128 + 64) + (128 + 32) + (128 + 32) + (64 + 128) + (128 + 192) + (128 + 192) + (192 + 128)
    for axes, each, shards in (({}, whole, 2), ({"tp": 2}, half, 1)):
        plan, base = (planned(llama(), axes, 0, dtype="bf16", lora=lora) for lora in (LORA, None))
        numbers = 4 * 8 * each
        assert plan.parameters - base.parameters == numbers
        assert (plan.weights, plan.gradients) == (2 * plan.parameters, 4 * numbers)
        assert plan.optimizer == 12 * numbers // shards
        assert (plan.written_weights, plan.written) == (2 * numbers // shards, 14 * numbers // shards)


def test_adapters_of_experts_by_hand():
    """8 experts of 96 columns, of which a token passes 2: ep halves them, etp the rows of B of gate and up and the columns of A of
    down. Moments are sharded over the ranks with the same experts."""
    arch = replace(llama(), family="qwen3_moe", qk_norm=True, moe=MOE)
    beside, expert, cut = 2 * (128 + 128) + 2 * (128 + 64), 3 * (128 + 96), 2 * (128 + 48) + 48 + 128
    of_tp = (128 + 64) + 2 * (128 + 32) + (64 + 128)
    cases: list[tuple[dict[str, Any], int, int, int]] = [
        ({}, beside, 8 * expert, 2),
        ({"ep": 2}, beside, 4 * expert, 1),
        (SP | {"etp": 2}, of_tp, 8 * cut, 1),
    ]
    for axes, attention, experts, edp in cases:
        plan, base = (planned(arch, axes, 0, dtype="bf16", lora=lora) for lora in (LORA, None))
        each, dp = 4 * 8, ParallelLayout(2, **axes).dp
        assert plan.parameters - base.parameters == each * (attention + experts)
        assert (plan.weights, plan.gradients) == (2 * plan.parameters, 4 * each * (attention + experts))
        assert plan.optimizer == 12 * each * attention // dp + 12 * each * experts // edp
        tokens = 1024  # a token is 2 rows of experts: 6 products of 8 numbers, and 4 beside them
        wide = [planned(arch, axes, 0, dtype="bf16", micro_batch_tokens=tokens, lora=lora).activations for lora in (LORA, HALF)]
        assert wide[0] - wide[1] == 4 * tokens * 2 * (8 - 4) * (4 + 6)


def test_a_frozen_output_projection_has_no_gradient():
    wide = replace(llama(), vocab_size=64_000)
    adapted, whole = (planned(wide, {}, 0, dtype="fp32", micro_batch_tokens=64, lora=lora) for lora in (LORA, None))
    assert whole.activations - adapted.activations > 0.9 * 64_000 * 128 * 4
