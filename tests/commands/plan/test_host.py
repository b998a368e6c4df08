"""Host work of a plan against numbers by hand, what it grows with, and the warning."""

from __future__ import annotations

from dataclasses import fields

import numpy
import pytest
import torch

from megappo.commands.plan.estimate import GIB, make_plan
from megappo.commands.plan.host import FIELD_NS, INDEX_NS, KEPT_NS, OWNER, ROW, ROW_NS, TEXT_NS, HostWork
from megappo.commands.plan.host_report import host_lines, host_warnings
from megappo.commands.plan.least_step import hardware_of_plan, least_step_s
from megappo.commands.plan.run import plan_run
from megappo.config.loading import load_config
from megappo.config.schema import AlgorithmConfig
from megappo.parallel.shares import Shares
from megappo.rollout.types import KeptIds, Request, Response, Segment
from megappo.telemetry.hardware import load_hardware
from megappo.trainer.experience.collect import pack_experience
from megappo.trainer.experience.owners import Owners
from megappo.trainer.experience.table import SampleTable
from megappo.trainer.prepare.layouts import check_layouts, read_archs
from megappo.trainer.shaping import shape_advantages
from megappo.trainer.updates import owners_of_epoch
from tests.commands.plan.checkpoints import LLAMA_7B, write_checkpoint, write_run

KEPT = 50 + 16 + 50 // 8  # of `top_k: 50`, with the margin for ties


def plan_of(path, overrides=(), ranks=2, device="cpu", memory=None):
    config = load_config(path, overrides)
    archs = read_archs(config)
    return make_plan(config, archs, check_layouts(config, archs, ranks), ranks, device, memory)


def large(folder, ranks, *overrides):
    """A 7B model on GPUs, 8 of them for each replica of every kind; 1,024 x 8 samples of 8,192 tokens unless overridden."""
    model = write_checkpoint(folder / "7b", LLAMA_7B | {"max_position_embeddings": 8192})
    sizes = ["data.prompts_per_step=1024", "rollout.samples_per_prompt=8", "algorithm.mini_batch_size=2048"]
    lengths = ["data.max_prompt_tokens=1024", "rollout.max_response_tokens=7168"]
    layouts = ["policy.parallel.tp=8", "critic.parallel.tp=8", "critic.parallel.pp=1", "reference.parallel.tp=8", "rollout.tp=8"]
    models = ["run.num_ranks=null", f"policy.model={model}", "policy.dtype=bf16", "critic.dtype=bf16"]
    offload = [f"{role}.offload.{what}=true" for role in ("policy", "critic") for what in ("parameters", "gradients", "optimizer")]
    # Memory is not the subject: a GPU of any size will do.
    return plan_of(write_run(folder), [*models, *sizes, *lengths, *layouts, *offload, *overrides], ranks, "cuda", 1000 * GIB)


def by_name(plan, rank):
    return {phase.name: phase for phase in HostWork(plan).phases(rank)}


def test_the_quickstart_by_hand(tmp_path):
    """64 samples of 24 tokens on 2 ranks: policy tp 2, critic pp 2, reference dp 2, a vLLM replica on each rank."""
    found = by_name(plan_of(write_run(tmp_path)), 1)
    own = 32 * 24
    # ids and log-probs of 32 responses of 8; the table, and owners when drawn, when spread, and for the three roles
    rest = 32 * 8 * 8 + 64 * (11 * 4 + 8 * (2 + 3))
    packed = own * (8 + 1 + 4)
    assert found["generate"].bytes == rest + packed + own * (4 + 2)
    # drawn and own tokens; indices and the buffers of all fields, ids as int32, at both ends
    assert found["exchange"].bytes == rest + 2 * packed + 2 * own * (8 + 4 + 1 + 4)
    assert found["score"].bytes == rest + packed + 48 * 32 * 8
    share = 64 * 24  # a replica of policy or critic is all ranks, the reference scores the own samples
    outputs = own * 4 * 4  # log-prob, entropy, value, log-prob of the reference
    # Rank 1 holds tokens for all roles, reports the values, and receives what is its own of each result.
    back = share * 4 + (share + own) * (8 + 4)
    sent = own * 2 + share  # to both tp ranks
    inputs = packed + 2 * share * 8 + sent * (8 + 4)
    assert found["log-probs, values"].bytes == rest + max(inputs, packed + outputs + 2 * share * 8 + back)
    everything = packed + outputs + own * 4 * 4  # reward, two advantages, return
    assert found["advantages"].bytes == rest + everything
    # tokens and mask, log-prob, advantage for the policy, value and return for the critic; then the policy's exchange
    roles = share * (8 + 1 + 4 + 4) + share * (8 + 1 + 4 + 4)
    assert found["updates"].bytes == rest + everything + roles + sent * (8 + 4 + 1 + 4 + 4)
    assert found["metrics"].bytes == rest + everything + 40 * own
    assert found["score"].seconds == pytest.approx(TEXT_NS * 1e-9 * 32 * 8)
    exchange_ns = 2 * own * (INDEX_NS + 3 * FIELD_NS) + own * (4 + 1 + 4) + 64 * ROW_NS
    assert found["exchange"].seconds == pytest.approx(1e-9 * exchange_ns)


