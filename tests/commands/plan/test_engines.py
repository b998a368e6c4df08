"""The plan's bytes against engines that are really built: what they allocate, what autograd saves, what is alive at once, and what
is there in each of their modes. Two ranks run everything.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megappo.commands.plan.activations import RoleWork, layer_elements_per_token, score_bytes_per_token
from megappo.commands.plan.memory import count_parameters, role_memory
from megappo.models.arch import ModelArch, MoeArch
from megappo.parallel.layout import ParallelLayout
from tests.commands.plan import live
from tests.commands.plan.archs import MOE, deepseek, delta_nets, gated, gemma, glm, llama, oss
from tests.models.checkpoints import CASES, EXPERT_CASES
from tests.worlds import spawn_world

SHAPES = [  # hidden, heads, kv heads, head_dim, ffn
    (128, 4, 2, 32, 384),
    (96, 6, 1, 32, 512),
    (128, 2, 2, 64, 256),
]


FINE = MoeArch(32, 4, 48, False)
BF16, FP32 = torch.bfloat16, torch.float32
# axes of two ranks, shape, experts, dtype, recompute
SP = {"tp": 2, "sequence_parallel": True}
MEASURED = (
    [({}, shape, None, dtype, "none") for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)]
    + [({}, SHAPES[0], None, torch.float32, recompute) for recompute in ("selective", "full")]
    + [({"cp": 2}, shape, None, torch.float32, "none") for shape in SHAPES[:2]]  # the second has fewer KV heads than ranks
    + [(SP, shape, None, torch.float32, "none") for shape in SHAPES[:2]]
    + [({"ep": 2}, SHAPES[0], MOE, dtype, "none") for dtype in (torch.float32, torch.bfloat16)]
    + [({"ep": 2}, SHAPES[0], FINE, torch.bfloat16, "none")]
    + [(axes, SHAPES[0], MOE, torch.float32, "none") for axes in (SP, SP | {"etp": 2}, SP | {"ep": 2}, {"cp": 2, "ep": 2})]
    + [(axes, SHAPES[0], of, dtype, "none") for of in (glm, deepseek) for axes, dtype in ((SP, BF16), ({"cp": 2, "ep": 2}, FP32))]
    + [(SP, SHAPES[0], oss, FP32, "none"), ({"cp": 2, "ep": 2}, SHAPES[0], oss, BF16, "selective")]
    + [(axes, SHAPES[0], of, dtype, "none") for of in (delta_nets, gated) for axes, dtype in (({"ep": 2}, FP32), (SP, BF16))]
    + [(axes, SHAPES[0], gemma, dtype, "none") for axes, dtype in (({}, FP32), (SP, BF16))]
)


def shaped(layers, shape, moe: Any) -> ModelArch:
    """A llama with these experts, or none; or what `moe` makes of the shape."""
    if callable(moe):
        made: Any = moe
        return made(layers, *shape)
    arch = llama(layers, *shape)
    return arch if moe is None else replace(arch, family="qwen3_moe", qk_norm=True, moe=moe)


# axes of two ranks, architecture, type, value head, distributed optimizer: what is built and trained
TIED = replace(llama(4, *SHAPES[0]), tied_embeddings=True)
BUILT = [
    *(
        (axes, shaped(4, SHAPES[0], moe), BF16, False, True)
        for axes, moe in [
            ({}, None),
            ({"cp": 2}, None),
            ({"tp": 2}, None),
            ({"pp": 2, "vpp": 2}, None),
            ({"pp": 2, "layers_per_stage": (3, 1)}, None),
            ({}, MOE),
            ({"ep": 2}, MOE),
            (SP | {"etp": 2}, MOE),
            (SP, MOE),
            ({"cp": 2, "ep": 2}, MOE),
            ({"pp": 2}, replace(MOE, dense_layers=(1, 3))),
        ]
    ),
    ({}, shaped(4, SHAPES[0], None), BF16, True, True),
    ({"pp": 2}, shaped(4, SHAPES[0], None), BF16, True, True),
    (SP, shaped(4, SHAPES[0], None), FP32, True, True),
    ({}, shaped(4, SHAPES[0], None), BF16, False, False),
    ({}, shaped(4, SHAPES[0], MOE), FP32, True, False),
    ({"pp": 2}, TIED, BF16, False, True),
    (SP, glm(4, *SHAPES[0]), BF16, True, True),  # corrections are fp32 and have no gradient
    ({"ep": 2}, deepseek(4, *SHAPES[0]), BF16, False, True),
    (SP, oss(4, *SHAPES[0]), BF16, True, True),
    (SP, gemma(4, *SHAPES[0]), BF16, False, True),
    (SP, llama(4, *SHAPES[1]), BF16, False, True),  # a copy of one KV head on each rank
]

# A llama with enough tokens for its small tensors not to count: axes of two ranks, architecture, type, recompute, value head
WIDE = llama(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=768, vocab=512)
LENGTHS, BUDGET = [64] * 16, 512
PEAKS = [
    ({}, WIDE, BF16, "selective", False),
    ({}, WIDE, FP32, "full", True),
    (SP, replace(WIDE, family="qwen3", qk_norm=True), BF16, "none", False),
    ({"cp": 2}, WIDE, BF16, "none", True),
    ({"ep": 2}, replace(WIDE, family="qwen3_moe", qk_norm=True, moe=MoeArch(8, 4, 192, True)), BF16, "full", False),
    ({"pp": 2}, WIDE, BF16, "none", False),
    ({"pp": 2, "vpp": 2}, WIDE, BF16, "full", False),
]
# Of transformers' classes under fsdp2, in the shape of WIDE: model, keys of the section, role
TP_SP = {"parallel": {"tp": 2, "sequence_parallel": True}}
OWN = [
    ("Qwen3", {"dtype": "fp32"}, "policy"),
    ("Qwen3", {"dtype": "bf16", **TP_SP}, "policy"),
    ("Llama", {"dtype": "fp32", "recompute": "full"}, "policy"),
    ("Llama", {"dtype": "fp32", "parallel": {"cp": 2}}, "policy"),
    ("Llama", {"dtype": "bf16", "lora": {"rank": 8}}, "policy"),
    ("Llama", {"dtype": "fp32", "lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}}, "policy"),
    ("Qwen2", {"dtype": "bf16"}, "critic"),
    ("Qwen2", {"dtype": "fp32", "recompute": "selective"}, "policy"),
    ("wide", {"dtype": "bf16"}, "policy"),
    ("gemma3", {"dtype": "bf16"}, "policy"),
]
# The same with experts or delta nets, which are estimated: also the tokens of a sequence.
ROUGH = [
    ("glm4_moe", {"dtype": "bf16"}, "policy", 64),
    ("gpt_oss", {"dtype": "bf16"}, "policy", 64),
    ("qwen3_next", {"dtype": "bf16", "recompute": "selective"}, "critic", 64),
    ("qwen3_5", {"dtype": "fp32"}, "policy", 256),
]
MODES = [({}, False), ({"pp": 2}, True), ({"ep": 2}, False)]  # axes of two ranks, value head


def measure(rank, activations, built, peaked, moded, folder):
    from megappo.parallel import cpu_patches

    cpu_patches.install()
    arch = {axes.get("ep", 1): shaped(4, SHAPES[0], MOE if "ep" in axes else None) for axes, _ in moded}
    return (
        saved_bytes(activations),
        [allocated_bytes(*case) for case in built],
        [live.peaks(arch, axes, dtype, how, critic, LENGTHS, BUDGET) for axes, arch, dtype, how, critic in peaked],
        [live.modes(arch[axes.get("ep", 1)], axes, critic, [32] * 4) for axes, critic in moded],
        live.described(arch[2], {"ep": 2}),
        [live.own_peaks(f"{folder}/{model}", section, role) for model, section, role in OWN],
        [live.own_peaks(f"{folder}/{model}", *others) for model, *others in ROUGH],
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(bytes per token of MEASURED, bytes of BUILT, PEAKS and MODES, what a description makes, bytes of OWN, of ROUGH) of each of
    two ranks.
    """
    folder = tmp_path_factory.mktemp("own")
    for model in {model for model, *_ in (*OWN, *ROUGH)}:
        write_shape(folder / model, model)
    return spawn_world(measure, 2, MEASURED, BUILT, PEAKS, MODES, str(folder))


