"""Generation beside training, with the real trainer and real vLLM: staleness 0 is the synchronous run bit for bit, a replay and a
resume are the run itself, and every sample is trained on once. All runs of the module are in one world of three ranks.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.reliability.compare import compare, compare_samples
from megappo.commands import cli
from megappo.commands.plan.report import in_flight_bytes
from megappo.commands.plan.run import plan_run
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.rollout.vllm_engine import VllmEngine
from megappo.runtime.ending import StopRequest
from megappo.runtime.sections import GENERATING, TRAINING_HALF, last_section
from megappo.trainer.halves import check_replay
from tests.trainer.asynchronous_runs import (
    WORLD,
    by_scores,
    config_of,
    ended_by,
    failing_from,
    in_environment,
    only_when_waited_for,
    pauses,
    run,
    run_synchronous,
    run_until_killed,
    seeing,
    stopping_after,
    warmer_from,
    with_cursor_only,
    write_task,
)
from tests.trainer.small_run import set_keys
from tests.worlds import WorldError, spawn_world

STALENESS, STEPS = 2, 6
OF_KIND = {"turns": 3, "scores": 5}
"""Steps of the runs without staleness: of scores until the curriculum passes over prompts."""
TURNS = 4
"""Steps of the run of several turns with staleness."""
NOISE = 2e-6  # in a probability, fp32
STACKS = shutil.ignore_patterns("stacks")  # which another rank may still be removing
# Metrics of asynchronous runs alone, and those that the placement decides.
OWN = (
    "rollout/push_bytes",
    "rollout/replicas",
    "rollout/running",
    "rollout/tokens_in_flight",
    "rollout/requests_cut",
    "rollout/tokens_recomputed",
    "rollout/token_age",
)


def run_all(rank: int, folder: Path) -> dict[str, str]:
    runs, found = folder / "runs", dict[str, str]()

    def config(name: str, staleness: int | None = STALENESS) -> dict[str, Any]:
        return config_of(folder, name, staleness, **{"checkpoint.save_every": 3})  # not after step 4, whose end is an emergency

    with only_when_waited_for():
        run(rank, config("k2"))
    with pauses(rank, 3, 0.01, 0.2), failing_from(5):
        found["failed"] = ended_by(lambda: run(rank, config("resumed"), replay=runs / "k2"))
    if rank == 0:
        shutil.copytree(runs / "resumed", runs / "lossy", ignore=STACKS)
    with pauses(rank, 4, 0.03, 0.1):
        run(rank, config("resumed"), resume=True, replay=runs / "k2")
    with with_cursor_only():
        found["lossy"] = ended_by(lambda: run(rank, config("lossy"), resume=True))
    other = set_keys(config("other"), {"policy.optimizer.lr": 2e-3})
    found["other"] = ended_by(lambda: run(rank, other, replay=runs / "k2"))
    strict = set_keys(config("warmer"), {"rollout.max_prob_diff": 1e-4})
    with only_when_waited_for(), warmer_from(2):
        found["warmer"] = ended_by(lambda: run(rank, strict))
    stop = StopRequest()
    with pauses(rank, 5, 0.08, 0.01), stopping_after(2, stop if rank == WORLD - 1 else StopRequest()):
        found["stopped"] = str(run(rank, config("stopped"), stop=stop))
    found["smaller"] = ended_by(lambda: run(rank, config("stopped", 1), resume=True))
    found |= run_in_environment(rank, folder)
    return found | run_by_scores(rank, folder) | broken(rank, config("broken"))


def run_by_scores(rank: int, folder: Path) -> dict[str, str]:
    """Runs whose prompts depend on scores."""
    run_synchronous(rank, by_scores(folder, "scores_sync", None, OF_KIND["scores"]))
    with pauses(rank, 6, 0.02, 0.2):
        run(rank, by_scores(folder, "scores_k0", 0, OF_KIND["scores"]))
    with only_when_waited_for():
        run(rank, by_scores(folder, "scores_k2", STALENESS, STEPS))
    resumed, replay = by_scores(folder, "scores_resumed", STALENESS, STEPS), folder / "runs" / "scores_k2"
    with pauses(rank, 7, 0.01, 0.2), failing_from(4, at_first=False):
        failed = ended_by(lambda: run(rank, resumed, replay=replay))
    with pauses(rank, 8, 0.03, 0.1):
        run(rank, resumed, resume=True, replay=replay)
    return {"failed by scores": failed}


def run_in_environment(rank: int, folder: Path) -> dict[str, str]:
    """Runs of several turns, the last with a fault of its environment."""
    run_synchronous(rank, in_environment(folder, "turns_sync", None, OF_KIND["turns"]))
    with pauses(rank, 6, 0.02, 0.1):
        run(rank, in_environment(folder, "turns_k0", 0, OF_KIND["turns"]))
    with only_when_waited_for():
        run(rank, in_environment(folder, "turns_k2", STALENESS, TURNS, workers=2, timeout_s=20.0))
        run(rank, seeing(folder, "seeing_k1", 1, 3))
    return {"fault": ended_by(lambda: run(rank, in_environment(folder, "fault", STALENESS, TURNS, args={"fails": True})))}


def broken(rank: int, config: dict[str, Any]) -> dict[str, str]:
    """The rollout half ends by an error in its tenth engine step; the last run, as its engine is not closed."""
    plain, polls = VllmEngine.poll, iter(range(1000))

    def poll(self: VllmEngine) -> Any:
        if next(polls) == 10:
            raise RuntimeError("out of blocks")
        return plain(self)

    with mock.patch.object(VllmEngine, "poll", poll):
        return {"broken": ended_by(lambda: run(rank, config))}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("asynchronous")
    write_task(folder)
    return folder / "runs", spawn_world(run_all, WORLD, folder)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def samples_of(run: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Every sample of a run by step and number."""
    rows = [row for file in sorted((run / "trajectories").glob("*.jsonl")) for row in lines_of(file)]
    return {(row["step"], row["sample"]): row for row in rows}


