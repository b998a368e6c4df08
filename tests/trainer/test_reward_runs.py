"""A run with two recipes, rewards of tokens, a pool and a server on two ranks, and its resume with other recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from benchmarks.reliability.compare import MEASURED
from tests.rewards.faulty_server import Behaviour, FaultyServer, Handler, fine, serving
from tests.trainer.small_run import run_many, small_config, write_small_task
from tests.worlds import spawn_world


class FlakyServer(FaultyServer):
    """Answers every request with 503 first, and well when it comes again."""

    def take(self, handler: Handler) -> Behaviour:
        super().take(handler)
        with self.lock:
            asked = [body for _, body in self.requests].count(handler.asked)
        return fine if asked % 2 == 0 else lambda handler: handler.answer(503, b"loading")


MINE = """
def signs(sample):
    return {"score": len(sample.response), "per_token": [0.25] * (sample.num_tokens - 1) + [0.0] if sample.num_tokens else []}
"""


def runs(rank: int, config: dict[str, Any], changed: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """What the console heard on the resume, and the processes that are left."""
    from megappo.trainer import run_facts

    warned: list[str] = []
    run_many(rank, [(one, False) for one in (config, *others)])
    with mock.patch.object(run_facts.logger, "warning", lambda text, *values: warned.append(text % values)):
        run_many(rank, [(changed, True)])
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    return {"warned": warned, "left": [command for command in commands if "worker" in command]}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("rewards")
    write_small_task(folder)
    for name in ("train", "eval"):
        file = folder / "data" / f"{name}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row | {"about": {"sign": row["prompt"][1]}}) + "\n" for row in rows))
    (folder / "mine.py").write_text(MINE)
    remote = {"name": "rm", "url": "", "weight": 0.1, "remote": {"batch_size": 1, "concurrency": 16, "retry_budget_s": 60.0}}
    own = {"path": str(folder / "mine.py"), "function": "signs", "weight": 0.5, "workers": 2}
    route = {"key": "about.sign", "map": {"+": [own, {"name": "has_eos"}], "-": [{"name": "has_eos", "weight": 2.0}, remote]}}
    changes = {"rollout.engine": "megatron", "checkpoint.save_every": 1, "telemetry.trajectories_every": 1}
    changes |= {"telemetry.trajectories_per_step": 32, "trainer.eval_every": 2, "reward": {"route": route}}
    fewer = {"key": "about.sign", "map": {"+": [{**own, "workers": 1}, {"name": "has_eos"}], "-": [{"name": "exact_match"}]}}
    changed = small_config(folder, "routed", steps=3, **(changes | {"reward": {"route": fewer}}))
    alone = {"key": "about.sign", "map": {"+": route["map"]["+"], "-": route["map"]["-"][:1]}}
    inside = {"key": "about.sign", "map": {"+": [{**own, "workers": 0}, {"name": "has_eos"}], "-": route["map"]["-"][:1]}}
    others = [
        small_config(folder, name, steps=2, **(changes | {"reward": {"route": one}}))
        for name, one in (("early", alone), ("late", inside))
    ]
    with serving(make=FlakyServer) as server:
        remote["url"] = server.url
        config = small_config(folder, "routed", steps=2, **changes)
        return folder / "runs" / "routed", spawn_world(runs, 2, config, changed, others)


def test_each_recipe_and_part_is_logged_for_the_responses_that_it_scored(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    metrics = [json.loads(line) for line in (ran[0] / "metrics.jsonl").read_text().splitlines()]
    for step in (1, 2, 3):
        [logged] = [line for line in metrics if line["step"] == step and "reward/score_mean" in line]
        rows = [json.loads(line) for line in (ran[0] / "trajectories" / f"step_{step:06d}.jsonl").read_text().splitlines()]
        groups = {sign: [row for row in rows if row["prompt"][1] == sign] for sign in "+-"}
        for sign, group in groups.items():
            assert logged[f"reward/route/{sign}/count"] == len(group) > 0
            assert logged[f"reward/route/{sign}/mean"] == pytest.approx(mean(row["score"] for row in group), abs=1e-6)
        plus = [row["parts"]["mine.signs"] for row in groups["+"]]
        assert None not in plus and logged["reward/mine.signs"] == pytest.approx(mean(plus), abs=1e-6)
        assert not any("mine.signs" in row["parts"] for row in groups["-"])
        assert logged["timing/reward/mine.signs/max_s"] >= logged["timing/reward/mine.signs/mean_s"] > 0
        assert ("reward/exact_match" in logged) == (step == 3)
    [evaluated] = [line for line in metrics if line["step"] == 2]
    assert "eval/mine.signs" in evaluated and "eval/has_eos" in evaluated


def test_rewards_beside_generation_change_no_bit_of_a_run(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    """Against the run whose rewards are computed in the ranks, after generation. Only that one has nothing of generation's time."""
    early, late = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (ran[0].with_name("early"), ran[0].with_name("late"))
    )
    logged = [row for row in early if "reward/score_mean" in row]
    for one, other in zip(logged, [row for row in late if "reward/score_mean" in row], strict=True):
        assert one.pop("timing/reward/during_generation_s") > 0
        assert one.keys() == other.keys()
        compared = {name for name in one if not name.startswith((*MEASURED, "time"))}
        assert {"reward/mine.signs", "policy/loss", "critic/loss"} <= compared
        assert {name: one[name] for name in compared} == {name: other[name] for name in compared}
    for step in (1, 2):
        file = Path("trajectories") / f"step_{step:06d}.jsonl"
        assert (ran[0].with_name("early") / file).read_bytes() == (ran[0].with_name("late") / file).read_bytes()


def test_requests_that_were_sent_again_are_counted_over_ranks_and_by_step(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    """Every response that the server scores is a request of its own, which it answers the second time. So are those of the
    evaluations, which no step counts."""
    metrics = [json.loads(line) for line in (ran[0] / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in metrics if "reward/score_mean" in line}
    assert all(steps[step]["reward/rm/retries"] == steps[step]["reward/route/-/count"] > 0 for step in (1, 2))
    assert "reward/rm/retries" not in steps[3], "the resumed run has no server"


def test_rewards_of_tokens_are_in_the_reward_of_their_tokens(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    """Of the first step: the policy is the reference, so there is no KL."""
    for row in map(json.loads, (ran[0] / "trajectories" / "step_000001.jsonl").read_text().splitlines()):
        inner = 0.125 if row["prompt"][1] == "+" else 0.0
        want = [inner] * (len(row["reward"]) - 1) + [row["score"]]
        assert row["reward"] == pytest.approx(want, abs=1e-6)


def test_other_recipes_are_told_on_resume_and_other_workers_are_not(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in ran[1]:
        assert rank["left"] == [], "the workers end with the run"
    assert ran[1][0]["warned"] == ["reward.route changed since step-2: scores are not comparable"]


def mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def test_a_limit_of_time_is_a_fact_of_the_reward_and_workers_are_not() -> None:
    from megappo.config.reward_sections import RewardPart
    from megappo.trainer.run_facts import _part_facts

    def facts(**keys: Any) -> dict[str, Any]:
        return _part_facts(RewardPart(**{"path": "mine.py", "function": "f", "workers": 2, "timeout_s": 1.0, **keys}))

    assert facts() == facts(workers=3) == {"name": "mine.f", "weight": 1.0, "function": "f", "timeout_s": 1.0}
    assert facts() != facts(timeout_s=2.0)
