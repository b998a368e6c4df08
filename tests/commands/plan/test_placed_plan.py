"""Plans of roles on ranks of their own: a rank holds what lives on it, and the report names the ranks."""

from __future__ import annotations

import numpy
import pytest

from megappo.commands.plan.estimate import GIB, check_plan, ids_of_token, sequences_at_once, work_out
from megappo.commands.plan.phases import phases, tightest
from megappo.commands.plan.plot import figure_of
from megappo.commands.plan.report import in_flight_bytes, report
from megappo.commands.plan.run import plan_run
from megappo.config.loading import load_config
from megappo.rollout.snapshot import Snapshot
from megappo.rollout.types import KeptIds, Response, Segment
from megappo.telemetry.tables import MIB
from megappo.trainer.prepare.layouts import check_layouts, read_archs
from tests.commands.plan.checkpoints import write_run

WORLD = 8
EMPTY = 1550  # bytes of a snapshot of nothing
SPLIT = ["run.num_ranks=null", "policy.ranks=0-3", "critic.ranks=4-5", "reference.ranks=2-5", "rollout.ranks=0-1,6-7"]


def plan_of(path, overrides, ranks=WORLD, device="cpu", memory=None):
    config = load_config(path, overrides)
    archs = read_archs(config)
    return check_plan(work_out(config, archs, check_layouts(config, archs, ranks), ranks, device, memory))


def test_a_rank_holds_the_roles_that_live_on_it(tmp_path):
    plan = plan_of(write_run(tmp_path), SPLIT)
    hosted = {rank: plan.roles_on(rank) for rank in range(WORLD)}
    assert hosted[1] == ["policy"] and hosted[2] == ["policy", "reference"] and hosted[4] == ["critic", "reference"]
    assert hosted[7] == [] and [rank for rank in range(WORLD) if plan.generates(rank)] == [0, 1, 6, 7]
    assert plan.replicas == 4 // plan.config.rollout.tp
    for rank in range(WORLD):
        held = sum(plan.stage(role, rank).resident for role in hosted[rank])
        assert plan.trainer_at_rest(rank) == held
        sampler = plan.rollout_bytes() if rank in (0, 1, 6, 7) else 0
        busiest = max((plan.stage(role, rank).active for role in hosted[rank]), default=0)
        assert plan.peak(rank) == held + sampler + busiest
        assert {phase.role for phase in phases(plan, rank)} == {*hosted[rank], *(["rollout"] if sampler else [])}
    assert plan.peak(7) == plan.rollout_bytes() > 0, "a rank that only generates"


def test_stages_are_counted_on_the_roles_own_ranks(tmp_path):
    plan = plan_of(write_run(tmp_path), SPLIT)
    first, last = plan.memory["critic"]  # pp 2
    assert plan.stage("critic", 4) is first and plan.stage("critic", 5) is last and first != last
    with pytest.raises(KeyError):
        plan.stage("critic", 0)


def test_distinct_ranks_stand_for_all(tmp_path):
    placements = [SPLIT, [*SPLIT, "policy.ranks=0,3,5,6", "rollout.ranks=all"], ["run.num_ranks=null"]]
    for overrides in placements:
        plan = plan_of(write_run(tmp_path), overrides)
        distinct = plan.distinct_ranks()
        for rank in range(WORLD):
            stand_in = max(one for one in distinct if one <= rank)
            assert (plan.peak(rank), plan.certain(rank)) == (plan.peak(stand_in), plan.certain(stand_in)), (overrides, rank)
        assert plan.peak(plan.fullest_rank()) == max(map(plan.peak, range(WORLD)))


def test_every_role_has_a_tightest_phase(tmp_path):
    assert set(tightest(plan_of(write_run(tmp_path), SPLIT))) == {"policy", "critic", "reference", "rollout"}


def test_apart_needs_less_of_a_rank_than_together(tmp_path):
    apart = plan_of(write_run(tmp_path), SPLIT, device="cuda", memory=80 * GIB)
    together = plan_of(write_run(tmp_path), ["run.num_ranks=null"], device="cuda", memory=80 * GIB)
    assert apart.certain(apart.fullest_rank()) < together.certain(together.fullest_rank())
    assert 0 < apart.reserve <= together.reserve


def test_the_report_names_the_ranks_of_roles(tmp_path):
    plan = plan_of(write_run(tmp_path), SPLIT)
    text = report(plan)
    for line in ("policy: on ranks 0-3", "critic: on ranks 4-5", "reference: on ranks 2-5", "4-5"):
        assert line in text
    (rollout,) = [line for line in text.splitlines() if line.strip().startswith("rollout by vllm")]
    assert "6" in rollout and "2" not in rollout.split("ranks")[1], rollout
    assert (
        "on ranks"
        not in report(plan_of(write_run(tmp_path), ["run.num_ranks=null"])).replace("replicas of tp", "").split("rollout by")[0]
    )
    titles = [axis.get_title(loc=loc) for axis in figure_of(plan).axes for loc in ("left", "center")]
    assert any("counted from 0 on ranks 4-5" in title for title in titles)