def test_a_token_takes_the_bytes_of_its_tensors():
    response = Response(0, (Segment(numpy.ones(6, numpy.int32), numpy.zeros(6, numpy.float32), 0),), "stop")
    batch = pack_experience([Request(0, numpy.ones(4, numpy.int32), 0)], [response])
    assert sum(x.nbytes for x in (batch.tokens, *batch.token_fields.values())) == 10 * (8 + 1 + 4)
    table = SampleTable(*torch.zeros(11, 5, dtype=torch.int32))
    assert sum(getattr(table, name).nbytes for name in (field.name for field in fields(table))) == 5 * ROW
    outputs = {name: torch.zeros(10) for name in ("logprob", "entropy", "value", "ref_logprob")}
    full = batch.with_fields(outputs, {"bootstrap": torch.zeros(1)})
    shaped = shape_advantages(full, torch.zeros(1), 0.1, AlgorithmConfig())
    assert set(shaped.token_fields) - set(full.token_fields) == {"reward", "advantage", "raw_advantage", "returns"}


def test_the_kept_ids_of_a_plan_are_those_that_a_batch_holds(tmp_path):
    """Bytes counted on tensors: 32 samples at their longest, every sampled token with as many ids as are recorded."""
    found = [HostWork(plan_of(write_run(tmp_path), sampling)).phases(1) for sampling in ([], ["rollout.sampling.top_k=50"])]
    planned = {one.name: other.bytes - one.bytes for one, other in zip(*found)}
    kept = KeptIds(numpy.full(8, KEPT, numpy.int32), numpy.zeros(8 * KEPT, numpy.int32))
    segment = Segment(numpy.ones(8, numpy.int32), numpy.zeros(8, numpy.float32), 0)
    requests = [Request(number, numpy.ones(16, numpy.int32), 0) for number in range(32)]
    responses = [Response(number, (segment,), "length", kept) for number in range(32)]
    rows = pack_experience(requests, responses, with_kept=True).ragged("kept")
    of_batch = rows.ids.nbytes + rows.counts.nbytes + rows.offsets[1:].nbytes
    assert planned["score"] == planned["metrics"] == of_batch + 32 * (kept.ids.nbytes + kept.counts.nbytes)
    assert of_batch < 0.4 * 4 * KEPT * len(rows), "a table of all tokens is three times as large"


