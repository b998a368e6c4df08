"""Bytes of a rank against hand-computed values; against real engines they are held in test_engines.py."""

from dataclasses import replace

import pytest

from megappo.commands.plan import activations
from megappo.commands.plan.activations import RoleWork, layer_elements_per_token, output_bytes, peak_in_flight
from megappo.commands.plan.memory import GIB, count_parameters, role_memory, rollout_memory
from megappo.models.arch import ModelArch, MoeArch, Rope
from megappo.parallel.layout import ParallelLayout
from tests.commands.plan.archs import MOE, llama

LLAMA_7B = llama(layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000)
# Qwen3-30B-A3B by its config.json; the number is that of its weight files (30.5 billion parameters, of which a token uses 3.3)
QWEN3_30B_A3B = ModelArch(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    48,
    2048,
    32,
    4,
    128,
    6144,
    151936,
    40960,
    False,
    1e-6,
    Rope(),
    qk_norm=True,
    moe=MoeArch(128, 8, 768, True),
)
# quickstart-like: 64*128 embedding, per layer q 128*128, k and v 64*128, o 128*128, 3*128*384, 2*128 norms, final norm, output
QUICKSTART = 64 * 128 + 4 * (128 * 128 + 2 * 64 * 128 + 128 * 128 + 3 * 128 * 384 + 2 * 128) + 128 + 64 * 128

# architecture, world, tp, pp, stage, value head, parameters of a rank
COUNTS = [
    (LLAMA_7B, 1, 1, 1, 0, False, 6_738_415_616),  # the published number of LLaMA-7B
    (LLAMA_7B, 1, 1, 1, 0, True, 6_738_415_616 - 32000 * 4096 + 4096),
    (LLAMA_7B, 8, 8, 1, 0, False, (6_738_415_616 - 65 * 4096) // 8 + 65 * 4096),  # norms are on every rank
    (LLAMA_7B, 8, 1, 8, 0, False, 32000 * 4096 + 4 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)),
    (LLAMA_7B, 8, 1, 8, 3, False, 4 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)),
    (LLAMA_7B, 8, 1, 8, 7, True, 4 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096 + 4096),
    (QWEN3_30B_A3B, 1, 1, 1, 0, False, 30_532_122_624),
    (llama(), 1, 1, 1, 0, False, QUICKSTART),
    (llama(tied=True), 1, 1, 1, 0, False, QUICKSTART - 64 * 128),
    (
        llama(tied=True),
        2,
        1,
        2,
        1,
        False,
        (QUICKSTART - 2 * 64 * 128 - 128) // 2 + 128 + 64 * 128,
    ),  # the last stage has its own copy
    (llama(vocab=65), 2, 2, 1, 0, False, (QUICKSTART - 9 * 128) // 2 + 9 * 128 + 2 * 128),  # 65 rows: 2 x 33, twice
]


@pytest.mark.parametrize("arch, world, tp, pp, stage, value_head, expected", COUNTS)
def test_parameters_of_a_rank(arch, world, tp, pp, stage, value_head, expected):
    assert count_parameters(arch, ParallelLayout(world, tp, pp), stage, value_head).total == expected


# dtype, trained, distributed, dp, bytes of weights, gradients and optimizer per parameter
BYTES = [
    ("bf16", True, True, 1, (2, 4, 12)),
    ("bf16", True, True, 4, (2, 4, 3)),
    ("bf16", True, False, 4, (2, 4, 12)),
    ("fp32", True, True, 1, (4, 4, 8)),
    ("fp32", True, True, 4, (4, 4, 2)),
    ("bf16", False, True, 4, (2, 0, 0)),
]


