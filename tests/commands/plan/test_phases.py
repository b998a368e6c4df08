"""Memory by phase: sums of what rests and what works, and remedies that are what the changed plan says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megappo.commands.plan import estimate, reserve
from megappo.commands.plan.activations import layer_elements_per_token
from megappo.commands.plan.estimate import check_plan, check_rollout_start, sequences_at_once, work_out
from megappo.commands.plan.memory import GIB
from megappo.commands.plan.phases import phases, remedies, tightest
from megappo.commands.plan.report import phase_lines, report
from megappo.commands.plan.reserve import reserve_bytes
from megappo.config.batch import update_schedule
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.models.arch import MoeArch
from megappo.parallel.layout import ParallelLayout
from megappo.telemetry.tables import MIB, gib
from megappo.trainer.prepare.layouts import check_layouts, read_archs
from tests.commands.plan.archs import llama
from tests.commands.plan.checkpoints import write_run

OFFLOAD = ["policy.offload=[parameters,gradients,optimizer]"]
RECIPES = Path(__file__).parents[3] / "configs"


SMALL = pytest.mark.usefixtures("no_reserve")


@pytest.fixture
def no_reserve(monkeypatch):
    """For models of which the reserve is a thousand times as large."""
    monkeypatch.setattr(estimate, "_reserve", lambda *_: 0)


def planned(path, overrides, ranks=2, memory=None, device="cuda"):
    """On GPUs, where all of a role can be offloaded."""
    config = load_config(path, ["run.device=auto", *overrides])
    archs = read_archs(config)
    return check_plan(work_out(config, archs, check_layouts(config, archs, ranks), ranks, device, memory))


@pytest.mark.parametrize("overrides", [[], OFFLOAD, ["policy.recompute=full"], ["algorithm.kl.placement=none"]], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_fullest_phase_is_the_peak_of_the_rank(tmp_path, overrides, rank):
    plan = planned(write_run(tmp_path), overrides)
    found = phases(plan, rank)
    assert max(phase.total for phase in found) == plan.peak(rank)
    assert {phase.role for phase in found} == {"rollout", *plan.layouts}
    resting = {phase.rest - (plan.experience(rank) if phase.name != "generate" else 0) for phase in found}
    assert len(resting) == 1 and plan.experience(rank) > 0, "the same things rest in every phase, and experience once it is there"


def test_the_tightest_phase_of_a_role_is_that_of_its_fullest_rank(tmp_path):
    plan = planned(write_run(tmp_path), OFFLOAD)  # the critic's stages are ranks 0 and 1
    assert plan.distinct_ranks() == [0, 1]
    for role, (phase, rank) in tightest(plan).items():
        own = [one for other in (0, 1) for one in phases(plan, other) if one.role == role]
        assert phase.total == max(one.total for one in own) and phase in phases(plan, rank)
    assert max(phase.total for phase, _ in tightest(plan).values()) == plan.peak(plan.fullest_rank())


def test_ranks_of_the_same_stages_hold_as_much(tmp_path):
    plan = planned(write_run(tmp_path), ["run.num_ranks=null", "reference.parallel.pp=4"], ranks=8)
    first = plan.distinct_ranks()
    assert first == [0, 2, 4, 6]
    for rank in range(8):
        assert phases(plan, rank) == phases(plan, first[rank // 2])
    assert phases(plan, 0) != phases(plan, 6), "negative control"


@SMALL
def test_offloaded_state_works_only_in_its_phases(tmp_path):
    """Stages 2, 4, 6, 7 and 8 of the step; what an engine really holds in each is in test_engines.py."""
    plan = planned(write_run(tmp_path), [*OFFLOAD, "model.impl=local"])
    memory = plan.stage("policy", 0)
    assert memory.step_buffers > 0
    by_name = {phase.name: phase for phase in phases(plan, 0)}
    resting = plan.rollout_bytes() + sum(plan.stage(role, 0).resident for role in plan.layouts)
    assert memory.resident == 0 and by_name["generate"].total == resting
    assert by_name["log-probs"].work == memory.weights + memory.forward
    assert update_schedule(plan.config, "policy").optimizer_steps(plan.step.samples) == 4, (
        "after the first of them the optimizer stays"
    )
    update = memory.weights + memory.gradients + memory.activations
    assert by_name["policy update"].work == update + memory.optimizer
    step = memory.weights + memory.gradients + memory.optimizer + memory.step_buffers
    assert by_name["policy optimizer step"].work == step
    assert by_name["push weights"].work == memory.weights
    assert by_name["policy checkpoint"].work == memory.weights + memory.optimizer
    assert plan.host_memory(0) == memory.weights + memory.optimizer, "gradients are freed, not kept"
    assert plan.snapshot_memory(0) == sum(plan.stage(role, 0).written for role in ("policy", "critic")) > 0
    assert (
        planned(write_run(tmp_path), [*OFFLOAD, "checkpoint.save_every=1", "checkpoint.asynchronous=false"]).snapshot_memory(0) == 0
    )
    weights_only = planned(write_run(tmp_path), [*OFFLOAD, "checkpoint.save_only_model=true"])
    assert 3 * weights_only.snapshot_memory(0) == plan.snapshot_memory(0), "fp32 and two moments"
    once = planned(write_run(tmp_path), [*OFFLOAD, "algorithm.mini_batch_size=64"])
    only = once.stage("policy", 0)
    (alone,) = (phase.work for phase in phases(once, 0) if phase.name == "policy update")
    assert update_schedule(once.config, "policy").optimizer_steps(once.step.samples) == 1
    assert alone == only.weights + only.gradients + only.activations


@pytest.mark.parametrize("sleep, held", [("none", "wc wc wc"), ("cache", "wc w w"), ("all", "wc - w")])
def test_what_sleeps_of_vllm_is_there_when_it_generates(tmp_path, sleep, held):
    """w: weights, c: cache; while it generates, while the models train, and after a push."""
    overrides = [*OFFLOAD, "rollout.kv_cache_gib=0.01"]
    plan = planned(write_run(tmp_path), [*overrides, f"rollout.sleep={sleep}"])
    trainer = plan.trainer_at_rest(0)
    bytes_of = {"w": plan.rollout.weights, "c": plan.rollout.kv_cache, "-": 0}
    assert plan.rollout.weights > 0 and plan.rollout.kv_cache > 0
    generate, train, pushed = (trainer + sum(bytes_of[letter] for letter in letters) for letters in held.split())
    train, pushed = train + plan.experience(0), pushed + plan.experience(0)
    for phase in phases(plan, 0):
        after = phase.name.startswith("push") or phase.name.endswith("checkpoint")
        assert phase.rest == (generate if phase.name == "generate" else pushed if after else train), phase.name
    assert max(phase.total for phase in phases(plan, 0)) == plan.peak(0)
    assert (plan.peak(0) < planned(write_run(tmp_path), overrides).peak(0)) == (sleep != "none")


def test_a_policy_that_generates_itself_works_then(tmp_path):
    plan = planned(write_run(tmp_path), [*OFFLOAD, "rollout.engine=megatron"])
    first, memory = phases(plan, 0)[0], plan.stage("policy", 0)
    assert (first.name, first.role, first.work) == ("generate", "policy", memory.weights + memory.forward)


def test_a_forward_pass_of_as_many_tokens_needs_less_than_training(tmp_path):
    plan = planned(write_run(tmp_path), ["algorithm.mini_batch_size=64"])
    for role in plan.layouts:
        memory = plan.stage(role, 0)
        assert memory.forward < memory.activations if role != "reference" else memory.forward == memory.activations


def test_log_probs_are_of_the_whole_step_however_small_the_mini_batches(tmp_path):
    path = write_run(tmp_path)
    large, small = (planned(path, [f"algorithm.mini_batch_size={size}"]) for size in (64, 2))
    for role in ("policy", "critic"):
        many, few = large.stage(role, 0), small.stage(role, 0)
        assert many.forward == few.forward and many.activations > few.activations


BUDGET = ["policy.micro_batch_tokens=384", "critic.micro_batch_tokens=384", "run.num_ranks=null"]


@SMALL
@pytest.mark.parametrize("role", ["policy", "critic", "reference"])
def test_a_relief_saves_what_the_changed_plan_needs_less(tmp_path, role):
    path = write_run(tmp_path)
    plan = planned(path, BUDGET, ranks=8)
    found = remedies(plan, role, most=99)
    assert found and all(remedy.saved > 0 for remedy in found)
    for remedy in found:
        changed = planned(path, [*BUDGET, remedy.override], ranks=8)
        assert tightest(plan)[role][0].total - tightest(changed)[role][0].total == remedy.saved, remedy
    settings = found[:-1]
    assert settings == sorted(settings, key=lambda remedy: -remedy.saved)
    assert f"{role}.parallel." in found[-1].override, "at last the layout"


def large(recipe, facts):
    path, model = RECIPES / "large" / f"{recipe}.yaml", f"policy.model={RECIPES / 'models' / facts}"
    ranks = load_config(path).run.num_ranks
    return lambda *overrides: planned(path, [model, *overrides], ranks, 80 * GIB)


@pytest.mark.parametrize(
    "recipe, facts, overrides",
    [
        ("llama3.1_70b_64gpu", "Llama-3.1-70B-Instruct", []),
        ("qwen3_30b_a3b_32gpu", "Qwen3-30B-A3B", []),
        ("llama3.1_405b_256gpu", "Llama-3.1-405B-Instruct", ["rollout.memory_share=0.48", "rollout.sleep=none"]),
    ],
)
def test_every_relief_of_a_large_recipe_is_a_configuration_that_is_accepted_and_relieves(recipe, facts, overrides):
    plan_of = large(recipe, facts)
    plan = plan_of(*overrides)
    for role, (now, _) in tightest(plan).items():
        found = remedies(plan, role)
        assert found, f"nothing would relieve the {role}"
        for remedy in found:
            changed = plan_of(*overrides, remedy.override)  # ConfigError if it is refused
            assert now.total - tightest(changed)[role][0].total == remedy.saved > 0
    with pytest.raises(ConfigError, match="rollout.memory_share"):  # negative control: half the share cannot hold the weights
        large("llama3.1_405b_256gpu", "Llama-3.1-405B-Instruct")("rollout.memory_share=0.23")


def test_a_role_that_no_single_key_relieves_is_shown_all_the_same():
    """Everything is offloaded, a checkpoint is the tightest, as vLLM's weights are there again, and vLLM has what it needs."""
    plan = large("llama3.1_405b_256gpu", "Llama-3.1-405B-Instruct")()
    assert remedies(plan, "policy") == []
    *_, row = (line.split() for line in phase_lines(plan) if line.startswith("  policy "))
    assert row == ["policy", "policy", "checkpoint", "16", f"{plan.peak(16) / GIB:.2f}", "-"]