def write_shape(path, model):
    """config.json of transformers' class in the shape of WIDE; wide: a Llama whose logits outweigh the rest; or a case of
    `tests.models.checkpoints`."""
    import transformers

    sizes = dict(vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, head_dim=64, max_position_embeddings=64)
    if (case := {**CASES, **EXPERT_CASES}.get(model)) is not None:
        name, config = case
        cut = dict(moe_intermediate_size=192, shared_expert_intermediate_size=192, linear_num_key_heads=2, linear_num_value_heads=4)
        cut |= dict(linear_key_head_dim=64, linear_value_head_dim=64)
        sizes = config | sizes | {"max_position_embeddings": 256} | {key: size for key, size in cut.items() if key in config}
        sizes |= {"intermediate_size": 192, "pad_token_id": None} if model == "gpt_oss" else {}
    else:
        name = "Llama" if model == "wide" else model
        sizes |= dict(vocab_size=8192, tie_word_embeddings=True) if model == "wide" else {}
    kind = getattr(transformers, f"{name}ForCausalLM").config_class
    kind(**sizes, architectures=[f"{name}ForCausalLM"], bos_token_id=1, eos_token_id=2).save_pretrained(path)


def allocated_bytes(axes, arch, dtype, value_head, distributed):
    """(parameters, weights, gradients, optimizer state) in bytes, the first as a number, of this rank after an update."""
    from megappo.config.role_sections import OptimizerConfig
    from megappo.engine.megatron_optimizer import Optimizer, wrap_with_ddp
    from megappo.models.build import build_model

    groups = live.groups_of(2, **axes)
    chunks = wrap_with_ddp(build_model(arch, groups, dtype=dtype, value_head=value_head), groups, distributed_optimizer=distributed)
    optimizer = Optimizer(chunks, groups, OptimizerConfig(distributed=distributed), total_steps=1)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    assert optimizer.step().applied  # moments exist after the first step
    parameters: list[Any] = [parameter for chunk in chunks for parameter in chunk.parameters()]
    gradients = [parameter.main_grad for parameter in parameters if parameter.requires_grad]
    own = {parameter.untyped_storage()._cdata for parameter in parameters}  # fp32 weights are their own main parameters
    state = {t.data_ptr(): t.nbytes for t in optimizer.tensors() if t.untyped_storage()._cdata not in own}
    counts = [sum(tensor.nbytes for tensor in tensors) for tensors in (parameters, gradients)]
    return (sum(parameter.numel() for parameter in parameters), *counts, sum(state.values()))