@pytest.mark.parametrize("ranks, own, at_once", [(8, 8_388_608, 4), (64, 1_048_576, 16), (512, 131_072, 4 + 1 + 4 * 4)])
def test_67_million_tokens_by_hand(tmp_path, ranks, own, at_once):
    """at_once: bytes of a token in one exchange, at least a field and at most 16 MiB of a mean share."""
    plan = large(tmp_path, ranks)
    work, found = HostWork(plan), by_name(plan, 0)
    assert work.own_tokens == own == 1024 * 8 * 8192 // ranks
    table = 8192 * (44 + 8 * (2 + 1))  # one division: all roles are tp 8
    drawn = 8192 // ranks  # the ranks of a vLLM replica answer in turn
    rest = drawn * 7168 * 8 + table
    assert found["score"].bytes == rest + own * 13 + 48 * own // 8192 * 7168
    assert found["score"].seconds == pytest.approx(TEXT_NS * 1e-9 * (own // 8192 * 7168))
    assert found["metrics"].bytes == rest + own * (13 + 16 + 16 + 40)
    share = 8192 // (ranks // 8) * 8192
    # union of what policy and critic read: mask, log-prob, advantage, value, return
    updates = own * (13 + 16 + 16) + share * (8 + 1 + 4 * 4) + (8 * own + share) * (8 + at_once)
    assert found["updates"].bytes == rest + updates
    assert by_name(plan, 1)["generate"] == found["generate"]
    if ranks == 64:
        placed = large(tmp_path, ranks, "rollout.ranks=8-63")
        others = by_name(placed, 0)
        assert others["generate"].bytes == table and others["generate"].seconds == 0


def of_equal_share(folder, ranks, *overrides):
    """16 samples for each rank."""
    return large(folder, ranks, f"data.prompts_per_step={2 * ranks}", f"algorithm.mini_batch_size={4 * ranks}", *overrides)


def test_with_as_many_samples_for_each_rank_only_rows_are_more_in_a_larger_world(tmp_path):
    small, big = (by_name(of_equal_share(tmp_path, ranks), 0) for ranks in (64, 512))
    rows = 16 * (512 - 64)
    for name, phase in small.items():
        assert big[name].bytes - phase.bytes == rows * (ROW + OWNER * 3), name
        # At most five plans of owners.
        assert 0 <= big[name].seconds - phase.seconds < 5e-9 * ROW_NS * rows, name
    # Negative control: with one replica of the policy its share is all samples.
    small, big = (
        by_name(of_equal_share(tmp_path, ranks, f"policy.parallel.pp={ranks // 8}", "reference.parallel.pp=1"), ranks - 8)
        for ranks in (16, 32)
    )
    assert big["updates"].bytes - small["updates"].bytes > 16 * 16 * 8192 * 8


def test_kept_ids_count_as_many_as_there_can_be(tmp_path):
    """Those of the sampled tokens, and their number and start for every token; no table [T, K]."""
    path = write_run(tmp_path)
    without, kept = (by_name(plan_of(path, overrides), 1) for overrides in ([], ["rollout.sampling.top_k=50"]))
    own, responses = 32 * 24, 32 * 8
    more = 12 * own + 4 * KEPT * responses + responses * 4 * (1 + KEPT)
    for name in ("score", "advantages", "metrics"):
        assert kept[name].bytes - without[name].bytes == more, name
    assert kept["generate"].bytes - without["generate"].bytes == more + own * 12
    # Both ends of the exchange hold ids and their numbers, beside what was drawn; without them mask and log-probs, at once.
    held = 2 * (12 * own + 4 * KEPT * responses) + responses * 4 * (1 + KEPT)
    assert kept["exchange"].bytes - without["exchange"].bytes == held + 2 * (4 * KEPT * responses - (1 + 4) * own)
    # A field more, and ids copied at both ends; 4 bytes of each on the wire
    more_ns = 2 * own * FIELD_NS + 2 * KEPT * responses * KEPT_NS + 4 * (own + KEPT * responses)
    assert kept["exchange"].seconds - without["exchange"].seconds == pytest.approx(more_ns * 1e-9)
    dropped = plan_of(path, ["rollout.sampling.top_k=50", "rollout.sampling.replay_kept_tokens=false"])
    assert by_name(dropped, 1) == without


def test_a_rank_does_the_work_of_the_roles_that_it_hosts(tmp_path):
    split = ["run.num_ranks=null", "policy.ranks=0-3", "critic.ranks=4-5", "reference.ranks=2-5", "rollout.ranks=0-1,6-7"]
    plan = plan_of(write_run(tmp_path), split, 8)
    on = [by_name(plan, rank) for rank in range(8)]
    assert [bool(found["generate"].seconds) for found in on] == [True, True, False, False, False, False, True, True]
    # Own samples are everybody's, so that rank 7, without a role, works too; but it holds no role's share.
    assert len({found["score"].seconds for found in on}) == 1
    assert on[7]["updates"].bytes < on[0]["updates"].bytes and on[6]["updates"].bytes == on[7]["updates"].bytes
    assert HostWork(plan).fullest_rank == max(range(8), key=lambda r: (max(p.bytes for p in HostWork(plan).phases(r)), -r))


def test_mini_batches_are_sent_also_where_every_rank_has_a_replica(tmp_path):
    """Each is balanced by itself: a rank's own samples are those of passes, and not those of its updates."""
    columns = torch.full((11, 8), 6, dtype=torch.int32)
    columns[-1] = -1  # no sequence goes on from another
    table = SampleTable(*columns)
    everywhere = Shares.of_world(4)
    spread = Owners.spread(table, 4)
    epoch = owners_of_epoch(table, everywhere, size=4, seed=0)
    assert not torch.equal(spread.share, epoch.share) and torch.equal(spread.share, Owners.of_role(table, everywhere).share)
    single = [f"{role}.parallel.tp=1" for role in ("policy", "critic", "reference")]
    plan = large(tmp_path, 64, *single, "rollout.tp=1")
    found, own = by_name(plan, 0), 1_048_576
    rest = 128 * 7168 * 8 + 8192 * (44 + 8 * (2 + 1))
    experience = own * (13 + 16 + 16)
    # tokens, mask, log-prob, advantage, value, return; both ends of the exchange hold an index and 16 MiB of fields at once
    assert found["updates"].bytes == rest + experience + own * (8 + 1 + 4 * 4) + 2 * own * (8 + 16)
    assert found["advantages"].bytes == rest + experience
    sent_ns = 2 * own * (INDEX_NS + 6 * FIELD_NS) + own * (4 + 1 + 4 * 4) + 8192 * ROW_NS
    cut_ns = (
        2 * own * FIELD_NS * ((1 + 4) + (1 + 4))
    )  # policy: mask, log-prob, advantage, weight; critic: value, return, mask, weight
    assert found["updates"].seconds == pytest.approx(1e-9 * (sent_ns + cut_ns))
    assert found["log-probs, values"].seconds < found["updates"].seconds, "passes are of the own samples"


def test_alone_nothing_is_sent(tmp_path):
    alone = ["run.num_ranks=1", "policy.parallel.tp=1", "critic.parallel.pp=1"]
    found = by_name(plan_of(write_run(tmp_path), alone, 1), 0)
    assert found["exchange"].seconds == 0
    assert found["updates"].bytes == found["advantages"].bytes


def test_later_epochs_cost_an_exchange_each(tmp_path):
    one, two, three = (by_name(large(tmp_path, 64, f"algorithm.ppo_epochs={epochs}"), 0)["updates"].seconds for epochs in (1, 2, 3))
    assert one < two and three - two == pytest.approx(two - one)


def test_the_least_time_of_a_step_by_hand(tmp_path):
    plan, hardware = large(tmp_path, 64), load_hardware("h100")
    tokens, weights = 8192 * 8192, 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    attention = 32 * 4096 * 4 * (8192 + 1) / 2  # scores and values, half of the square
    language, value = 2 * (weights + 4096 * 32000) + attention, 2 * (weights + 4096) + attention
    # reference; policy and critic without gradients, and with; tokens of prompts are sampled without logits
    passes = language + 4 * language + 4 * value
    generation = 8192 * (8191 * (2 * weights + attention * 8192 / 8193) + 7168 * 2 * 4096 * 32000)
    wanted = (tokens * passes + generation) / 64 / (989.4e12 * 0.65)
    assert least_step_s(plan, hardware) == pytest.approx(wanted, rel=1e-3)


def test_windows_shorten_the_least_step(tmp_path):
    """A response of 7,168 tokens takes 7 steps: 1,024 are drawn behind 4,096 on average, and a critic learns from a seventh."""
    plan, hardware = large(tmp_path, 64, "rollout.window_tokens=1024"), load_hardware("h100")
    tokens, weights = 8192 * 8192, 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    attention = 32 * 4096 * 4 * (8192 + 1) / 2
    language, value = 2 * (weights + 4096 * 32000) + attention, 2 * (weights + 4096) + attention
    passes = 5 * language + value + 3 * value / 7
    generation = 8192 * (5119 * (2 * weights + 32 * 4096 * 4 * 5120 / 2) + 1024 * 2 * 4096 * 32000)
    wanted = (tokens * passes + generation) / 64 / (989.4e12 * 0.65)
    assert least_step_s(plan, hardware) == pytest.approx(wanted, rel=1e-3)


def test_the_texts_of_an_update_lengthen_the_least_step(tmp_path):
    plan, hardware = large(tmp_path, 64), load_hardware("h100")
    ptx = ["algorithm.ptx.coef=0.1", "algorithm.ptx.data=t.jsonl", "algorithm.ptx.max_tokens=2048", "algorithm.ptx.batch_size=512"]
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    language = 2 * (weights + 4096 * 32000) + 32 * 4096 * 4 * (2048 + 1) / 2
    wanted = 4 * 512 * 2048 * 3 * language / 64 / (989.4e12 * 0.65)  # 4 updates, forward and backward
    more = least_step_s(large(tmp_path, 64, *ptx), hardware) - least_step_s(plan, hardware)
    assert more == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("gib, name", [(80, "h100"), (141, "h200"), (None, "b200")])
def test_a_plan_is_held_against_the_fastest_gpu_of_its_memory(tmp_path, gib, name):
    plan = plan_of(write_run(tmp_path), device="cuda", memory=None if gib is None else gib * GIB)
    assert hardware_of_plan(plan).name == name
    assert hardware_of_plan(plan_of(write_run(tmp_path))).name == "cpu"


def test_one_line_warns_of_much_host_work(tmp_path):
    assert list(host_warnings(large(tmp_path, 64))) == [], "2 s of 200"
    (warning,) = host_warnings(large(tmp_path, 64, "rollout.sampling.top_k=50"))
    assert "in updates" in warning and "profile b200" in warning and "% of a step" in warning
    assert "\n" not in warning


def test_the_report_has_the_phases_and_remarks_the_warning(tmp_path):
    planned = plan_run(load_config(write_run(tmp_path), []), 2, "cpu")
    text = planned.report()
    lines = host_lines(planned.plan)
    assert "\n".join(lines) in text and lines[0] == "host work of rank 1 by phase"
    assert "768 are its own" in text and "WARNING" not in text
    assert max(map(len, lines)) <= 100
