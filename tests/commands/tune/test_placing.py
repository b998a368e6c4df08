"""Roles on ranks of their own in the tuner: how long a step is, what fits, and which placements are proposed and win."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.commands.plan.memory import GIB
from megappo.commands.plan.phases import phases
from megappo.commands.plan.run import plan_run
from megappo.commands.tune import trials
from megappo.commands.tune.candidates import Machine, Timetable
from megappo.commands.tune.cost import workload_of
from megappo.commands.tune.generation import push_s
from megappo.commands.tune.measure import phases_of
from megappo.commands.tune.placing import advice, placings, rank_placements, stage_seconds
from megappo.commands.tune.run import neutral_config
from megappo.commands.tune.search import Search
from megappo.commands.tune.trials import Measured, read_trial, write_outcome
from megappo.commands.tune.work import ranks_together
from megappo.config.checks import problems
from megappo.config.loading import explicit_keys, load_config
from megappo.parallel.layout import Placement, placement_of, ranks_by_roles
from megappo.telemetry.hardware import load_hardware
from megappo.trainer.prepare.layouts import read_archs
from tests.commands.plan.checkpoints import LLAMA_7B, TINY, write_checkpoint

WORLD = 8
ORDER = ["reward_model", "policy", "critic", "reference"]
SECONDS = {
    "reward_model": {"forward": 4.0},
    "policy": {"forward": 3.0, "update": 10.0},
    "critic": {"forward": 2.0, "update": 8.0},
    "reference": {"forward": 1.0},
}


def places(world=WORLD, **ranks):
    return {name: placement_of(ranks.get(name, "all"), world) for name in [*ORDER, "rollout"]}


# ranks of roles -> seconds of scores, passes and updates, by hand
BY_HAND = [
    ({}, 4 + (3 + 2 + 1) + (8 + 10)),
    ({"critic": "4-7", "policy": "0-3", "reference": "0-3", "reward_model": "0-3"}, 4 + (3 + 1) + 10),
    ({"critic": "4-7", "policy": "0-3", "reference": "4-7", "reward_model": "4-7"}, 4 + (2 + 1) + 10),
    ({"policy": "0-3", "critic": "0-3", "reference": "0-3", "reward_model": "0-3", "rollout": "4-7"}, 4 + 6 + 18),
    # The reference waits for the policy, with which it shares rank 3, and not for the critic.
    ({"policy": "0-3", "reference": "3-5", "critic": "6-7"}, 4 + (3 + 1) + 10),
    # A chain: critic after policy on rank 2, reference after critic on rank 5.
    ({"policy": "0-2", "critic": "2-5", "reference": "5-7"}, 4 + (3 + 2 + 1) + (8 + 10)),
]


@pytest.mark.parametrize("ranks, wanted", BY_HAND, ids=lambda value: str(value))
def test_a_step_is_as_long_as_its_longest_chain(ranks, wanted):
    assert Timetable(places(**ranks), ORDER).step_s(SECONDS) == pytest.approx(wanted)


def test_no_placement_is_faster_than_a_role_or_slower_than_all_in_turns():
    choose = random.Random(0)
    for _ in range(300):
        ranks = {name: Placement(tuple(sorted(choose.sample(range(6), choose.randint(1, 6)))), 6) for name in [*ORDER, "rollout"]}
        timetable = Timetable(ranks, ORDER)
        length = timetable.step_s(SECONDS)
        assert 4 + 3 + 10 <= length <= 28 and (not timetable.takes_turns or length == 28)
        works = timetable.works(SECONDS)
        for one in works:
            for other in works[: works.index(one)]:
                if ranks[one.role].overlaps(ranks[other.role]):
                    assert other.end <= one.begin, "a rank does one thing at a time"
        hosts = ranks_by_roles(ranks)
        for rank in range(6):
            here = tuple(name for name in [*ORDER, "rollout"] if rank in ranks[name])
            assert not here or rank in hosts[here]


@pytest.mark.parametrize(
    "ranks, per_node, together",
    [("all", 8, 8), ("0-15", 8, 8), ("16-31", 8, 8), ("4-7", 8, 4), ("4-11", 8, 4), ("3-6", 4, 1), ("0,8", 8, 1), ("5", 8, 1)],
)
def test_neighbours_share_a_node_as_far_as_the_ranks_allow(ranks, per_node, together):
    assert ranks_together(placement_of(ranks, 64), per_node) == together


def write_run(folder, facts=TINY, prompts=512, mini_batch=256, **sections):
    model = write_checkpoint(folder / "model", facts, weights=False, tokenizer=False)
    run = {
        "run": {"output_dir": str(folder / "runs")},
        "policy": {"model": str(model)},
        "data": {"train": "none", "max_prompt_tokens": 64, "prompts_per_step": prompts},
        "rollout": {"max_response_tokens": 64, "kv_cache_gib": 1.0},
        "algorithm": {"mini_batch_size": mini_batch},
    }
    for name, section in sections.items():
        run[name] = {**run.get(name, {}), **section}
    (folder / "run.yaml").write_text(json.dumps(run))  # which is YAML too
    return folder / "run.yaml"


def search_of(path, overrides=(), hardware=None, world=WORLD):
    config = load_config(path, [f"run.num_ranks={world}", *overrides])
    roles = [name for name in ("policy", "critic", "reference") if name != "reference" or config.algorithm.kl.placement != "none"]
    tuned = [*roles, *(["rollout"] if config.rollout.engine == "vllm" else [])]
    machine = Machine(world, hardware or load_hardware("h100"))
    return Search(config, read_archs(config), machine, workload_of(config), tuned)


def ranked(search):
    return rank_placements(search, neutral_config(search.config, search.tuned))


APART = ["policy.ranks=0-3", "reference.ranks=0-3", "critic.ranks=4-7"]
ROLLOUT_APART = [*APART[:2], "critic.ranks=0-3", "rollout.ranks=4-7"]


@pytest.mark.parametrize("overrides", [[], APART, ROLLOUT_APART, ["critic.ranks=2-5", "reference.ranks=4-7"]], ids=str)
def test_a_choice_is_the_plan_of_its_placement(tmp_path, overrides):
    """Seconds by hand from those of the roles; memory to the byte, and none to spare where it says that it fits."""
    path = write_run(tmp_path, TINY | {"num_hidden_layers": 8})
    search = search_of(path, overrides)
    choice = search.best()
    assert choice is not None
    cost = {role: one.cost.phases for role, one in choice.roles.items()}
    update = {role: cost[role]["update"] for role in ("policy", "critic")}
    passes = {role: cost[role]["forward"] for role in cost}
    if overrides == APART:
        works = max(passes["policy"] + passes["reference"], passes["critic"]) + max(update.values())
    else:  # in the last one the critic shares ranks with both others
        works = sum(passes.values()) + sum(update.values())
    assert choice.total_s == pytest.approx(choice.rollout.total_s + works + choice.push_s + choice.rest_s)
    every = [phase.total for rank in range(WORLD) for phase in phases(choice.plan, rank)]
    assert choice.peak == max(every)
    assert {name: len(one) for name, one in choice.plan.placements.items()} == {n: search.num_ranks(n) for n in search.placements}
    needs = {role: one.need for role, one in choice.roles.items()}
    h100 = load_hardware("h100")
    tight = replace(h100, headroom_gib=(h100.memory_bytes - choice.peak + 1) / GIB)
    assert search.fits(needs, choice.rollout) and not search_of(path, overrides, tight).fits(needs, choice.rollout)


def test_pushes_after_every_third_step_cost_a_third_of_one_in_each(tmp_path):
    path = write_run(tmp_path, TINY)
    each, third = (search_of(path, [f"rollout.push_every={every}"]).best() for every in (1, 3))
    assert each is not None and third is not None and each.push_s > 0
    assert third.push_s == pytest.approx(each.push_s / 3)


@pytest.mark.slow
def test_a_rank_holds_its_own_roles_only(tmp_path):
    """A cache that never sleeps leaves no room for the models, unless it has ranks of its own."""
    wide = {"num_hidden_layers": 6, "hidden_size": 8192, "intermediate_size": 22016}  # few layers: few splits to search
    search = search_of(write_run(tmp_path, LLAMA_7B | wide, rollout={"kv_cache_gib": 60.0}))
    assert search.best() is None
    found = ranked(search)
    fitting = [one for one in found if one.choice is not None]
    kinds = {re.sub(r" on [\d-]+", "", one.placing.name) for one in fitting}
    assert kinds == {"rollout"}
    where = [{name: set(place.ranks) for name, place in one.search.placements.items()} for one in fitting]
    assert not any(place & one["rollout"] for one in where for name, place in one.items() if name != "rollout")
    first = found[0].choice
    assert first is not None and 60 * GIB < first.peak <= search.machine.hardware.usable_bytes
    assert advice(found) == f"{found[0].placing.name}: colocated the models do not fit"


def test_a_push_to_other_ranks_takes_the_wire(tmp_path):
    h100 = replace(load_hardware("h100"), link_share=0.8, network_share=0.8, push_gb_s=1e9)
    choice = search_of(write_run(tmp_path), world=16).best()
    assert choice is not None
    layout, memory = choice.roles["policy"].layout, choice.rollout.memory
    layout = replace(layout, world_size=8, tp=1, pp=1, vpp=1, cp=1, layers_per_stage=(), sequence_parallel=False)

    def push(policy, rollout):
        return push_s(layout, memory, h100, ends=(placement_of(policy, 16), placement_of(rollout, 16)))

    inside, apart, few = push("0-7", "0-7"), push("0-7", "8-15"), push("0-3", "8-15")
    rates = h100.node_link_gb_s / h100.network_gb_s
    assert apart == pytest.approx(rates * inside) and few == pytest.approx(2 * apart)
    assert push("0-3", "4-7") == pytest.approx(inside), "on the same node"


# ------------------------------------------------------------------------------------------------- which placements there are

SETTINGS = [
    [],
    ["algorithm.kl.placement=none"],
    ["rollout.engine=megatron", "rollout.kv_cache_gib=null"],
    ["rollout.sleep=all", "rollout.kv_cache_gib=null"],
    ["critic.offload=[parameters,optimizer]", "reference.offload=[parameters]"],
]


@pytest.mark.parametrize("overrides", SETTINGS, ids=str)
def test_every_placement_is_one_that_the_plan_takes(tmp_path, overrides):
    path = write_run(tmp_path)
    for world in (2, 8, 16, 64):
        search = search_of(path, overrides, world=world)
        found = list(placings(search.config, search.machine))
        kinds = 2 if "megatron" in str(overrides) else 3 if "kl.placement" in str(overrides) else 5
        assert len(found) == 1 + kinds and len({one.name for one in found}) == len(found)
        assert found[0].name == "colocated" and found[0].overrides() == []
        for one in found:
            config = load_config(path, [f"run.num_ranks={world}", *overrides, *one.overrides()])
            assert next(problems(config, explicit_keys(config), world), None) is None, one.name
            assert one.applied(search.config) == config


def test_an_asynchronous_run_is_tried_with_splits_and_beside_taking_turns(tmp_path):
    given = ["rollout.max_staleness=2", "algorithm.importance_sampling.type=tis"]
    path = write_run(tmp_path)
    for world, splits in ((2, ["1"]), (8, ["2-7", "4-7", "6-7"]), (32, ["8-31", "16-31", "24-31"])):
        search = search_of(path, given, world=world)
        found = list(placings(search.config, search.machine))
        assert sorted(one.name for one in found) == ["colocated", *sorted(f"rollout on {ranks}" for ranks in splits)]
        for one in found:
            config = load_config(path, [f"run.num_ranks={world}", *given, *one.overrides()])
            assert next(problems(config, explicit_keys(config), world), None) is None, one.name
            assert one.applied(search.config) == config
            assert config.rollout.max_staleness == (None if one.name == "colocated" else 2)
    choices = {one.placing.name: one.choice for one in ranked(search)}
    apart = choices["rollout on 16-31"]
    assert apart is not None and apart.rollout.cost is not None
    cost, training_s = apart.rollout.cost, apart.training_s + apart.push_s + apart.rest_s
    assert apart.total_s == pytest.approx(max(training_s, cost.work_s, (cost.longest_s + training_s) / 3))


def test_a_critic_that_is_not_built_is_placed_nowhere(tmp_path):
    search = search_of(write_run(tmp_path), ["critic=null", "algorithm.estimator=reinforce_plus_plus"], world=2)
    found = list(placings(search.config, search.machine))
    assert not [key for one in found for key in one.changes if "critic" in key]
    assert {one.name for one in found} == {"colocated", "rollout on 1", "reference on 1", "reference on 1, rollout on 0"}
    assert ranked(search)[0].choice is not None


def test_several_nodes_are_cut_between_nodes(tmp_path):
    search = search_of(write_run(tmp_path), world=24)
    for one in placings(search.config, search.machine):
        for key, value in one.changes.items():
            if key.endswith(".ranks"):
                first, last = map(int, str(value).split("-"))
                assert first % 8 == 0 and last % 8 == 7, (one.name, key, value)


def test_room_for_others_goes_where_there_are_no_others(tmp_path):
    settings = ["rollout.sleep=all", "rollout.kv_cache_gib=null", "critic.offload=[optimizer]"]
    search = search_of(write_run(tmp_path), settings)
    found = {one.name: one for one in placings(search.config, search.machine)}
    alone = found["rollout on 4-7"].changes
    assert alone["rollout.sleep"] == "none" and alone["rollout.memory_share"] == 0.8 and "critic.offload" not in alone
    assert found["critic on 4-7, rollout on 0-3"].changes["critic.offload"] == ()
    assert "critic.offload" not in found["critic on 4-7"].changes, "beside vLLM"


def test_a_kept_layout_leaves_only_the_placements_that_it_divides(tmp_path):
    search = search_of(write_run(tmp_path, critic={"parallel": {"tp": 2, "pp": 2}}))
    kept = neutral_config(search.config, ["policy", "reference", "rollout"])
    sizes = {len(placement_of(str(one.changes.get("critic.ranks", "all")), WORLD)) for one in placings(kept, search.machine)}
    assert sizes == {4, 8}


# ------------------------------------------------------------------------------------------------------------ which one wins


@pytest.mark.slow
def test_large_batches_are_colocated_and_small_ones_are_not(tmp_path):
    """A mini-batch of 4 leaves half of 8 ranks without a sample, unless they are cut by tp or pp; of 256 it fills them."""
    model = LLAMA_7B | {"num_hidden_layers": 4}
    large = ranked(search_of(write_run(tmp_path, model)))
    assert large[0].placing.name == "colocated"
    slow = replace(load_hardware("h100"), node_link_gb_s=10.0, network_gb_s=10.0)  # cutting a model costs
    small = ranked(search_of(write_run(tmp_path, model, prompts=16, mini_batch=4), hardware=slow))
    first, together = small[0], next(one for one in small if one.placing.name == "colocated")
    assert first.choice is not None and together.choice is not None
    assert "critic" in first.placing.name and first.choice.total_s < together.choice.total_s
    assert first.placing.changes["critic.ranks"] != first.placing.changes["policy.ranks"]
    totals = [one.choice.total_s for one in small if one.choice is not None]
    assert len(totals) == len(small) and totals == sorted(totals)
    update = [first.choice.roles[role].cost.phases["update"] for role in ("policy", "critic")]
    assert stage_seconds(first.choice)[1] == pytest.approx(max(update))
    assert stage_seconds(together.choice)[1] == pytest.approx(
        sum(together.choice.roles[r].cost.phases["update"] for r in ("policy", "critic"))
    )


# ---------------------------------------------------------------------------------------------------------------- the command


def tune(capsys, *arguments):
    code = cli.main(["tune", *map(str, arguments)])
    return code, capsys.readouterr()


@pytest.mark.slow
def test_the_winning_placement_is_what_the_plan_accepts(tmp_path, capsys):
    model = LLAMA_7B | {"num_hidden_layers": 8}
    path, lines, facts = write_run(tmp_path, model, prompts=32, mini_batch=8), tmp_path / "l.txt", tmp_path / "all.json"
    arguments = [path, "--gpus", 16, "--gpu", "h100", "--placements", "--top", 3, "rollout.kv_cache_gib=null"]
    code, told = tune(capsys, *arguments, "--output", lines, "--json", facts)
    assert code == 0, told.err
    found = json.loads(facts.read_text())
    order = [one["step_seconds"] for one in found["placements"] if one["fits"]]
    assert order == sorted(order) and order[0] == found["step_seconds"] and len(found["placements"]) == 6
    overrides = lines.read_text().split()
    assert set(found["placements"][0]["overrides"]) <= set(overrides) and found["overrides"] == overrides
    assert any(".ranks=" in line for line in overrides), "of this run the critic apart is the fastest"
    config = load_config(path, ["rollout.kv_cache_gib=null", *overrides])
    planned = plan_run(config, 16, "cuda", load_hardware("h100").memory_bytes, shapes_only=True)
    assert planned.plan.peak(planned.plan.fullest_rank()) == found["peak_bytes"] and not planned.plan.warnings
    assert "a step: 32 samples of 64 + 64 tokens, 4 updates of 8\n" in told.out
    assert "placements: in 6 of 6 the models fit" in told.out and "less than colocated" in told.out
    assert "from s" in told.out and "critic, on ranks 8-15: " in told.out
    # A configuration that says so is searched within its ranks, and gives the same.
    given = [line for line in overrides if ".ranks=" in line]
    code, told = tune(capsys, *[one for one in arguments if one != "--placements"], *given, "--json", facts)
    assert code == 0, told.err
    again = json.loads(facts.read_text())
    assert again["step_seconds"] == found["step_seconds"] and "placements" not in again
    assert [line for line in overrides if ".ranks=" not in line] == again["overrides"]


def test_given_ranks_that_hold_nothing_are_told_with_their_keys(tmp_path, capsys):
    path = write_run(tmp_path, LLAMA_7B)
    code, told = tune(capsys, path, "--gpus", 8, "--gpu", "h100", "policy.ranks=7", "critic.ranks=0-6")
    assert code == 2 and told.err.count("\n") == 1
    assert "no layout fits on 8 x h100 with policy.ranks=7, critic.ranks=0-6; name more ranks" in told.err


def test_trials_are_of_the_first_placement_and_that_is_said(tmp_path, capsys, monkeypatch):
    """On CPU ranks that are replaced: a role is tried on the ranks of the winner, and its times count along the longest chain."""
    model = TINY | {"hidden_size": 256, "intermediate_size": 512}
    fp32 = {"dtype": "fp32"}
    path = write_run(tmp_path, model, policy=fp32, critic=fp32, reference=fp32, run={"device": "cpu"})
    tried = []

    def start_ranks(world, arguments, module):
        folder, *names = arguments
        for name in names:
            tried.append(read_trial(Path(folder), name))
            write_outcome(Path(folder), name, Measured(forward_s=1.0, update_s=2.0 if "reference" not in name else None))
        return 0

    def critic_apart(*arguments):
        return [one for one in rank_placements(*arguments) if one.placing.name.startswith("critic on")]

    monkeypatch.setattr(trials, "start_ranks", start_ranks)
    monkeypatch.setattr("megappo.commands.tune.run.rank_placements", critic_apart)
    overrides = ["rollout.engine=megatron", "rollout.kv_cache_gib=null", f"run.output_dir={tmp_path / 'runs'}"]
    facts = tmp_path / "all.json"
    arguments = ["--gpus", 4, "--gpu", "cpu", "--placements", "--measure", 1, "--json", facts, *overrides]
    code, told = tune(capsys, path, *arguments)
    assert code == 0, told.err
    first = json.loads(facts.read_text())["placements"][0]
    assert f"trials are of {first['placement']} alone" in told.out
    assert {trial.role for trial in tried} == {"policy", "critic", "reference"}
    for trial in tried:
        assert f"{trial.role}.ranks={getattr(trial.config, trial.role).ranks}" in first["overrides"]
    # Two mini-batches in a step: the updates of critic and policy overlap, and the critic's passes with the others'.
    search = search_of(path, [*overrides, *first["overrides"]], load_hardware("cpu"), world=4)
    phases = {role: phases_of(Measured(forward_s=1.0, update_s=2.0), role, search.workload) for role in ("policy", "critic")}
    phases["reference"] = phases_of(Measured(forward_s=1.0, update_s=None), "reference", search.workload)
    assert search.timetable.step_s(phases) == pytest.approx(2 * (1.0 + 1.0) + 2 * 2.0)