@pytest.mark.parametrize("dtype, trained, distributed, dp, expected", BYTES)
def test_bytes_per_parameter(dtype, trained, distributed, dp, expected):
    memory = role_memory(
        LLAMA_7B,
        ParallelLayout(8 * dp, 8),
        0,
        RoleWork(dtype=dtype, trained=trained, micro_batch_tokens=1, num_micro_batches=1, distributed_optimizer=distributed),
    )
    parameters = (6_738_415_616 - 65 * 4096) // 8 + 65 * 4096
    assert (memory.weights, memory.gradients, memory.optimizer) == tuple(parameters * size for size in expected)


def test_the_value_head_stays_fp32():
    sizes = {"dtype": "bf16", "trained": True, "micro_batch_tokens": 1, "num_micro_batches": 1, "value_head": True}
    memory = role_memory(llama(), ParallelLayout(2, 1, 2), 1, RoleWork(**sizes))
    body = (QUICKSTART - 2 * 64 * 128 - 128) // 2 + 128
    assert memory.weights == 2 * body + 4 * 128
    assert memory.optimizer == 12 * body + 8 * 128  # fp32 weights need no copy
    assert role_memory(llama(), ParallelLayout(2, 1, 2), 0, RoleWork(**sizes)).weights == 2 * (
        (QUICKSTART - 2 * 64 * 128 - 128) // 2 + 64 * 128
    )


def test_offloaded_parts_are_there_only_while_the_role_works():
    kept = role_memory(
        llama(), ParallelLayout(1), 0, RoleWork(dtype="bf16", trained=True, micro_batch_tokens=64, num_micro_batches=1)
    )
    away = role_memory(
        llama(),
        ParallelLayout(1),
        0,
        RoleWork(dtype="bf16", trained=True, micro_batch_tokens=64, num_micro_batches=1, offload=(True, False, True)),
    )
    assert kept.resident == QUICKSTART * (2 + 4 + 12) and away.resident == QUICKSTART * 4
    assert kept.active == kept.activations
    # the optimizer's state comes for its step, when the activations are gone
    assert away.active == QUICKSTART * 2 + max(kept.activations, QUICKSTART * 12)


def test_pipeline_stages_hold_as_many_micro_batches_as_1f1b_needs():
    layout = ParallelLayout(4, 1, 4)
    one = [
        role_memory(
            llama(),
            layout,
            stage,
            RoleWork(dtype="fp32", trained=True, micro_batch_tokens=64, num_micro_batches=1, value_head=True),
        )
        for stage in range(4)
    ]
    many = [
        role_memory(
            llama(),
            layout,
            stage,
            RoleWork(dtype="fp32", trained=True, micro_batch_tokens=64, num_micro_batches=9, value_head=True),
        )
        for stage in range(4)
    ]
    # A micro-batch keeps its layer and, from stage to stage, the input and the output.
    kept = 64 * 4 * (layer_elements_per_token(llama(), layout, 4) + 2 * 128)
    assert [b.activations - a.activations for a, b in zip(one, many)] == [3 * kept, 2 * kept, kept, 0]


def test_interleaving_holds_what_is_published():
    """Korthikanti et al. 2022, section 4.2.3: 1 + (pp - 1) / (pp vpp) times the activations of all stages, on the first one."""
    for pp, vpp in [(2, 2), (2, 4), (4, 2), (4, 3), (8, 2)]:
        layout = ParallelLayout(pp, pp=pp, vpp=vpp)
        assert peak_in_flight(layout, 0, 64, [1] * vpp) == pp * vpp * (1 + (pp - 1) / (pp * vpp))
        assert peak_in_flight(ParallelLayout(pp, pp=pp), 0, 64, [vpp]) == pp * vpp


