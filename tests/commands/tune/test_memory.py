"""The tuner's memory is the plan's: byte for byte for a choice, and never less when it decides what fits."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.commands.plan.estimate import check_rollout_start, sequences_at_once, work_out
from megappo.commands.plan.memory import GIB, RolloutMemory
from megappo.commands.plan.phases import phases
from megappo.commands.tune import search as search_module
from megappo.commands.tune.candidates import Machine
from megappo.commands.tune.cost import workload_of
from megappo.commands.tune.enumerate import layouts
from megappo.commands.tune.report import overrides_of
from megappo.commands.tune.search import Search, fullest_stages
from megappo.config.loading import load_config
from megappo.config.role_sections import ParallelConfig, section_of
from megappo.parallel.layout import ParallelLayout
from megappo.telemetry.hardware import load_hardware
from megappo.trainer.prepare.layouts import check_layouts, read_archs
from tests.commands.plan.archs import llama
from tests.commands.plan.checkpoints import SPARSE, TINY, write_checkpoint

WORLD = 8
ROLES = ("policy", "critic", "reference")
MODELS = {"dense": TINY | {"num_hidden_layers": 8}, "experts": SPARSE | {"num_hidden_layers": 8}}
ROOMY = replace(load_hardware("h100"), memory_gib=2000.0)


@cache
def folder_of(base, model):
    return write_checkpoint(base / model, MODELS[model], weights=False, tokenizer=False)


def write_run(base, model, sleep="none", offload=(), engine="vllm", device="auto"):
    folder = folder_of(base, model)
    trained = {"dtype": "bf16", "offload": list(offload)}
    path = base / f"run-{model}.yaml"
    run = {
        "run": {"device": device},
        "policy": {"model": str(folder), **trained},
        "critic": {"optimizer": {"distributed": False}, **trained},
        "reference": {"offload": ["parameters"] if "parameters" in offload else []},
        "data": {"train": "none", "max_prompt_tokens": 64, "prompts_per_step": 32},
        "rollout": {"engine": engine, "max_response_tokens": 64, "sleep": sleep, "kv_cache_gib": 1.5}
        if engine == "vllm"
        else {"engine": engine, "max_response_tokens": 64},
        "algorithm": {"mini_batch_size": 16},
    }
    path.write_text(json.dumps(run))  # which is YAML too
    return path


def search_of(path, hardware=ROOMY, roles=(*ROLES, "rollout")):
    config = load_config(path, [f"run.num_ranks={WORLD}"])
    tuned = [role for role in roles if role != "rollout" or config.rollout.engine == "vllm"]
    return Search(config, read_archs(config), Machine(WORLD, hardware), workload_of(config), tuned)


def choice_of(search, parallels, rollout_tp=None, **changes):
    """These layouts, whether the tuner would take them or not."""
    roles = {}
    for role, parallel in zip(ROLES, parallels):
        known = {key: value for key, value in changes.items() if hasattr(section_of(search.config, role), key)}
        own = section_of(search.config, role).model_copy(update={"parallel": parallel, **known})
        roles[role] = search.candidate(role, own)
    rollout = next(one for one in search.rollouts if one.tp == rollout_tp)
    return search.choice(roles, rollout)


def planned(path, search, choice):
    """By the way of `megappo plan`: from the file and the overrides that the tuner writes."""
    config = load_config(path, overrides_of(search, choice))
    archs = read_archs(config)
    device, memory = search.machine.device, search.machine.device_memory
    return work_out(config, archs, check_layouts(config, archs, WORLD), WORLD, device, memory)


def fullest_phase(plan):
    return max(phase.total for rank in range(plan.world_size) for phase in phases(plan, rank))


@cache
def legal(base, model):
    search = search_of(write_run(base, model))
    return list(layouts(search.archs["policy"], WORLD))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("sleep", ["none", "cache", "all"])
@pytest.mark.parametrize("model", MODELS)
def test_the_peak_of_a_choice_is_the_fullest_phase_of_the_plan(tmp_path_factory, model, sleep, data):
    base = tmp_path_factory.getbasetemp()
    offload = [part for part in ("parameters", "gradients", "optimizer") if data.draw(st.booleans())]
    parallels = [data.draw(st.sampled_from(legal(base, model))) for _ in ROLES]
    path = write_run(base, model, sleep, offload)
    search = search_of(path)
    tp = data.draw(st.sampled_from([one.tp for one in search.rollouts]))
    changes = {
        "recompute": data.draw(st.sampled_from(["none", "full"])),
        "micro_batch_tokens": data.draw(st.sampled_from([128, 512])),
    }
    choice = choice_of(search, parallels, tp, **changes)
    plan = planned(path, search, choice)
    assert choice.peak == fullest_phase(plan) == choice.fullest()[0].total
    assert choice.plan.reserve == plan.reserve > 0
    for role in ROLES:
        mine = max(phase.total for rank in range(WORLD) for phase in phases(plan, rank) if phase.role == role)
        assert choice.peak_of(role) == mine
        for stage in plan.memory[role]:
            need = choice.roles[role].need
            assert stage.resident <= need.resident and stage.active <= need.training, "it covers every stage"
            assert role == "reference" or stage.saving <= need.pushed


@settings(max_examples=8, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("sleep", ["none", "cache", "all"])
def test_what_fits_fills_no_rank_beyond_what_may_be_used(tmp_path_factory, sleep, data):
    """With a byte less than the plan's peak to use, nothing fits any more; with the margin and the fullest stages, it does."""
    base = tmp_path_factory.getbasetemp()
    model = data.draw(st.sampled_from(list(MODELS)))
    path = write_run(base, model, sleep, {"optimizer": True, "parameters": data.draw(st.booleans())})
    search = search_of(path)
    choice = choice_of(search, [data.draw(st.sampled_from(legal(base, model))) for _ in ROLES], 1)
    needs = {role: one.need for role, one in choice.roles.items()}

    def fits_into(usable):
        tight = replace(ROOMY, headroom_gib=(ROOMY.memory_bytes - usable) / GIB)
        assert tight.usable_bytes == usable
        return search_of(path, tight).fits(needs, choice.rollout)

    assert not fits_into(choice.peak - 1)
    together = (
        choice.plan.reserve
        + choice.plan.experience(0)
        + choice.plan.rollout_bytes()
        + sum(need.resident for need in needs.values())
    )
    assert fits_into(together + 2 * max(max(need.training, need.pushed) for need in needs.values()))


