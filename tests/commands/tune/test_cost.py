"""The parts of the step-time model against what they stand for: schedules, rings, counted FLOPs, and plain directions."""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import probe
from benchmarks.probe import link_gb_s
from megappo.commands.plan.memory import RolloutMemory, count_parameters
from megappo.commands.plan.timeline import timeline
from megappo.commands.tune.candidates import Machine
from megappo.commands.tune.cost import (
    Pictures,
    Workload,
    exchange_s,
    pictures_of,
    pipeline_parts,
    role_cost,
    stage_kinds,
    workload_of,
)
from megappo.commands.tune.generation import Decoder, push_s, vllm_cost
from megappo.commands.tune.lengths import Lengths
from megappo.commands.tune.measure import phases_of
from megappo.commands.tune.search import MOST_DOUBLINGS, larger_worlds
from megappo.commands.tune.trials import Measured
from megappo.commands.tune.work import Links, Pass, Span, layer_products, span, stage_pass, tower_pass
from megappo.config.batch import TextArithmetic, UpdateSchedule
from megappo.config.loading import validated
from megappo.config.role_sections import CriticConfig, PolicyConfig, section_of
from megappo.config.schema import TrainConfig
from megappo.models.arch import ModelArch, MoeArch, Rope
from megappo.models.flops import keys_seen, layer_weights
from megappo.models.vision import tower_of
from megappo.models.weight_map import hf_tensors
from megappo.parallel.layout import ParallelLayout
from megappo.telemetry.hardware import load_hardware
from tests.models.vision_cases import vision_arch

ARCH = ModelArch("llama", "LlamaForCausalLM", 16, 2048, 16, 8, 128, 5632, 32000, 8192, False, 1e-6, Rope())
SPARSE = replace(ARCH, family="qwen3_moe", architecture="Qwen3MoeForCausalLM", moe=MoeArch(16, 2, 1024, True))
H100 = load_hardware("h100")
LINKS = Links(100e9, 10e9, 1e-6, 10e-6)
SCHEDULE = UpdateSchedule(1, 64, "token-mean")
WORK = Workload(samples=256, schedules={"policy": SCHEDULE, "critic": SCHEDULE}, prompt_tokens=256, response_tokens=768)


def cost(layout, arch=ARCH, role="policy", work=WORK, hardware=H100, **settings):
    config = validated({"policy": {"model": "none"} | settings, "critic": settings, "data": {"train": "none"}}, TrainConfig)
    counts = {stage: count_parameters(arch, layout, stage, role == "critic") for stage in range(layout.pp)}
    return role_cost(role, arch, layout, section_of(config, role), work, hardware, counts)


def test_the_time_of_a_pipeline_is_that_of_its_timeline():
    for backward in [1.0, 2.0, 3.0]:
        for pp, vpp, count in [(1, 1, 3), (2, 1, 1), (2, 1, 7), (4, 1, 2), (4, 1, 16), (2, 2, 4), (4, 2, 8), (4, 4, 16), (8, 2, 8)]:
            layout = ParallelLayout(pp, pp=pp, vpp=vpp)
            stages = [(Pass({"matmul": 1.0}, {"matmul": backward}), pp)]
            parts, drawn = pipeline_parts(stages, layout, count), timeline(layout, count, backward=backward)
            assert sum(parts.values()) == pytest.approx(drawn.total)
            assert parts["bubble"] / sum(parts.values()) == pytest.approx(drawn.bubble)