def test_a_smaller_share_still_holds_all_sequences_that_run_at_once():
    plan = large("llama3.1_70b_64gpu", "Llama-3.1-70B-Instruct")()
    (share,) = (remedy.override for remedy in remedies(plan, "rollout"))
    smaller = large("llama3.1_70b_64gpu", "Llama-3.1-70B-Instruct")(share)
    at_once = sequences_at_once(smaller) * smaller.step.max_sequence_tokens
    assert smaller.rollout.kv_cache // smaller.rollout.kv_bytes_per_token >= at_once
    assert float(share.split("=")[1]) < plan.config.rollout.memory_share
    assert "rollout.memory_share" not in {remedy.override.split("=")[0] for remedy in remedies(smaller, "rollout")}


@SMALL
def test_a_budget_that_no_pass_reaches_is_halved_from_what_is_reached(tmp_path):
    """Of 16,384 tokens 1,536 are used."""
    plan = planned(write_run(tmp_path), ["critic.recompute=full"])
    assert "critic.micro_batch_tokens=768" in {remedy.override for remedy in remedies(plan, "critic")}


@SMALL
def test_the_report_names_the_tightest_phase_of_every_role_and_a_relief(tmp_path):
    plan = planned(write_run(tmp_path), [])
    lines = phase_lines(plan)
    marked = [line for line in lines if line.endswith("tightest")]
    assert len(marked) == 1 and f"{plan.peak(plan.fullest_rank()) / (1 << 20):,.2f}" in marked[0]
    advice = lines[next(i for i, line in enumerate(lines) if "would relieve it" in line) + 1 :]
    assert {line.split()[0] for line in advice} >= {"rollout", "policy", "critic", "reference"}
    assert any("policy.recompute=full" in line or "offload" in line for line in advice)