def test_what_is_counted_is_what_a_trained_model_allocates(measured):
    for index, (axes, arch, dtype, value_head, distributed) in enumerate(BUILT):
        layout = ParallelLayout(2, **axes)
        sizes = {"dtype": "bf16" if dtype == BF16 else "fp32", "trained": True, "micro_batch_tokens": 1, "num_micro_batches": 1}
        sizes |= {"value_head": value_head, "distributed_optimizer": distributed}
        planned = [role_memory(arch, layout, layout.coordinates(rank).pp, RoleWork(**sizes)) for rank in (0, 1)]
        for rank, plan in enumerate(planned):
            assert measured[rank][1][index][:3] == (plan.parameters, plan.weights, plan.gradients), (BUILT[index], rank)
        # The ranks that share a buffer share its state, at the borders of its buckets and not exactly in halves.
        state = [measured[rank][1][index][3] for rank in (0, 1)]
        stages = [state] if layout.pp == 1 else [[size] for size in state]
        plans = [planned] if layout.pp == 1 else [[plan] for plan in planned]
        for found, plan in zip(stages, plans):
            assert sum(found) == pytest.approx(sum(one.optimizer for one in plan), abs=12 * len(plan)), BUILT[index]
        if axes == {"ep": 2} and arch.moe is MOE:
            wrong = sum(one.optimizer for one in planned) - 12 * count_parameters(arch, layout, 0).experts
            assert sum(state) != pytest.approx(wrong, abs=24), "negative control: experts cut like the dense layers are seen"


def test_the_peak_of_a_pass_is_the_estimate_within_a_tenth(measured):
    """Of every tensor that the engine's passes make, beside weights, gradients and optimizer."""
    missed = 0
    for index, (axes, arch, dtype, recompute, critic) in enumerate(PEAKS):
        layout = ParallelLayout(2, **axes)
        micro_batches = len(LENGTHS) // layout.dp // (BUDGET // LENGTHS[0])
        for rank in (0, 1):
            stage = layout.coordinates(rank).pp

            def planned(how):
                return role_memory(
                    arch,
                    layout,
                    stage,
                    RoleWork(
                        dtype="bf16" if dtype == BF16 else "fp32",
                        trained=True,
                        micro_batch_tokens=BUDGET,
                        num_micro_batches=micro_batches,
                        value_head=critic,
                        recompute=how,
                    ),
                )

            forward, trained = measured[rank][2][index]
            assert planned(recompute).forward == pytest.approx(forward, rel=0.1), (PEAKS[index], rank)
            assert planned(recompute).activations == pytest.approx(trained, rel=0.1), (PEAKS[index], rank)
            other = "none" if recompute == "full" else "full"
            missed += planned(other).activations != pytest.approx(trained, rel=0.1)
    assert missed == 2 * len(PEAKS), "negative control: the other kind of recomputation is never within a tenth"


def test_the_peak_of_a_training_pass_under_fsdp2_is_the_plans_within_2_percent(measured):
    """In dp, tp and cp, with adapters and recomputation, where a layer's backward or the logits are the fullest moment."""
    wrong = {}
    for index, case in enumerate(OWN):
        for rank in (0, 1):
            forward, trained, planned_forward, planned = measured[rank][5][index]
            wrong |= {(*map(str, case), rank): planned / trained} if planned != pytest.approx(trained, rel=0.02) else {}
            if case[0] != "wide":  # whose log-probs are one operator, inside which nothing is seen
                assert planned_forward == pytest.approx(forward, rel=0.05), case
    assert wrong == {}
    others = {sizes[3] for sizes in measured[0][5]}
    assert len(others) == len(OWN), "negative control: each case has a plan of its own"