def test_chunks_in_flight_follow_megatrons_own_schedule():
    """Warm-up and order of the chunks are asked of Megatron-core; micro-batches that fill up the last round hold nothing."""
    from types import SimpleNamespace

    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    def peak(pp, vpp, stage, real, chunks):
        padded = -(-real // pp) * pp
        group = SimpleNamespace(size=lambda: pp, rank=lambda: stage)
        communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None)
        total, _, warm_up, _ = get_pp_rank_microbatches(padded, vpp, pp, p2p_communicator=communicator)
        order = get_schedule_table(padded, vpp, pp)
        sizes = [chunks[chunk] if micro_batch < real else 0 for micro_batch, chunk in order]
        freed = [chunks[vpp - 1 - chunk] if micro_batch < real else 0 for micro_batch, chunk in order]
        # the backward passes before forward pass k are those of the steady state, one for each pass since the warm-up
        return max(sum(sizes[: k + 1]) - sum(freed[: max(0, k - warm_up)]) for k in range(total))

    for pp, vpp in [(2, 1), (4, 1), (2, 2), (4, 2), (2, 3)]:
        for chunks in ([1] * vpp, [3, 1, 2][:vpp]):
            for stage in range(pp):
                for real in (1, 2, 3, 5, 8, 13):
                    layout = ParallelLayout(pp, pp=pp, vpp=vpp)
                    expected = peak(pp, vpp, stage, real, chunks)
                    assert peak_in_flight(layout, stage, real, chunks) == expected, (pp, vpp, stage, real)
    assert peak(4, 2, 0, 13, [1, 1]) > peak(4, 2, 1, 13, [1, 1]), "negative control: the stage matters"


def test_an_uneven_split_is_counted_stage_by_stage():
    layout = ParallelLayout(2, pp=2, layers_per_stage=(3, 1))
    layer = (QUICKSTART - 2 * 64 * 128 - 128) // 4
    assert [count_parameters(llama(), layout, stage).total for stage in (0, 1)] == [3 * layer + 8192, layer + 8192 + 128]
    sizes = {"dtype": "fp32", "trained": True, "micro_batch_tokens": 64, "num_micro_batches": 1, "value_head": True}
    first, last = (role_memory(llama(), layout, stage, RoleWork(**sizes)).activations for stage in (0, 1))
    one = 64 * 4 * layer_elements_per_token(llama(), layout, 4)
    messages = 64 * 4 * 2 * 128
    # Beside them, the gradients of an MLP (two of 384 columns) and of the residual and a norm; at the end, the norm and its
    # gradients, as wide as 6 residuals, are less.
    assert first == 3 * one + messages + 64 * 4 * (2 * 384 + 2 * 128)
    assert last == one + messages + 64 * 4 * max(2 * 384 + 2 * 128, 6 * 128)
    chunked = ParallelLayout(2, pp=2, vpp=2, layers_per_stage=(1, 1, 1, 1))
    assert count_parameters(llama(), chunked, 0) == count_parameters(llama(), ParallelLayout(2, pp=2), 0)


def test_context_parallel_shares_tokens_and_optimizer_state():
    sizes = {"dtype": "bf16", "trained": True, "micro_batch_tokens": 64, "num_micro_batches": 1, "value_head": True}
    whole = role_memory(llama(), ParallelLayout(2), 0, RoleWork(**sizes))
    shared = role_memory(llama(), ParallelLayout(4, cp=2), 0, RoleWork(**sizes))
    assert (shared.weights, shared.gradients) == (whole.weights, whole.gradients)
    assert shared.optimizer * 2 == whole.optimizer  # ZeRO-1 over dp x cp: 4 ranks instead of 2
    assert shared.activations * 2 == whole.activations


def test_recomputation_holds_one_whole_layer_besides_the_boundaries():
    layout, sizes = ParallelLayout(4, pp=4), {"dtype": "fp32", "trained": True, "micro_batch_tokens": 10, "value_head": True}
    per_layer = layer_elements_per_token(llama(), ParallelLayout(1), 4)
    full = role_memory(llama(), layout, 0, RoleWork(num_micro_batches=9, recompute="full", **sizes))
    # 4 micro-batches with the input and the output of the one layer; that layer, and what its backward pass takes
    assert full.activations == 10 * 4 * (4 * 2 * 128 + per_layer + 2 * 384 + 2 * 128)