def state_of(run: Path, step: int) -> dict[str, Any]:
    state = json.loads((run / "checkpoints" / f"step-{step}" / "state.json").read_text())
    return {**state, "loader": {key: value for key, value in state["loader"].items() if key not in ("ahead", "ledger")}}


@pytest.mark.parametrize("kind", OF_KIND)
def test_without_staleness_it_is_the_synchronous_run_bit_for_bit(task: tuple[Path, Any], kind: str) -> None:
    """Of several turns; with dynamic sampling, a step that is drawn again, and a curriculum. `test_asynchronous_layouts.py` has
    plain responses."""
    runs, _ = task
    sync, halves = (runs / f"{kind}_{which}" for which in ("sync", "k0"))
    found = compare(sync, halves)
    assert found.tensors > 100 and found.values > 300
    assert [name for name in found.differing if not name.startswith((*OWN, "state.json"))] == []
    assert state_of(sync, OF_KIND[kind]) == state_of(halves, OF_KIND[kind])
    drawn = samples_of(sync)
    assert len(drawn) == OF_KIND[kind] * 16 and drawn == samples_of(halves)
    assert any("eval/score" in row for row in lines_of(halves / "metrics.jsonl"))


def test_turns_are_cut_by_pushes_and_their_verdicts_are_logged(task: tuple[Path, Any]) -> None:
    runs, found = task
    rows = lines_of(runs / "turns_k0" / "metrics.jsonl")
    assert any(row.get("reward/no_verdict/tool_down") for row in rows), "counted as in a synchronous run"
    ahead = lines_of(runs / "turns_k2" / "metrics.jsonl")
    assert all(row["rollout/token_age_max"] <= STALENESS for row in ahead) and ahead[-1]["rollout/token_age_max"] == STALENESS
    assert sum(row["rollout/requests_cut"] for row in ahead) > 0 and max(row["rollout/turns_mean"] for row in ahead) > 1.2
    log = (runs / "turns_k2" / "events" / "replica-0.log").read_text()
    assert "\no " in log and log.count("\nv ") == TURNS * 16, "answers, and the rollout half's verdicts"
    assert any(row.get("reward/no_verdict/unsure") for row in rows + ahead)
    for one in found[:2]:
        assert one["fault"].startswith("EnvironmentFault: rank 2 of the rollout half: environment ")
        assert "play raised ValueError: no tool" in one["fault"] and "turn 0 of sample" in one["fault"]