def test_the_report_says_what_is_left_of_each_rank_and_who_does_not_wait(tmp_path):
    plan = plan_of(write_run(tmp_path), SPLIT)
    text = report(plan)
    lines = [line.strip() for line in text.splitlines()]
    for names, ranks in (("policy, rollout", "ranks 0-1"), ("critic, reference", "ranks 4-5"), ("rollout", "ranks 6-7")):
        (line,) = [line for line in lines if f"({names}): about" in line]
        peak = max(plan.peak(rank) for rank in range(*map(int, line.split()[1].split("-"))))
        assert line == f"{ranks} ({names}): about {peak / MIB:,.2f} at the peak"
    assert "at the same time in passes and updates, for they share no rank: policy and critic" in lines
    together = report(plan_of(write_run(tmp_path), ["run.num_ranks=null"]))
    assert "at the same time" not in together and "at the peak" not in together


def test_the_report_says_what_runs_beside_training_and_what_a_checkpoint_holds_of_it(tmp_path):
    """Oracle of the size: a snapshot in which every response has all its tokens, of all versions that it may have."""
    apart = [*SPLIT, "rollout.ranks=6-7", "rollout.max_staleness=2", "rollout.max_num_seqs=1024"]
    for sampling in ([], ["rollout.sampling.top_k=5"]):
        plan = plan_of(write_run(tmp_path), [*apart, *sampling])
        samples, longest = plan.step.samples, plan.config.rollout.max_response_tokens
        text = " ".join(report(plan).split())
        assert "meanwhile ranks 0-5 train; in flight (rollout.max_staleness 2) are at most" in text
        assert f"3 steps: {3 * samples:,} responses of {3 * samples * longest:,} tokens" in text
        assert "of responses that later steps have begun (rollout-N.bin)" in text and "KV cache" in text
        assert sequences_at_once(plan) == 3 * samples // plan.replicas
        width = ids_of_token(plan.config)
        kept = KeptIds(numpy.full(longest, width, numpy.int32), numpy.zeros(longest * width, numpy.int32)) if width else None
        parts = [longest - 2, 1, 1]
        segments = tuple(Segment(numpy.zeros(n, numpy.int32), numpy.zeros(n, numpy.float32), 10**4 + n) for n in parts)
        ended = [Response(10**10 + number, segments, "length", kept) for number in range(2 * samples)]
        size = len(Snapshot(0, 0, 0, 0, {}, ended).encoded())
        assert 0.8 < (size - EMPTY) / in_flight_bytes(plan) <= 1
    synchronous = plan_of(write_run(tmp_path), SPLIT)
    assert "meanwhile" not in report(synchronous) and in_flight_bytes(synchronous) == 0


# overrides of a run on 8 ranks, the beginnings of its notes on replicas without work
BATCHES = [
    (["data.prompts_per_step=16", "algorithm.mini_batch_size=8"], []),
    (["algorithm.mini_batch_size=2"], ["critic: a mini-batch of 2 samples leaves 1 of 3 replicas without work; raise"]),
    (
        ["data.prompts_per_step=1", "algorithm.mini_batch_size=1"],
        [
            "policy: a mini-batch of 1 sample leaves 1 of 2 replicas",
            "critic: a mini-batch of 1 sample leaves 2 of 3 replicas",
            "reference: a step of 2 samples leaves 6 of 8 replicas without work; raise data.prompts_per_step, or",
            "rollout: a step of 2 samples leaves 6 of 8 replicas without work",
        ],
    ),
    (["algorithm.mini_batch_size=2", "critic.parallel.pp=3", "critic.parallel.layers_per_stage=[1,2,1]"], []),
    (["data.prompts_per_step=2", "rollout.tp=2", "reference.ranks=4-7", "algorithm.mini_batch_size=4"], []),
]


@pytest.mark.parametrize("overrides, beginnings", BATCHES, ids=str)
def test_replicas_without_a_sample_are_named_with_the_key_that_fills_them(tmp_path, overrides, beginnings):
    placed = ["run.num_ranks=8", "policy.parallel.tp=1", "policy.ranks=0-1", "critic.ranks=5-7", "critic.parallel.pp=1"]
    config = load_config(write_run(tmp_path), [*placed, *overrides])
    found = [note for note in plan_run(config, 8, "cpu").notes if "without work" in note]
    assert len(found) == len(beginnings) and all(note.startswith(one) for note, one in zip(found, beginnings)), found