def test_the_step_of_torchs_adam_takes_another_moment_on_a_gpu():
    sizes = {"dtype": "bf16", "trained": True, "micro_batch_tokens": 10, "num_micro_batches": 1, "offload": (True, True, True)}
    layout = ParallelLayout(4, tp=2)
    fused, each = (role_memory(llama(), layout, 0, RoleWork(adam_buffers=it, **sizes)) for it in (False, True))
    assert each.step_buffers * 3 == each.optimizer and each.stepping - fused.stepping == each.step_buffers
    assert (each.inferring, each.updating, each.saving) == (fused.inferring, fused.updating, fused.saving)


def test_kv_cache_by_hand():
    # LLaMA-7B: 2 (k, v) * 32 layers * 32 heads * 128 * 2 bytes = 512 KiB per token
    whole = rollout_memory(LLAMA_7B, 1, 2, None, 0.5, 80 * GIB)
    assert (whole.kv_bytes_per_token, whole.weights) == (512 * 1024, 2 * 6_738_415_616)
    assert whole.kv_cache == 40 * GIB - 2 * 6_738_415_616
    assert rollout_memory(LLAMA_7B, 4, 2, None, 0.5, 80 * GIB).kv_bytes_per_token == 128 * 1024
    assert rollout_memory(LLAMA_7B, 4, 2, 1.5, 0.5, 80 * GIB).kv_cache == int(1.5 * GIB)
    assert rollout_memory(LLAMA_7B, 4, 2, None, 0.5, None).kv_cache is None