def test_images_are_seen_by_the_rollout_half_after_every_push(task: tuple[Path, Any]) -> None:
    """Requests of several turns are cut by pushes of changed towers, and go on with features of the new ones."""
    rows = lines_of(task[0] / "seeing_k1" / "metrics.jsonl")
    assert len(rows) == 3 and max(row["rollout/token_age_max"] for row in rows) == 1
    assert sum(row["rollout/requests_cut"] for row in rows) > 0 and max(row["rollout/turns_mean"] for row in rows) > 1.2
    assert all(row["rollout/canary_prob_diff_max"] < 5 * NOISE for row in rows[1:])
    shown = [len(one["images"]) for one in samples_of(task[0] / "seeing_k1").values()]
    assert len(shown) == 3 * 8 and set(shown) == {0, 1, 2}


def test_ages_reach_the_bound_and_pushes_find_responses_half_drawn(task: tuple[Path, Any]) -> None:
    rows = lines_of(task[0] / "k2" / "metrics.jsonl")
    ages = [row["rollout/token_age_max"] for row in rows]
    assert len(ages) == STEPS and ages[0] == 0 and max(ages) == STALENESS
    assert all(
        row["rollout/age_max"] <= STALENESS and row["rollout/token_age_mean"] <= row["rollout/token_age_max"] for row in rows
    )
    for row in rows:
        shares = [row[f"rollout/token_age_share/{age}"] for age in range(STALENESS + 1)]
        assert sum(shares) == pytest.approx(1) and row["rollout/token_age_mean"] == pytest.approx(shares[1] + 2 * shares[2])
    for name in ("requests_cut", "tokens_recomputed", "tokens_in_flight"):
        assert sum(row[f"rollout/{name}"] for row in rows) > 0
    assert not any(row["rollout/tokens_in_flight"] for row in lines_of(task[0] / "turns_k0" / "metrics.jsonl"))


def test_a_canary_judges_every_push_where_the_steps_own_tokens_are_older(task: tuple[Path, Any]) -> None:
    """From step 3 on the sampler is warmer than the trainer. Its weights are right, and the step's own responses are not judged."""
    runs, found = task
    name = "rollout/canary_prob_diff_{}".format
    rows = lines_of(runs / "k2" / "metrics.jsonl")
    assert [name("max") in row for row in rows] == [False] + [True] * (STEPS - 1)  # the first step is judged itself
    assert all(0 < row[name("mean")] <= row[name("max")] < NOISE for row in rows[1:])
    assert not any(name("max") in row for row in lines_of(runs / "turns_k0" / "metrics.jsonl"))
    for one in found:
        assert "SamplerMismatch: step 3: vllm and the trainer disagree on sampled tokens" in one["warmer"]
        assert "of the sequences drawn after push 2: mean |probability difference| 0.0" in one["warmer"]
    assert len(lines_of(runs / "warmer" / "metrics.jsonl")) == 2


