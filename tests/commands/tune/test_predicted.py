"""What the process that starts the ranks predicts for their log, and the environment that a run has shown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megappo.commands.plan.run import plan_run
from megappo.commands.tune.candidates import Machine
from megappo.commands.tune.cost import workload_of
from megappo.commands.tune.lengths import seen_lengths
from megappo.commands.tune.parts import parts_of
from megappo.commands.tune.predicted import SHARES, record_prediction
from megappo.commands.tune.run import seen_turns
from megappo.commands.tune.search import Search
from megappo.config.environment_sections import EnvironmentConfig
from megappo.config.loading import load_config
from megappo.config.run_directory import PREDICTED
from megappo.telemetry.hardware import Calibration, dump_hardware, load_hardware
from megappo.telemetry.trajectories.read import read_run
from tests.commands.plan.checkpoints import SPARSE
from tests.commands.trajectories import runs
from tests.commands.tune.test_command import SMALL, write_run

H100 = load_hardware("h100")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    extra = "reward: {parts: [{url: 'http://127.0.0.1:8000/score'}]}\n"
    path = write_run(tmp_path_factory.mktemp("run"), SPARSE | {"num_hidden_layers": 4, "max_position_embeddings": 4096}, extra)
    single = [f"policy.parallel.{key}" for key in ("tp=1", "pp=1", "layers_per_stage=null")]
    config = load_config(path, [*SMALL, *single, "rollout.memory_share=0.3"])
    return plan_run(config, 16, "cuda", H100.memory_bytes, shapes_only=True)


def test_the_stages_of_a_run_are_predicted_for_its_gpus(planned, tmp_path):
    record_prediction(planned, tmp_path, [H100])
    found = json.loads((tmp_path / PREDICTED).read_text())
    assert list(found) == ["h100"] and found["h100"]["responses"] == [512 * share for share in SHARES]
    stages = found["h100"]["stages"]
    assert {"generate", "logprobs", "update_policy", "update_critic", "push_weights", "score"} == set(stages)
    assert stages["score"] is None and found["h100"]["step"] is None, "a server's time is unknown, and so is the step's"
    for seconds in (stages["generate"], stages["update_policy"]):
        assert seconds == sorted(seconds) and 0 < seconds[0] < seconds[-1]
    record_prediction(planned, tmp_path, [])
    assert not (tmp_path / PREDICTED).exists(), "what was predicted for other GPUs is gone"


def test_nothing_is_predicted_for_cpus(planned, tmp_path):
    record_prediction(replace(planned, plan=replace(planned.plan, device="cpu")), tmp_path)
    record_prediction(planned, tmp_path, [load_hardware("cpu")])
    assert not list(tmp_path.iterdir())


def test_a_profile_that_a_run_names_is_what_is_predicted_for(planned, tmp_path):
    """With the factors of its calibration. A profile of GPUs says nothing about CPUs."""
    plain, factors = load_hardware("cpu"), {"generate": 1.5, "update_policy": 0.5}
    (tmp_path / "mine.yaml").write_text(dump_hardware(replace(plain, calibration=Calibration().times(factors))))
    found = {}
    for name in ("cpu", str(tmp_path / "mine.yaml"), "h100"):
        telemetry = planned.plan.config.telemetry.model_copy(update={"hardware": name})
        config = planned.plan.config.model_copy(update={"telemetry": telemetry})
        plan = replace(planned.plan, device="cpu", config=config)
        record_prediction(replace(planned, plan=plan), tmp_path)
        path = tmp_path / PREDICTED
        found[name] = json.loads(path.read_text())["cpu"]["stages"] if path.exists() else None
    before, after, none = found.values()
    assert none is None and before["score"] is None
    for stage, seconds in before.items():
        if seconds is not None:
            assert after[stage] == pytest.approx([factors.get(stage, 1.0) * one for one in seconds]), stage


def test_a_prediction_that_fails_ends_no_run(planned, tmp_path, capsys):
    broken = replace(planned, plan=replace(planned.plan, archs={}))
    record_prediction(broken, tmp_path, [H100])
    assert capsys.readouterr().out.startswith("note: no prediction of the step's time: KeyError") and not list(tmp_path.iterdir())


def test_an_environment_is_known_from_a_run(planned, tmp_path):
    mask = [1, 1, 0, 0, 0, 1, 0, 1]  # three turns of 4 tokens, and 4 tokens of observations
    lists = ("logprob", "rollout_logprob", "ref_logprob", "entropy", "value", "reward", "advantage", "returns")
    holes = {name: [0.5 if one else None for one in mask] for name in lists}
    record = runs.record([5] * 8, response_mask=mask, **holes)
    run = runs.write_run(tmp_path / "run", {1: [record, runs.record([5] * 6)]})
    trajectories, environment = (
        read_run(run).trajectories,
        EnvironmentConfig(path="mine.py", function="search", workers=4, join="each"),
    )
    assert seen_turns(run, trajectories, environment) is None, "without seconds of answers it stays unknown"
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": at, "timing/environment/mean_s": 0.5}) + "\n" for at in (1, 2)))
    turns = seen_turns(run, trajectories, environment)
    assert turns == (2.0, 2.0, 0.5, 4, False)
    seen = seen_lengths([one.length for one in trajectories], 512.0)
    config = planned.plan.config
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"environment": environment})})
    parts = {}
    for name, known in (("known", turns), ("unknown", None)):
        work = workload_of(config, 256.0, seen.mean, seen, known)
        assert work.length == 256 + 5 + (2 if known else 0) and work.decoded_tokens == 5
        choice = Search(config, planned.plan.archs, Machine(16, H100), work, ()).as_written()
        parts[name] = {part.name: part.seconds for part in parts_of(choice)}
    assert parts["unknown"]["environment"] is None and "environment" not in parts["known"]
    assert parts["known"]["generate"] > parts["unknown"]["generate"] + 0.5
