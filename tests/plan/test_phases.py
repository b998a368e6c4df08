"""Memory by phase: sums of what rests and what works, and reliefs that are what the changed plan says."""

from __future__ import annotations

import pytest

from megappo.config.loading import load_config
from megappo.plan.estimate import make_plan, work_out
from megappo.plan.layouts import check_layouts, read_archs
from megappo.plan.phases import phases, reliefs, tightest
from megappo.plan.report import phase_lines

from .checkpoints import write_run

OFFLOAD = ["policy.offload.parameters=true", "policy.offload.gradients=true", "policy.offload.optimizer=true"]


def planner(path, overrides, ranks=2):
    """(the plan, what works out another configuration in its layouts). On GPUs, where all of a role can be offloaded."""
    config = load_config(path, ["run.device=auto", *overrides])
    archs = read_archs(config)
    layouts = check_layouts(config, archs, ranks)
    return make_plan(config, archs, layouts, ranks, "cuda"), lambda changed: work_out(changed, archs, layouts, ranks, "cuda")


@pytest.mark.parametrize("overrides", [[], OFFLOAD, ["policy.recompute=full"], ["algorithm.kl.placement=none"]], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_fullest_phase_is_the_peak_of_the_rank(tmp_path, overrides, rank):
    plan, _ = planner(write_run(tmp_path), overrides)
    found = phases(plan, rank)
    assert max(phase.total for phase in found) == plan.peak(rank)
    assert max(phase.total for phase in tightest(plan, rank).values()) == plan.peak(rank)
    assert {phase.role for phase in found} == {"rollout", *plan.layouts}
    assert len({phase.rest for phase in found}) == 1, "the same things rest in every phase"


def test_offloaded_state_works_only_in_its_phases(tmp_path):
    plan, _ = planner(write_run(tmp_path), OFFLOAD)
    memory = plan.stage("policy", 0)
    by_name = {phase.name: phase for phase in phases(plan, 0)}
    resting = plan.rollout_bytes() + sum(plan.stage(role, 0).resident for role in plan.layouts)
    assert memory.resident == 0 and by_name["generate"].total == resting
    assert by_name["log-probs"].work == memory.weights + memory.forward
    assert by_name["policy update"].work == memory.weights + memory.gradients + memory.activations
    assert by_name["policy optimizer step"].work == memory.weights + memory.gradients + memory.optimizer


def test_a_forward_pass_needs_less_than_training(tmp_path):
    plan, _ = planner(write_run(tmp_path), [])
    for role in plan.layouts:
        memory = plan.stage(role, 0)
        assert memory.forward < memory.activations if role != "reference" else memory.forward == memory.activations


@pytest.mark.parametrize("role", ["policy", "critic", "reference", "rollout"])
def test_a_relief_saves_what_the_changed_plan_needs_less(tmp_path, role):
    path, budget = write_run(tmp_path), ["policy.micro_batch_tokens=384", "critic.micro_batch_tokens=384"]
    plan, work = planner(path, budget)
    found = reliefs(plan, 0, role, work, most=99)
    assert found == sorted(found, key=lambda relief: -relief.saved) and all(relief.saved > 0 for relief in found)
    for relief in found:
        changed, _ = planner(path, [*budget, relief.override])
        assert tightest(plan, 0)[role].total - tightest(changed, 0)[role].total == relief.saved, relief
    if role == "policy":
        assert "policy.recompute=full" in {relief.override for relief in found}


def test_the_report_names_the_tightest_phase_and_a_relief(tmp_path):
    plan, _ = planner(write_run(tmp_path), [])
    lines = phase_lines(plan)
    marked = [line for line in lines if line.endswith("tightest")]
    assert len(marked) == 1 and f"{plan.peak(plan.fullest_rank()) / (1 << 20):,.2f}" in marked[0]
    advice = lines[next(i for i, line in enumerate(lines) if "would relieve it" in line) :]
    assert any("policy.recompute=full" in line or "offload" in line for line in advice)