def test_a_resume_on_the_events_of_a_run_is_that_run(task: tuple[Path, Any]) -> None:
    """From the emergency checkpoint of a step whose reward failed, with two later steps in flight, after an evaluation, whose
    events come between the push and the next step."""
    runs, found = task
    assert all(one["failed"] == "RewardError: in step 5" for one in found[:2])
    checkpoint = runs / "resumed" / "checkpoints" / "step-4"
    assert "eval/score" in lines_of(runs / "k2" / "metrics.jsonl")[3]
    assert sorted(json.loads((checkpoint / "state.json").read_text())["loader"]["ahead"]["rows"]) == ["5", "6"]
    assert "rollout-0.bin" in json.loads((checkpoint / "manifest.json").read_text())["files"]
    planned = plan_run(load_config(str(runs / "k2" / "config.yaml"), []), WORLD, "cpu", resume=True).plan
    sizes = [file.stat().st_size for file in (runs / "k2" / "checkpoints").glob("*/rollout-0.bin")]
    assert in_flight_bytes(planned) / 4 < max(sizes) <= in_flight_bytes(planned)
    result = compare(runs / "k2", runs / "resumed")
    # What runs at a hand-over is the clock's; the push of a resume finds nothing running.
    measured = (
        "rollout/running",
        "rollout/tokens_in_flight",
        "rollout/requests_cut of step 5",
        "rollout/tokens_recomputed of step 5",
    )
    assert [name for name in result.differing if not name.startswith(measured)] == []
    assert samples_of(runs / "k2") == samples_of(runs / "resumed")
    logs = [(runs / name / "events" / "replica-0.log").read_bytes() for name in ("k2", "resumed")]
    assert logs[0] == logs[1]


def test_a_checkpoint_of_the_cursor_alone_loses_prompts_and_the_ledger_says_so(task: tuple[Path, Any]) -> None:
    runs, found = task
    assert all("samples were lost or trained on twice: 128 asked for, 96 trained on" in one["lossy"] for one in found[:2])
    same, lossy = compare_samples(runs / "k2", runs / "resumed"), compare_samples(runs / "k2", runs / "lossy")
    assert (same.differing, same.samples) == ((), STEPS * 16)
    assert "ledger" in lossy.differing and any(name.startswith("sample ") for name in lossy.differing)


def test_killed_ranks_of_both_halves_lose_no_prompt_and_none_trains_twice(task: tuple[Path, Any]) -> None:
    """A rank that trains and one that generates, at random moments, with two steps in flight; before that the run was stopped, by a
    request at the rollout rank alone. Negative control: without the events of a run, other pauses make another one."""
    (runs, ends), chance = task, random.Random(7)
    assert {one["stopped"] for one in ends} == {"False"}
    config = config_of(runs.parent, "stopped", STALENESS, **{"checkpoint.save_every": 1, "checkpoint.asynchronous": True})
    victims = chance.sample([chance.randrange(WORLD - 1), WORLD - 1], 2)
    for step, victim in zip((3, 4), victims):
        with pytest.raises(WorldError):
            spawn_world(run_until_killed, WORLD, config, victim, step, chance.uniform(0.0, 0.4), True)
        done = len(lines_of(runs / "stopped" / "metrics.jsonl"))
        assert step <= done < STEPS
        at = last_section(runs / "stopped" / "stacks", victim)  # the others may end by an error before they are killed
        assert at is not None and (at in (GENERATING, TRAINING_HALF)) == (victim == WORLD - 1), at
    spawn_world(run_until_killed, WORLD, config, -1, 0, 0.0, True)
    found = compare_samples(runs / "k2", runs / "stopped")
    assert (found.differing, found.samples) == ((), STEPS * 16)
    assert samples_of(runs / "k2") != samples_of(runs / "stopped"), "other tokens of the same prompts"
    assert json.loads((runs / "stopped" / "ended.json").read_text())["outcome"] == "finished"


def test_prompts_chosen_by_scores_are_drawn_in_rounds_with_and_without_staleness(task: tuple[Path, Any]) -> None:
    runs, _ = task
    for name, steps in (("scores_k0", OF_KIND["scores"]), ("scores_k2", STEPS)):
        rows = [row for row in lines_of(runs / name / "metrics.jsonl") if "rollout/rounds" in row]
        assert len(rows) == steps and max(row["rollout/rounds"] for row in rows) == 3
        assert rows[-1]["rollout/prompts_skipped"] > 0 and rows[0]["reward/no_verdict/redrawn"] == 32