def test_what_torchs_adam_takes_is_counted_or_said(tmp_path):
    path = write_run(tmp_path)
    auto, local = (planned(path, [*OFFLOAD, f"model.impl={impl}"]) for impl in ("auto", "local"))
    more = local.stage("policy", 0).step_buffers
    assert more == local.stage("policy", 0).optimizer // 2 and auto.stage("policy", 0).step_buffers == 0  # fp32: two moments
    said = f"{gib(more)} GiB more in optimizer steps without TransformerEngine"
    assert said in report(auto) and said not in report(local)


def test_the_reserve_is_of_the_context_and_of_every_communicator_once():
    """By hand: 32 channels of 10 MiB for a ring, of 14 MiB for every peer that messages are exchanged with."""
    ring, peer, context = 320 * MIB, 448 * MIB, 512 * MIB
    alone, one = ParallelLayout(1), ParallelLayout(8, tp=2, cp=2)
    assert reserve_bytes([(alone, False)], 1, 1) == context
    # tp, cp (all to all between two), cp and dp, all ranks of the role; all ranks of the world
    dense = 4 * ring + peer + ring
    assert reserve_bytes([(one, False)], 8, 1) == reserve_bytes([(one, False), (one, False)], 8, 1) == context + dense
    assert reserve_bytes([(one, False), (ParallelLayout(8, tp=8), False)], 8, 2) == context + dense + ring + 2 * ring
    deep = ParallelLayout(8, pp=8)  # two neighbours at most; the pipeline is the group of all ranks too
    assert reserve_bytes([(deep, False)], 8, 1) == context + 2 * peer + 2 * ring
    # ep over all 8 ranks, which are those of dp too: one group, and messages to 7 peers
    experts, plain = (reserve_bytes([(ParallelLayout(8, ep=8), it)], 8, 1) for it in (True, False))
    assert experts - plain == 7 * peer