def test_a_sum_that_knows_neither_sleep_nor_reserve_is_not_the_peak(tmp_path):
    """Negative control: what the tuner once added up, without the margin."""
    for sleep in ("none", "cache", "all"):
        path = write_run(tmp_path, "dense", sleep, {"optimizer": True})
        choice = choice_of(search_of(path), [ParallelConfig()] * 3, 1, micro_batch_tokens=4096)
        every = [stage for (stage,) in choice.plan.memory.values()]
        once = choice.plan.rollout_bytes() + sum(one.resident for one in every) + max(one.active for one in every)
        held = choice.plan.reserve + choice.plan.experience(0)
        assert (choice.peak == once + held) == (sleep == "none") and choice.peak != once


def test_a_sleeping_cache_makes_room_for_the_models(tmp_path):
    """The search itself takes it into account: a run whose cache fills what the training needs is found only if that sleeps."""
    offload = ["parameters", "gradients", "optimizer"]
    asleep = choice_of(search_of(write_run(tmp_path, "dense", "all", offload)), [ParallelConfig()] * 3, 1, micro_batch_tokens=8192)
    fullest, _ = asleep.fullest()
    assert fullest.name == "generate" and asleep.peak == fullest_phase(asleep.plan)
    tight = replace(ROOMY, headroom_gib=(ROOMY.memory_bytes - asleep.peak) / GIB)
    needs = {role: one.need for role, one in asleep.roles.items()}
    for sleep in ("none", "cache", "all"):
        search = search_of(write_run(tmp_path, "dense", sleep, offload), tight, roles=())
        assert search.fits(needs, asleep.rollout) == (search.best() is not None) == (sleep != "none")


def test_a_layout_is_given_up_early_only_if_nothing_of_it_fits(tmp_path, monkeypatch):
    """On GPUs on which a whole model fits with recomputation alone, and some layouts in no way."""
    path = write_run(tmp_path, "dense", offload=["optimizer"], engine="megatron")
    of_all = search_of(path, roles=("critic",))
    least = [one for one in of_all.candidates["critic"] if one.layout.tp == 2 and one.settings.micro_batch_tokens == 128]
    full, none = (next(one for one in least if one.recompute == recompute) for recompute in ("full", "none"))

    def fits(usable, need):
        tight = replace(ROOMY, headroom_gib=(ROOMY.memory_bytes - usable) / GIB)
        return search_of(path, tight, ("critic",)).fits({"critic": need}, of_all.rollouts[0])

    usable = bisect_left(range(ROOMY.memory_bytes), True, key=lambda usable: fits(usable, full.need))
    assert not fits(usable, none.need)
    is_hopeless = Search._is_hopeless

    def found(is_hopeless):
        monkeypatch.setattr(Search, "_is_hopeless", is_hopeless)
        tight = replace(ROOMY, headroom_gib=(ROOMY.memory_bytes - usable) / GIB)
        return [one.settings for one in search_of(path, tight, ("critic",)).candidates["critic"]]

    every, given_up = found(lambda *_: False), []
    assert found(lambda *asked: given_up.append(is_hopeless(*asked)) or given_up[-1]) == every
    assert found(lambda *_: True) != every, "negative control"
    assert full.settings in every and none.settings not in every and {True, False} == set(given_up)