def test_prompts_chosen_by_scores_are_the_same_after_a_resume_and_all_are_accounted_for(task: tuple[Path, Any]) -> None:
    """A run that failed in a further round of a step goes on with its first one, which has begun, and draws the others again."""
    runs, found = task
    failed = {one["failed by scores"] for one in found[:2]}.pop()
    assert re.fullmatch("RewardError: in step [456]", failed)
    result = compare(runs / "scores_k2", runs / "scores_resumed")
    measured = (
        "rollout/running",
        "rollout/tokens_in_flight",
        *(f"rollout/{one} of {failed[-6:]}" for one in ("requests_cut", "tokens_recomputed")),
    )
    assert [name for name in result.differing if not name.startswith(measured)] == []
    ours = samples_of(runs / "scores_k2")
    assert ours == samples_of(runs / "scores_resumed")
    logs = [(runs / name / "events" / "replica-0.log").read_bytes() for name in ("scores_k2", "scores_resumed")]
    assert logs[0] == logs[1]
    ids = [[samples[key]["id"] for key in sorted(samples) if key[0] == 4] for samples in (ours, samples_of(runs / "scores_k0"))]
    assert ids[0] != ids[1]  # scores came two steps later
    rows = lines_of(runs / "scores_k2" / "metrics.jsonl")
    assert all(0 <= row["rollout/token_age_mean"] <= row["rollout/token_age_max"] <= STALENESS for row in rows)
    ledger = json.loads((runs / "scores_k2" / "checkpoints" / f"step-{STEPS}" / "state.json").read_text())["loader"]["ledger"]
    assert ledger["left_out"]["no spread"] == sum(4 * row["rollout/prompts_replaced"] for row in rows)
    assert ledger["left_out"]["redrawn"] == sum(row.get("reward/no_verdict/redrawn", 0) for row in rows)
    assert ledger["asked"] == ledger["trained"] + sum(ledger["left_out"].values())


def test_what_does_not_fit_is_refused_in_one_line_on_every_rank(task: tuple[Path, Any]) -> None:
    _, found = task
    for one in found:
        assert re.fullmatch("ValueError: .* is of a run with policy.optimizer.lr = 0.001, not 0.002; .*", one["other"])
        assert "rollout.max_staleness = 1, and the responses of 2 steps have begun; set it to 2" in one["smaller"]


def test_a_replay_is_held_to_its_log_before_ranks_are_started(
    task: tuple[Path, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = task[0] / "k2"
    config = load_config(str(old / "config.yaml"), [])
    data: Any = plan_run(config, WORLD, "cpu", resume=True).data
    check_replay(config, data, old, WORLD)
    other = load_config(str(old / "config.yaml"), ["rollout.cache_after_push=keep"])
    with pytest.raises(ConfigError, match=f"--replay {old}: .* is of a run with rollout.cache_after_push = recompute, not keep; "):
        check_replay(other, data, old, WORLD)
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["train", str(old / "config.yaml"), "run.name=again", "--replay", str(task[0] / "gone")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"megappo: --replay {task[0] / 'gone'}: ") and "replica-0.log is no event log: " in said
    assert said.count("\n") == 1 and not (task[0] / "again").exists()


def test_a_failure_of_either_half_names_rank_and_half(task: tuple[Path, Any]) -> None:
    _, found = task
    assert re.fullmatch("HalfFailed: rank [01] of the training half failed: RewardError: in step 5", found[2]["failed"])
    assert found[2]["broken"] == "RuntimeError: out of blocks"
    assert {one["broken"] for one in found[:2]} == {"HalfFailed: rank 2 of the rollout half failed: RuntimeError: out of blocks"}