@pytest.mark.parametrize("window, prompt, response", [(100, 40, 100), (100, 40, 250), (64, 10, 512), (1000, 40, 250)])
def test_windows_are_the_mean_of_a_run_whose_places_are_out_of_step(window, prompt, response):
    """Places that begin a response one step after the other, each drawn and replaced for many steps, by a loop."""
    keys = {"rollout": {"partial_rollout_tokens": window, "max_response_tokens": 1024}, "algorithm": {"mini_batch_size": 128}}
    config = validated({"policy": {"model": "none"}, "data": {"train": "none", "prompts_per_step": 256}, **keys}, TrainConfig)
    work = workload_of(config, prompt, response)
    per_response, lengths, drawn, ended = -(-response // window), [], [], 0
    places = [first * window for first in range(per_response)] * 10  # tokens that each place has of its response
    for _ in range(12 * per_response):
        for place, begun in enumerate(places):
            now = min(window, response - begun)
            lengths.append(prompt + begun + now)
            drawn.append(now)
            places[place] = begun + now
            if places[place] == response:
                places[place], ended = 0, ended + 1
    steps = 12 * per_response * len(places)
    assert work.length == pytest.approx(sum(lengths) / steps) and work.response_tokens == pytest.approx(sum(drawn) / steps)
    assert work.decoded_tokens == min(window, response), "the longest of a step"
    assert work.update("policy") == (128, work.prompt_tokens, work.response_tokens)
    share = ended / steps  # of samples, from which the critic learns, at their whole length
    assert work.update("critic") == (round(128 * share), prompt, response)
    tokens = 128 * share * (prompt + response)
    assert work.sequences_of_update("critic") == pytest.approx(tokens / work.length, rel=0.02, abs=1)
    assert work.passes("critic") == pytest.approx(256 * work.length / tokens, rel=0.02)


def test_windows_shorten_generation_and_the_critics_updates():
    keys = {"policy": {"model": "none"}, "data": {"train": "none"}, "rollout": {"max_response_tokens": 4096}}
    whole = workload_of(validated(keys, TrainConfig), 256, 4096)
    keys["rollout"]["partial_rollout_tokens"] = 1024
    cut = workload_of(validated(keys, TrainConfig), 256, 4096)
    times = {
        name: {role: cost(ParallelLayout(8, tp=8), role=role, work=work) for role in ("policy", "critic")}
        for name, work in (("whole", whole), ("cut", cut))
    }
    # a fourth of the responses end in a step, and a fourth of the tokens is drawn
    assert times["cut"]["critic"].phases["update"] == pytest.approx(times["whole"]["critic"].phases["update"] / 4, rel=0.15)
    assert cut.decoded_tokens == whole.decoded_tokens / 4
    # the policy passes what there is of each response: 1024 to 4096 tokens behind the prompt, 2560 on average
    ratio = times["cut"]["policy"].phases["forward"] / times["whole"]["policy"].phases["forward"]
    assert ratio == pytest.approx((256 + 2560) / (256 + 4096), rel=0.1)


def test_texts_cost_the_policy_as_much_as_samples_of_their_tokens():
    """64 samples of 1,024 tokens in an update; 32 texts of 2,048 are as many tokens."""
    layout, texts = ParallelLayout(8, tp=8), TextArithmetic(32, 2048)
    plain, mixed = cost(layout), cost(layout, work=replace(WORK, texts=texts))
    twice = cost(layout, work=replace(WORK, samples=512, schedules={"policy": replace(SCHEDULE, mini_batch_size=128)}))
    assert mixed.phases["forward"] == plain.phases["forward"]
    assert mixed.phases["update"] == twice.phases["update"] > plain.phases["update"]
    assert cost(layout, role="critic", work=replace(WORK, texts=texts)) == cost(layout, role="critic")


def test_a_slow_stage_sets_the_pace():
    slow, fast = Pass({"matmul": 2.0}), Pass({"matmul": 1.0})
    assert sum(pipeline_parts([(fast, 3), (slow, 1)], ParallelLayout(4, pp=4), 10).values()) == pytest.approx(10 * 2 + 3 * 1)


def test_a_slow_stage_in_the_middle_sets_the_pace_too():
    """Of a split that the user chose, and of a model whose first layers have no experts."""
    even, uneven = ParallelLayout(4, pp=4), ParallelLayout(4, pp=4, layers_per_stage=(2, 10, 2, 2))
    assert cost(uneven).parts["matmul"] == pytest.approx(10 / 4 * cost(even).parts["matmul"])
    assert stage_kinds(ARCH, uneven) == {0: 1, 1: 1, 2: 1, 3: 1} and stage_kinds(ARCH, even) == {0: 1, 1: 2, 3: 1}
    mixed = replace(SPARSE, moe=replace(SPARSE.moe, dense_layers=tuple(range(6))))
    assert stage_kinds(mixed, ParallelLayout(8, pp=8)) == {0: 1, 1: 2, 3: 4, 7: 1}
    assert stage_kinds(ARCH, ParallelLayout(1)) == {0: 1}


@pytest.mark.parametrize(
    "layout, axis, size, in_node",
    [
        (ParallelLayout(64, tp=8, pp=4), "tp", 8, 8),
        (ParallelLayout(64, tp=8, pp=4), "gradients", 2, 1),
        (ParallelLayout(64, tp=2, pp=4), "gradients", 8, 4),
        (ParallelLayout(64, tp=4, cp=4), "cp", 4, 2),
        (ParallelLayout(64, tp=8, pp=8), "pp", 8, 1),
        (ParallelLayout(16, tp=1, pp=8), "pp", 8, 4),
        (ParallelLayout(16, tp=16), "tp", 16, 8),
        (ParallelLayout(32, tp=4, ep=8), "ep", 8, 8),
        (ParallelLayout(32, tp=4, ep=8, etp=2), "expert gradients", 2, 1),
    ],
    ids=str,
)
def test_spans_are_those_of_the_rank_order(layout, axis, size, in_node):
    """Against the groups themselves, on nodes of 8."""
    axes = {"gradients": ("cp", "dp"), "expert gradients": ("edp",)}.get(axis, (axis,))
    ranks = layout.axis_groups(*axes)[0]
    assert (len(ranks), sum(rank // 8 == ranks[0] // 8 for rank in ranks)) == (size, in_node)
    assert span(layout, axis, 8) == Span(size, in_node)


def test_collectives_take_what_a_ring_takes():
    inside, across = Span(4, 4), Span(16, 8)
    assert LINKS.gather_s(Span(1, 1), 1e9) == 0
    assert LINKS.gather_s(inside, 1e9) == pytest.approx(0.75 * 1e9 / 100e9 + 2e-6)
    assert LINKS.all_reduce_s(inside, 1e9) == pytest.approx(2 * LINKS.gather_s(inside, 1e9))
    # Eight adapters of a node carry the ring out of it: 80 GB/s, less than the links inside.
    assert LINKS.gather_s(across, 1e9) == pytest.approx(15 / 16 * 1e9 / 80e9 + 40e-6)
    # Half of what a rank sends leaves the node, through its own adapter alone.
    assert LINKS.all_to_all_s(across, 1e9) == pytest.approx(0.5 * 1e9 / 10e9 + 40e-6)
    assert LINKS.send_s(across, 1e9) == pytest.approx(0.1 + 10e-6)


@pytest.mark.parametrize("arch", [ARCH, SPARSE], ids=lambda arch: arch.family)
def test_products_are_two_flops_for_every_weight_that_a_token_passes(arch):
    """Against the shapes of the checkpoint."""
    shapes = {name: shape for name, shape in hf_tensors(arch).items() if name.startswith("model.layers.0.") and len(shape) == 2}
    active = 2 / 16
    weights = sum(prod(shape) * (active if ".experts." in name else 1) for name, shape in shapes.items())
    products = layer_products(arch, ParallelLayout(1), arch.kind(0), tokens=64)
    assert sum(2 * one.rows * one.inner * one.columns * one.count for one in products) == pytest.approx(2 * 64 * weights)
    assert sum(layer_weights(arch, arch.kind(0))) == pytest.approx(weights), "what the trainer's statistics count"


@pytest.mark.parametrize(
    "layout", [{"tp": 4, "sequence_parallel": True}, {"tp": 2, "ep": 2, "sequence_parallel": True}, {"ep": 4}], ids=str
)
def test_ranks_share_the_products(layout):
    cut = ParallelLayout(4, **layout)
    whole, mine = (layer_products(SPARSE, one, SPARSE.kind(0), 64) for one in (ParallelLayout(1), cut))
    flops = [sum(one.rows * one.inner * one.columns * one.count for one in products) for products in (whole, mine)]
    assert flops[1] == pytest.approx(flops[0] / cut.tp)
    assert mine[-1].weights * cut.ep == pytest.approx(whole[-1].weights)


def test_a_sharded_role_exchanges_its_weights_for_every_micro_batch():
    """On the CPU two gathers and a reduction in fp32 for each micro-batch of an update, and one gather for each of a pass."""
    cpu, layout = load_hardware("cpu"), ParallelLayout(4)
    sharded = cost(layout, hardware=cpu, engine="fsdp2", dtype="bf16", micro_batch_tokens=1024)
    size, links, group = count_parameters(ARCH, layout, 0).total, Links.of(cpu), span(layout, "gradients", cpu.gpus_per_node)
    passes, updates = WORK.samples / 4, WORK.updates("policy") * WORK.mini_batch("policy") / 4  # micro-batches of one sequence each
    gather, reduce = (links.gather_s(group, size * itemsize) for itemsize in (2, 4))
    assert sharded.parts["dp"] == pytest.approx(passes * gather + updates * (2 * gather + reduce))
    once = cost(layout, hardware=cpu, engine="fsdp2", dtype="bf16", micro_batch_tokens=1024, reduce_once=True)
    waited = passes * gather + updates * 2 * gather + WORK.updates("policy") * reduce
    assert once.parts["dp"] == pytest.approx(waited), "reductions of the last micro-batches alone"
    megatron = cost(layout, hardware=cpu, dtype="bf16", micro_batch_tokens=1024)
    assert megatron.parts["dp"] < sharded.parts["dp"], "once for each update"
    assert {part: one for part, one in megatron.parts.items() if part not in ("dp", "optimizer")} == {
        part: one for part, one in sharded.parts.items() if part not in ("dp", "optimizer")
    }
    assert cost(ParallelLayout(1), hardware=cpu, engine="fsdp2").parts["dp"] == 0
    adapters = cost(layout, hardware=cpu, engine="fsdp2", dtype="bf16", micro_batch_tokens=1024, lora={"rank": 8})
    assert adapters.parts["dp"] == pytest.approx(passes * gather + updates * 2 * gather, rel=0.02), "a frozen base has no gradients"


def test_large_micro_batches_hide_the_exchange_on_a_gpu():
    small, large = (cost(ParallelLayout(8), engine="fsdp2", micro_batch_tokens=tokens) for tokens in (1024, 32768))
    assert large.share("dp") < 0.05 and small.parts["dp"] > 4 * large.parts["dp"] > 0


def test_products_are_slower_while_weights_are_gathered_beside_them():
    """By 18.9 %, for as long as that takes: of 1.189 s beside a second is as much done as in one alone."""
    layout, work, group = ParallelLayout(8), Pass({"matmul": 10.0}, {"matmul": 20.0}), Span(8, 8)
    gather, reduce = (Links.of(H100).gather_s(group, size) for size in (10**9, 2 * 10**9))
    talk = gather + gather + reduce
    found = exchange_s(10**9, 2 * 10**9, layout, 10, work, H100)
    assert talk < 10 and found == pytest.approx(talk / 10 + talk - talk / 1.189)
    assert exchange_s(10**9, 2 * 10**9, layout, 10, Pass({"matmul": 0.0}, {"matmul": 0.0}), H100) == pytest.approx(talk), (
        "all shows"
    )


def test_keys_seen_are_counted():
    window = replace(ARCH, sliding_window=4, sliding_layers=(True,) * 16)
    assert keys_seen(ARCH, 0, 10) == sum(range(1, 11)) / 10
    assert keys_seen(window, 0, 10) == sum(min(i, 4) for i in range(1, 11)) / 10


def test_the_step_is_near_six_flops_for_every_parameter_and_token():
    """In a large model with large micro-batches: 6 N a token to train, 2 N for a pass (Kaplan et al. 2020), and what comes on
    top."""
    found = cost(ParallelLayout(8), micro_batch_tokens=16384)
    parameters = sum(prod(shape) for shape in hf_tensors(ARCH).values()) - ARCH.vocab_size * ARCH.hidden_size
    tokens = WORK.samples * WORK.length / 8
    least = 8 * parameters * tokens / H100.flops_per_s("bf16")
    products = found.parts["matmul"] + found.parts["head"]
    assert 1.0 < products / least < 1.25


def test_parts_add_up_to_the_phases():
    for sizes in ({"tp": 2, "pp": 2, "cp": 2}, {"tp": 8, "sequence_parallel": True}, {"pp": 4, "vpp": 2}):
        layout = ParallelLayout(16, **sizes)
        for role in ("policy", "critic"):
            found = cost(layout, role=role, recompute="full", offload=["parameters", "optimizer"])
            assert sum(found.parts.values()) == pytest.approx(found.total_s)
            for phase, seconds in found.phases.items():
                assert sum(found.causes(phase).values()) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "better, worse",
    [
        (ParallelLayout(16, tp=8, sequence_parallel=True), ParallelLayout(16, tp=16, sequence_parallel=True)),
        (ParallelLayout(16, tp=8, sequence_parallel=True), ParallelLayout(16, tp=8)),
        (ParallelLayout(8, tp=2, pp=4, vpp=2, sequence_parallel=True), ParallelLayout(8, tp=2, pp=4, sequence_parallel=True)),
    ],
    ids=str,
)
def test_what_everybody_knows(better, worse):
    """tp inside a node; sequence parallel; interleaving where micro-batches are few."""
    settings = {"micro_batch_tokens": 8192}
    arch = replace(ARCH, num_kv_heads=16)
    assert cost(better, arch, **settings).total_s < cost(worse, arch, **settings).total_s


def test_recomputation_costs_one_forward_pass_of_the_layers():
    layout = ParallelLayout(8)
    plain, again = (cost(layout, recompute=how, micro_batch_tokens=8192) for how in ("none", "full"))
    updates = WORK.updates("policy") * WORK.mini_batch("policy") / WORK.samples
    assert again.parts["matmul"] - plain.parts["matmul"] == pytest.approx(updates * plain.parts["matmul"] / 4)


def test_a_token_is_decoded_as_fast_as_weights_and_cache_are_read():
    rollout = validated({"policy": {"model": "none"}, "data": {"train": "none"}}, TrainConfig).rollout
    memory = {tp: RolloutMemory(int(2e9 / tp), int(65536 / tp), int(20e9)) for tp in (1, 2)}
    found = {tp: vllm_cost(ARCH, rollout.model_copy(update={"tp": tp}), "bf16", memory[tp], WORK, 8, H100) for tp in (1, 2)}
    assert found[1].at_once == 32 and found[2].at_once == 64
    reads = memory[1].weights + 32 * (256 + 384) * 65536
    host = (H100.decode_overhead_us + 32 * H100.sequence_overhead_us) * 1e-6
    assert found[1].decode_s == pytest.approx(768 * max(reads / H100.memory_bytes_per_s, host)), "the host works beside the GPU"
    before = vllm_cost(ARCH, rollout, "bf16", memory[1], WORK, 8, H100, release=(0, 11))
    assert before.decode_s == pytest.approx(768 * (reads / H100.memory_bytes_per_s + host))


def test_a_replica_fills_its_places_and_waits_for_the_last_response():
    """Against a loop that draws token by token."""
    rollout = validated({"policy": {"model": "none"}, "data": {"train": "none"}}, TrainConfig).rollout
    rollout = rollout.model_copy(update={"max_num_seqs": 8})
    memory, drawn = RolloutMemory(int(2e9), 65536, int(20e9)), Lengths(200.0, 700.0, 1.0)
    work = replace(WORK, samples=64, response_tokens=200.0, lengths=drawn)
    cost = vllm_cost(ARCH, rollout, "bf16", memory, work, 2, H100, release=(0, 11))
    decoder = Decoder(ARCH, memory, Span(1, 1), "bf16", H100, False)
    waiting, places, seconds = [math.ceil(one) for one in drawn.of_replica(32, 2)], [], 0.0
    while waiting or places:
        while waiting and len(places) < 8:
            places.append([waiting.pop(0), 0])
        seconds += decoder.token(len(places), sum(256 + drawn + 0.5 for _, drawn in places)).seconds
        places = [[length, drawn + 1] for length, drawn in places if drawn + 1 < length]
    assert cost.decode_s == pytest.approx(seconds, rel=0.01)
    assert sum(cost.limits.values()) == pytest.approx(cost.decode_s) and cost.limits["longest response"] > 0.1 * cost.decode_s


def test_only_the_last_token_of_a_prompt_has_logits():
    rollout = validated({"policy": {"model": "none"}, "data": {"train": "none"}}, TrainConfig).rollout
    wide = replace(ARCH, vocab_size=10 * ARCH.vocab_size)
    memory = RolloutMemory(int(2e9), 65536, int(20e9))
    narrow, wider = (vllm_cost(arch, rollout, "bf16", memory, WORK, 8, H100).prefill_s for arch in (ARCH, wide))
    samples = WORK.samples / 8
    more = samples * 2 * ARCH.hidden_size * 9 * ARCH.vocab_size / H100.flops_per_s("bf16")
    assert wider - narrow == pytest.approx(more)


def test_weights_of_other_nodes_come_over_the_network():
    memory = RolloutMemory(int(10e9), 1, None)
    wires = replace(H100, push_gb_s=1e9)
    local, remote = (push_s(ParallelLayout(16, tp=8, pp=pp), memory, wires) for pp in (1, 2))
    assert remote > 3 * local and push_s(ParallelLayout(16, tp=8), None, H100) == 0
    local, wire = push_s(ParallelLayout(16, tp=8), memory, H100), local
    assert local - wire == pytest.approx(10 / H100.push_gb_s), "converted and loaded by the replica"
    offloaded = push_s(ParallelLayout(16, tp=8), memory, H100, offloaded=int(10e9))
    assert offloaded - local == pytest.approx(10e9 / H100.host_bytes_per_s), "they come from host memory, which keeps them"


def test_larger_worlds_are_of_whole_nodes():
    """8 GPUs in a node."""
    assert larger_worlds(Machine(1, H100))[:5] == [2, 4, 8, 16, 32]
    assert larger_worlds(Machine(7, H100))[:2] == [56, 112] and larger_worlds(Machine(3, H100))[:3] == [6, 24, 48]
    assert larger_worlds(Machine(24, H100))[:2] == [48, 96] and len(larger_worlds(Machine(24, H100))) == MOST_DOUBLINGS


def test_what_was_measured_is_a_step_with_weights_that_come_once():
    """256 samples in mini-batches of 64; a second of every pass is the way from host memory, three of a phase of updates there and
    back."""
    found = phases_of(Measured(forward_s=3.0, update_s=5.0, load_s=1.0, trip_s=3.0), "policy", WORK)
    assert found == pytest.approx({"forward": 1 + 4 * 2, "update": 3 + 4 * 5})
    assert phases_of(Measured(forward_s=3.0, update_s=None), "reference", WORK) == pytest.approx({"forward": 4 * 3})


def test_a_link_is_not_taken_to_be_faster_than_what_was_seen():
    assert link_gb_s(10**9, seconds=1.2, latency=0.2) == pytest.approx(1.0)
    assert link_gb_s(10**9, seconds=1.0, latency=1.5) == pytest.approx(2.0), "a busy machine, and not a million GB/s"


def test_a_rate_is_that_of_an_undisturbed_call(monkeypatch):
    """On a busy machine one call in thirty is left alone: eight would find none."""
    clock, calls = [0.0], []

    def work():
        calls.append(0)
        clock[0] += 0.007 if len(calls) % 30 == 0 else 0.015

    monkeypatch.setattr(probe.time, "perf_counter", lambda: clock[0])
    assert probe._undisturbed_s(work) == pytest.approx(0.007) and clock[0] < 2 * probe.LEAST_S
    calls.clear()
    assert min(probe._times(work, probe.FEWEST)) == pytest.approx(0.015)


def test_adapters_save_the_products_and_the_reduction_of_the_weights_gradients():
    layout = ParallelLayout(8, tp=2)
    whole, adapted = cost(layout), cost(layout, lora={"rank": 16})
    # Every linear layer reads its input again, and what it adds is written, read and added to the output.
    numbers = 6 * 2048 + 5632 + 4 * (3 * 2048 + 2 * 1024 + 2 * 5632)
    traffic = 16 * numbers * WORK.samples * WORK.length / 4 * 2 / 2 / H100.memory_bytes_per_s
    assert adapted.phases["forward"] - whole.phases["forward"] == pytest.approx(traffic)
    for part in ("dp", "optimizer"):
        assert 0 < adapted.parts[part] < 0.05 * whole.parts[part]
    # Of a forward pass of log-probs, and of forward and backward, 4 products of 4 are 3.
    assert adapted.parts["matmul"] == pytest.approx(0.75 * whole.parts["matmul"])


def test_a_stage_without_the_head_is_cheaper():
    layout = ParallelLayout(2, pp=2)
    policy = PolicyConfig(model="none")
    first, last = (stage_pass(ARCH, layout, stage, policy, 4096.0, 1024.0, H100) for stage in (0, 1))
    critic = stage_pass(ARCH, layout, 1, CriticConfig(), 4096.0, 1024.0, H100)
    assert first.total_s < last.total_s and critic.total_s == pytest.approx(first.total_s)


# ---------------------------------------------------------------------------------------------------------------- images

SEEING = vision_arch("qwen3_vl", depth=4, hidden_size=64, intermediate_size=128, num_heads=4)
PICTURES = replace(WORK, pictures=Pictures(tokens=64, prompts=64))


def of_tower(layout=ParallelLayout(8, tp=2), arch=SEEING, **settings):
    """Seconds that images add to (log-probs, updates) of a policy, with kernels that take no time to start."""
    hardware = replace(H100, layer_overhead_us=1e-9)
    seen, plain = (cost(layout, arch, work=work, hardware=hardware, **settings) for work in (PICTURES, WORK))
    return tuple(seen.phases[phase] - plain.phases[phase] for phase in ("forward", "update"))


def test_the_time_of_a_tower_is_its_operations_by_the_rate_of_products():
    """As torch counts those of the tower on an image of 64 features; a pass back has no gradient of the pixels."""
    vision = SEEING.vision
    assert vision is not None
    tower, side = tower_of(vision, torch.float32), 8 * vision.merge
    tower.config._attn_implementation = "eager"  # type: ignore[union-attr] # torch counts products, and not the CPU's kernel
    pixels = torch.randn(side**2, 3 * vision.frames * vision.patch**2)
    with (counter := FlopCounterMode(display=False)):
        out = tower(pixels, grid_thw=torch.tensor([[1, side, side]]), return_dict=True)
        forward = counter.get_total_flops()
        sum(one.sum() for one in (out.pooler_output, *out.deepstack_features)).backward()
    one, rate = tower_pass(vision, 64, "bf16", replace(H100, layer_overhead_us=1e-9)), H100.flops_per_s("bf16")
    assert one.forward_s == pytest.approx(forward / rate)
    assert one.total_s == pytest.approx(counter.get_total_flops() / rate)
    trained = of_tower()
    assert trained == pytest.approx((64 * one.forward_s, 64 * one.total_s))  # of all samples of a replica, whatever tp is
    assert of_tower(ParallelLayout(8, tp=4)) == pytest.approx((128 * one.forward_s, 128 * one.total_s))


def test_a_frozen_tower_takes_its_images_once_a_step():
    trained, frozen = of_tower(), of_tower(freeze=["visual"])
    assert frozen[1] == pytest.approx(0) and 0 < frozen[0] < trained[0]
    assert frozen[0] == pytest.approx(trained[0] * (1 - (1 - 1 / 64) ** 64))  # prompts of which a replica has a sample
    assert of_tower(lora={"rank": 8, "targets": ["q_proj"]})[1] == pytest.approx(0)
    assert of_tower(arch=ARCH) == (0, 0), "negative control: a model of text"


def test_a_search_counts_images_as_far_as_keys_say():
    keys = {"data": {"train": "none", "image_key": "images", "max_image_pixels": 64 * 32**2, "max_prompt_tokens": 200}}
    config = validated({"policy": {"model": "none"}} | keys, TrainConfig)
    assert SEEING.vision is not None and SEEING.vision.patch * SEEING.vision.merge == 32
    found = pictures_of(config, {"policy": SEEING})
    assert found == (64, config.data.prompts_per_step)
    assert pictures_of(config, {"policy": ARCH}) is None
