"""A trial times what a step does: a phase of updates with its way from host memory and back (engine/offload.py)."""

from __future__ import annotations

import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from megappo.commands.launch.local import start_ranks
from megappo.commands.tune.trial import _Passes
from megappo.commands.tune.trials import Measured, Trial, read_outcome, world_folder, write_trial
from megappo.config.loading import load_config
from megappo.parallel.shares import Shares
from megappo.trainer.roles import PTX_WEIGHT, policy_reads
from tests.commands.plan.checkpoints import TINY, write_checkpoint
from tests.commands.tune.slow_critic_rank import PAUSE_S
from tests.forked_commands import ForkedRanks

OFFLOADS = {
    "none": [],
    "parameters": ["parameters"],
    "optimizer": ["optimizer"],
    "gradients": ["gradients"],
    "all": ["parameters", "gradients", "optimizer"],
}
# Terms of the policy's loss that read fields of their own.
TERMS = [
    "algorithm.ptx.coef=0.1",
    "algorithm.ptx.data=none",
    "algorithm.ptx.batch_size=5",
    "algorithm.ptx.max_tokens=24",
    "algorithm.positive_nll.coef=0.1",
    "algorithm.loss.proximal=behaviour",
]


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Offload and role -> what was timed -> [direction, bytes] of what was copied meanwhile, on one CPU rank."""
    folder = tmp_path_factory.mktemp("trials")
    model = write_checkpoint(folder / "model", TINY, weights=False, tokenizer=False)
    for name, offload in OFFLOADS.items():
        for role in ("policy", "critic"):
            path = folder / "run.yaml"
            run = {
                "run": {"device": "cpu"},
                "policy": {"model": str(model), "dtype": "fp32", "offload": offload},
                "critic": {"dtype": "fp32", "offload": offload},
                "reference": {"dtype": "fp32"},
                "data": {"train": "none", "max_prompt_tokens": 8},
                "rollout": {"engine": "megatron", "max_response_tokens": 8},
            }
            path.write_text(json.dumps(run))  # which is YAML too
            trial = Trial(config=load_config(path), role=role, label=name, samples=4, prompt_tokens=8, response_tokens=8)
            write_trial(folder, f"{name}-{role}", trial)
    names = [f"{name}-{role}" for name in OFFLOADS for role in ("policy", "critic")]
    (folder / "trials.json").write_text(json.dumps(names))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megappo.commands.launch.local.NewProcesses", ForkedRanks)
        assert start_ranks(1, [str(folder)], module="tests.commands.tune.counted_rank") == 0
    return json.loads((folder / "copies.json").read_text())


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("name", OFFLOADS)
def test_a_timed_phase_copies_what_a_phase_of_the_trainer_does(copied, name, role):
    timed = copied[f"{name}-{role}"]
    assert ("phase" in timed) == (name != "none"), "a phase is timed where it may differ from its update"
    expected = timed["the trainer's updates"]
    assert timed.get("phase", []) == expected
    directions = sorted(direction for direction, _ in expected)
    moved = ("parameters" in OFFLOADS[name]) + ("optimizer" in OFFLOADS[name])
    assert directions == ["to device"] * moved + ["to host"] * moved, "each once, there and back, for two mini-batches"


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_an_update_alone_copies_nothing(copied, role):
    """Negative control: it was all that was timed once, so that the optimizer's way cost nothing."""
    timed = copied[f"all-{role}"]
    assert timed["update"] == [] != timed["phase"]


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_pass_loads_weights_that_it_does_not_change(copied, role):
    """They come, and are freed; with the pass that is timed and with the empty one that is taken off it."""
    timed = copied[f"parameters-{role}"]
    assert timed["forward"] == timed["nothing"] and [direction for direction, _ in timed["forward"]] == ["to device"]
    assert copied[f"optimizer-{role}"]["forward"] == []


def test_an_update_has_the_texts_of_a_second_data_set(tmp_path):
    model = write_checkpoint(tmp_path / "model", TINY, weights=False, tokenizer=False)
    keys = {"policy": {"model": str(model)}, "data": {"train": "none"}, "rollout": {"max_response_tokens": 8}}
    (tmp_path / "run.yaml").write_text(json.dumps(keys))
    config = load_config(tmp_path / "run.yaml", TERMS)
    trial = Trial(config=config, role="policy", label="", samples=4, prompt_tokens=8, response_tokens=8)
    engine = SimpleNamespace(shares=Shares.of_ranks([0]), arch=SimpleNamespace(vocab_size=32), name="toy")
    with mock.patch.object(dist, "get_rank", lambda: 0):
        mini, denominator = (passes := _Passes(trial, SimpleNamespace(engine=engine)))._mini, passes._count
    assert mini.lengths.tolist() == [16] * 4 + [24] * 5 and denominator == 4 * 8
    assert set(policy_reads(config.algorithm)) <= set(mini.token_fields), "all that the loss reads"
    own = slice(0, 4 * 16)
    assert int((mini[PTX_WEIGHT][own] != 0).sum()) == 0 and int((mini["weight"][4 * 16 :] != 0).sum()) == 0
    # a mean over the texts' tokens but the first of each, times the denominator of the samples
    assert mini[PTX_WEIGHT].sum().item() == pytest.approx(denominator) and int((mini[PTX_WEIGHT] != 0).sum()) == 5 * 23


def test_a_role_is_timed_on_its_own_ranks(tmp_path, monkeypatch):
    """Rank 0, which writes the outcome, has no critic, and finds the time of rank 1, which has; no policy is built there. And a
    policy under the other engine, on both."""
    model = write_checkpoint(tmp_path / "model", TINY, weights=False, tokenizer=False)
    path = tmp_path / "run.yaml"
    run = {
        "run": {"device": "cpu", "num_ranks": 2},
        "policy": {"model": str(model), "dtype": "fp32", "ranks": "0"},
        "critic": {"dtype": "fp32", "ranks": "1"},
        "reference": {"dtype": "fp32", "ranks": "0"},
        "data": {"train": "none", "max_prompt_tokens": 8},
        "rollout": {"engine": "megatron", "max_response_tokens": 8, "ranks": "0"},
    }
    path.write_text(json.dumps(run))
    for role in ("critic", "policy"):
        trial = Trial(config=load_config(path, TERMS), role=role, label=role, samples=4, prompt_tokens=8, response_tokens=8)
        write_trial(tmp_path, role, trial)
    everywhere = ["policy.engine=fsdp2", *(f"{name}.ranks=all" for name in ("policy", "critic", "reference", "rollout"))]
    trial = Trial(config=load_config(path, everywhere), role="policy", label="", samples=4, prompt_tokens=8, response_tokens=8)
    write_trial(tmp_path, "fsdp2", trial)
    world_folder(tmp_path, ["critic"]).mkdir()
    monkeypatch.setattr("megappo.commands.launch.local.NewProcesses", ForkedRanks)
    assert start_ranks(2, [str(tmp_path), "critic", "policy", "fsdp2"], module="tests.commands.tune.slow_critic_rank") == 0
    found = {name: read_outcome(tmp_path, name) for name in ("critic", "policy", "fsdp2")}
    assert all(isinstance(one, Measured) and one.update_s for one in found.values())
    assert found["critic"].forward_s >= PAUSE_S > found["policy"].forward_s