def test_axes_of_the_same_ranks_are_one_group():
    """Against the groups themselves."""
    sizes = [dict(tp=tp, cp=cp, pp=pp) for tp in (1, 2, 4) for cp in (1, 2) for pp in (1, 2, 3)]
    experts = [dict(ep=ep, etp=etp) for ep in (1, 2, 4) for etp in (1, 2, 4)]
    merged = 0
    for layout in (ParallelLayout(48, **dense, **sparse) for dense in sizes for sparse in experts if 48 // dense["pp"] % 16 == 0):
        by_ranks = {}
        for axes in reserve._DENSE + reserve._EXPERTS:
            ranks = tuple(map(tuple, layout.axis_groups(*axes)))
            if len(ranks[0]) > 1:
                by_ranks.setdefault(ranks, set()).add(axes)
        expected = [(axes, len(ranks[0])) for ranks, axes in by_ranks.items()]
        assert reserve._groups(layout, True) == expected, layout
        merged += any(len(axes) > 1 for axes, _ in expected)
    assert merged > 50


def test_the_reserve_is_a_line_of_its_own_and_in_every_phase(tmp_path):
    path = write_run(tmp_path)
    plan, cpu = planned(path, []), planned(path, [], device="cpu")
    assert plan.reserve > 0 == cpu.reserve
    text = report(plan)
    assert "\n  reserve     -" in text and "CUDA context and NCCL" in text and "\n  reserve" not in report(cpu)
    at_rest = plan.rollout_bytes() + sum(plan.stage(role, 0).resident for role in plan.layouts)
    first, *others = (phase.rest for phase in phases(plan, 0))
    assert first == at_rest + plan.reserve and set(others) == {first + plan.experience(0)}


def test_vllm_is_refused_a_share_of_what_is_not_free_when_it_starts(tmp_path):
    """It asks for a share of the whole device, whatever is there already."""
    path = write_run(tmp_path)
    plan = planned(path, ["rollout.memory_share=0.4"], memory=4 * GIB)
    held = plan.trainer_at_rest(0)
    assert held >= plan.reserve + sum(plan.stage(role, 0).optimizer for role in plan.layouts), "moments are there by then"
    least = 1 - held / plan.device_memory
    for share, fits in ((least - 0.001, True), (least + 0.001, False)):
        rollout = plan.config.rollout.model_copy(update={"memory_share": share})
        changed = replace(plan, config=plan.config.model_copy(update={"rollout": rollout}))
        if fits:
            check_rollout_start(changed)
        else:
            with pytest.raises(ConfigError, match=rf"rollout.memory_share = .* free when vLLM starts, .* at most {least:.1f}"):
                check_rollout_start(changed)
    check_rollout_start(replace(changed, device="cpu"))  # the CPU's cache is of a fixed size


def test_a_fused_activation_keeps_three_tensors_of_the_mlp_where_five_were():
    for sparse, unfused, fused in ((False, 5 * 384, 3 * 384), (True, 2 * 6 * 192, 2 * 3 * 192)):
        arch = llama(moe=MoeArch(8, 2, 192, True)) if sparse else llama()
        each = [layer_elements_per_token(arch, ParallelLayout(1), 2, arch.kind(0), fused=it) for it in (False, True)]
        assert each[0] - each[1] == unfused - fused