def test_stages_with_fewer_layers_may_be_the_fullest():
    """The second of four stages keeps three micro-batches of ten layers, the third two of eleven."""
    layout = ParallelLayout(4, pp=4, layers_per_stage=(1, 10, 11, 10))
    assert fullest_stages(llama(32), layout) == [0, 1, 2, 3]
    assert fullest_stages(llama(31), ParallelLayout(4, pp=4, layers_per_stage=(7, 8, 8, 8))) == [0, 1, 3]
    assert fullest_stages(llama(32), ParallelLayout(4, pp=4)) == [0, 3]


def test_a_kept_split_is_counted_at_its_fullest_stage(tmp_path, monkeypatch):
    split = ParallelConfig(pp=4, layers_per_stage=(1, 3, 3, 1))
    uneven = ParallelConfig(pp=4, layers_per_stage=(1, 1, 1, 5))
    search = search_of(write_run(tmp_path, "dense"))
    for parallel in (split, uneven):
        choice = choice_of(search, [parallel] * 3, 1, micro_batch_tokens=128)
        for role in ROLES:
            assert choice.roles[role].need.training == max(one.active for one in choice.plan.memory[role])
    monkeypatch.setattr(search_module, "fullest_stages", lambda arch, layout: [0, 3])
    choice = choice_of(search_of(write_run(tmp_path, "dense")), [split] * 3, 1, micro_batch_tokens=128)
    fullest = max(one.active for one in choice.plan.memory["policy"])
    assert choice.roles["policy"].need.training < fullest, "negative control: the ends alone"


def test_replicas_that_the_plan_refuses_are_no_candidates(tmp_path):
    """Of their cache by the plan's own rule, and as many sequences at once as the plan says."""
    search = search_of(write_run(tmp_path, "dense"))
    for one in search.rollouts:
        plan = choice_of(search, [ParallelConfig()] * 3, one.tp).plan
        assert one.memory == plan.rollout and one.memory.holds_sequence(plan.step.max_sequence_tokens)
        check_rollout_start(plan)
        assert one.cost.at_once * one.cost.waves >= sequences_at_once(plan) >= one.cost.at_once
    assert not RolloutMemory(0, 10, 99).holds_sequence(10) and RolloutMemory(0, 10, 100).holds_sequence(10)


def test_on_a_cpu_there_is_no_reserve_and_nothing_is_offloaded(tmp_path):
    path = write_run(tmp_path, "dense", "none", {"parameters": True, "optimizer": True}, engine="megatron", device="cpu")
    path.write_text(path.read_text().replace("bf16", "fp32").replace('"reference": {', '"reference": {"dtype": "fp32", '))
    search = search_of(path, load_hardware("cpu"))
    choice = choice_of(search, [ParallelConfig()] * 3)
    plan = planned(path, search, choice)
    assert plan.reserve == choice.plan.reserve == 0 and choice.peak == fullest_phase(plan)
    assert all(one.cost.share("offload") == 0 for one in choice.roles.values())


def test_the_way_from_host_memory_is_of_the_bytes_that_the_plan_offloads(tmp_path):
    """Weights once for a pass, and there and back for the updates, as the optimizer's state."""
    search = search_of(write_run(tmp_path, "dense", "none", {"parameters": True, "optimizer": True}))
    for dtype in ("bf16", "fp32"):
        choice = choice_of(search, [ParallelConfig(tp=2, pp=2)] * 3, 1, dtype=dtype)
        for role in ROLES:
            stages = choice.plan.memory[role]
            weights, state = (max(getattr(one, f"offloaded_{what}") for one in stages) for what in ("weights", "optimizer"))
            moved = weights if role == "reference" else 3 * weights + 2 * state
            assert choice.roles[role].cost.parts["offload"] == pytest.approx(moved / ROOMY.host_bytes_per_s)