def test_kv_heads_are_repeated_where_vllm_has_more_ranks_than_heads():
    # 2 KV heads on 4 ranks: every rank holds one of them, k and v rows 2 * 32 * 128 instead of a quarter of 2 * 64 * 128
    four = rollout_memory(llama(heads=8), 4, 4, 0.1, 0.5, None)
    assert four.kv_bytes_per_token == 2 * 4 * 1 * 32 * 4
    linear = 2 * 8 * 32 * 128 // 4 + 2 * 32 * 128 + 3 * 128 * 384 // 4
    assert four.weights == 4 * (2 * 64 * 128 // 4 + 4 * (linear + 2 * 128) + 128)


def test_the_output_holds_one_chunk_of_logits():
    layout = ParallelLayout(2, 2)
    assert output_bytes(llama(vocab=1000), layout, 10_000, 2, True, trained=False) == 10_000 * 500 * 4
    assert output_bytes(llama(vocab=128_000), layout, 10_000, 2, True, trained=False) == (1 << 26) * 4
    # while logits are made they exist twice, as far as a block reaches; then their gradient stands beside them
    assert output_bytes(llama(vocab=1000), layout, 100, 4, True, trained=True) == 100 * 500 * (4 + 4) + 500 * 128 * 4
    assert output_bytes(llama(vocab=1000), layout, 10_000, 2, True, trained=True) == 4096 * 500 * (4 + 4) + 500 * 128 * 4
    wide = llama(vocab=128_000)
    assert output_bytes(wide, layout, 10_000, 2, True, trained=True) == 4096 * 64_000 * (4 + 2) + 64_000 * 128 * 4
    assert output_bytes(wide, layout, 10_000, 4, True, trained=True) == (4096 * 64_000 + (1 << 26)) * 4 + 64_000 * 128 * 4


def test_the_blocks_are_those_of_the_ops():
    from megappo.ops import linear_blocks, linear_loss

    assert activations.CHUNK_TOKENS == linear_loss.CHUNK_TOKENS
    assert activations.BLOCK_LOGITS == linear_blocks.BLOCK_LOGITS
    assert activations.BLOCK_WEIGHTS == linear_blocks.BLOCK_WEIGHTS


def sparse_arch(dense_layers=()):
    """Four layers of 8 experts, of which a token takes 2."""
    return replace(llama(), family="qwen3_moe", qk_norm=True, moe=replace(MOE, dense_layers=dense_layers))


EXPERT = 3 * 96 * 128
# axes (8 ranks), stage, experts of a rank (of 8 in each of 4 layers), each cut over so many ranks
EXPERTS = [
    ({}, 0, 4 * 8, 1),
    ({"ep": 4}, 0, 4 * 2, 1),
    ({"etp": 2}, 0, 4 * 8, 2),
    ({"ep": 2, "etp": 4}, 0, 4 * 4, 4),
    ({"pp": 2, "ep": 2}, 1, 2 * 4, 1),
    ({"pp": 2, "layers_per_stage": (3, 1), "cp": 2}, 0, 3 * 8, 1),
    ({"tp": 2, "sequence_parallel": True, "ep": 8}, 0, 4 * 1, 1),
]


@pytest.mark.parametrize("axes, stage, experts, cut", EXPERTS)
def test_experts_of_a_rank(axes, stage, experts, cut):
    layout = ParallelLayout(8, **axes)
    count = count_parameters(sparse_arch(), layout, stage)
    assert count.experts == experts * EXPERT // cut
    layers = len(list(layout.stage_layers(4, stage)))
    router_and_norms = 8 * 128 + 2 * 128 + 2 * 32
    attention = (128 * 128 + 2 * 64 * 128 + 128 * 128) // layout.tp
    ends = 64 * 128 // layout.tp * (1 + (layout.pp == 1)) + (128 if stage == layout.pp - 1 else 0)
    assert count.dense == layers * (router_and_norms + attention) + ends


def test_the_state_of_experts_is_cut_over_the_ranks_that_hold_them():
    """8 ranks: the dense layers are cut over dp x cp, experts over what ep and etp leave."""
    sizes = {"dtype": "bf16", "trained": True, "micro_batch_tokens": 8, "num_micro_batches": 1}
    cases: list[tuple[dict, int]] = [({}, 8), ({"ep": 4}, 2), ({"ep": 2, "etp": 2}, 2), ({"cp": 2, "ep": 8}, 1)]
    for axes, expert_shards in cases:
        layout = ParallelLayout(8, **axes)
        count = count_parameters(sparse_arch(), layout, 0)
        whole = role_memory(sparse_arch(), layout, 0, RoleWork(distributed_optimizer=False, **sizes))
        cut = role_memory(sparse_arch(), layout, 0, RoleWork(**sizes))
        assert whole.optimizer == 12 * (count.dense + count.experts)
        assert cut.optimizer == 12 * count.dense // 8 + 12 * count.experts // expert_shards
        assert cut.weights == 2 * count.total and cut.gradients == 4 * count.total


def test_layers_without_experts_are_counted_as_such():
    layout, sizes = ParallelLayout(2, pp=2), {"dtype": "fp32", "trained": True, "micro_batch_tokens": 10, "num_micro_batches": 1}
    mixed = sparse_arch(dense_layers=(0,))
    kinds = mixed.kind(0), mixed.kind(1)
    dense, sparse = (layer_elements_per_token(mixed, layout, 4, kind) for kind in kinds)
    assert dense != sparse
    messages, backward = 2 * 128, max(activations.backward_elements(mixed, layout, kind) for kind in kinds)
    assert role_memory(mixed, layout, 0, RoleWork(**sizes)).activations == 10 * 4 * (dense + sparse + messages + backward)
    assert count_parameters(mixed, layout, 0).experts == 8 * EXPERT


def test_vllm_cuts_every_expert_over_its_ranks():
    whole, quarter = (rollout_memory(sparse_arch(), tp, 2, 0.1, 0.5, None).weights for tp in (1, 2))
    shared = 4 * (8 * 128 + 2 * 128 + 2 * 32) + 128  # routers and norms are on every rank
    assert quarter == (whole - 2 * shared) // 2 + 2 * shared