def test_the_peaks_of_passes_with_experts_or_delta_nets_under_fsdp2_are_the_plans_within_a_tenth(measured):
    for case, ranks in zip(ROUGH, zip(*(one[6] for one in measured))):
        for forward, trained, planned_forward, planned in ranks:
            assert 0.96 * forward <= planned_forward <= 1.1 * forward and 0.96 * trained <= planned <= 1.1 * trained, case


def test_what_is_on_the_device_in_every_mode_of_an_engine_is_what_the_phases_say(measured):
    for index, (axes, critic) in enumerate(MODES):
        layout, arch = ParallelLayout(2, **axes), shaped(4, SHAPES[0], MOE if "ep" in axes else None)
        for rank in (0, 1):
            memory = role_memory(
                arch,
                layout,
                layout.coordinates(rank).pp,
                RoleWork(
                    dtype="bf16",
                    trained=True,
                    micro_batch_tokens=128,
                    num_micro_batches=1,
                    value_head=critic,
                    offload=(True, True, True),
                ),
            )
            found = {mode: sum(sizes) for mode, sizes in measured[rank][3][index].items()}
            update = memory.updating - memory.activations
            later = replace(memory, steps=2).updating - memory.activations
            expected = {
                "rest": memory.resident,
                "log-probs": memory.inferring - memory.forward,
                "update": update,
                "optimizer step": memory.stepping,
                "update after a step": later,
                "rest after": memory.resident,
                "checkpoint": memory.saving,
                "rest at the end": memory.resident,
            }
            assert memory.resident == 0 and found == pytest.approx(expected, rel=0.02), (MODES[index], rank)
            assert later == pytest.approx(memory.stepping) != pytest.approx(update, rel=0.02), "negative control"


def test_a_checkpoint_needs_no_second_copy_of_the_optimizer(measured):
    """The bytes counted while it is written (`RoleMemory.saving`) are those that are there."""
    for *_, (made, copied, optimizer), _, _ in measured:
        assert made <= 0.01 * optimizer
        assert copied >= optimizer, "negative control"


def saved_bytes(cases):
    """Bytes per token of a micro-batch that one layer keeps on this rank: the difference between four and two layers, halved."""
    from megappo.data.packing import cu_seqlens_of
    from megappo.models.build import build_model
    from megappo.parallel.context import context_shard

    tokens = 512

    def kept(layers, axes, shape, moe, dtype, recompute):
        groups = live.groups_of(2, **axes)
        (model,) = build_model(shaped(layers, shape, moe), groups, dtype=dtype, recompute=recompute)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        storages = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # holding it keeps the address from being used again
            return tensor

        cu_seqlens = cu_seqlens_of([tokens // 4] * 4)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            context = context_shard(cu_seqlens, groups.collection.cp, torch.device("cpu"))
            output = model(torch.randint(0, 64, (tokens,)), cu_seqlens, context)
        assert output.requires_grad
        return sum(size for size, _ in storages.values())

    return [(kept(4, *case) - kept(2, *case)) / 2 / tokens for case in cases]


def test_the_estimate_of_activations_holds_against_a_real_model(measured):
    # Experts are not chosen evenly: the mean over the ranks counts.
    case: Any
    for case, found in zip(MEASURED, (sum(sizes) / 2 for sizes in zip(*(one[0] for one in measured)))):
        axes, shape, moe, dtype, recompute = case
        layout = ParallelLayout(2, **axes)
        arch = shaped(4, shape, moe)
        per_token = layer_elements_per_token(arch, layout, dtype.itemsize, arch.kind(0))
        expected = per_token * dtype.itemsize / layout.cp
        if recompute != "selective":  # of sequences of 128 tokens
            expected += score_bytes_per_token(shaped(4, shape, moe), layout, 128, dtype.itemsize)[0] / layout.cp
        if recompute == "full":
            assert found == shape[0] * dtype.itemsize
            continue
        # An upper bound, and close to it: what it leaves out (softmax sums, rms) is below 1 %, what it adds below 10 %.
        assert 0.99 * found <= expected <= 1.10 * found, (case, found, expected)
        hidden, *_, ffn = shape
        rows, columns = (1, 5 * ffn) if arch.moe is None else (arch.moe.top_k, hidden + 6 * arch.moe.ffn_size)
        without_mlp = expected - rows * columns * dtype.itemsize / (layout.cp * layout.tp)
        assert not 0.99 * found <= without_mlp, "negative control: a term left out is seen"
