"""PPO with roles on ranks of their own: the numbers of a run that has every role on every rank, and roles that do not wait."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.trainer.small_run import run_many, small_config, write_small_task
from tests.worlds import spawn_world

STEPS, WORLD = 3, 4
COLOCATED = {
    "policy.parallel": {"tp": 2},
    "critic.parallel": {"pp": 2},
    "reference.parallel": {"tp": 2},
    "rollout.tp": 2,
    "rollout.kv_cache_gib": 0.03,
}
RUNS: dict[str, dict[str, Any]] = {
    "colocated": {},
    "critic apart": {"policy.ranks": "0-1", "reference.ranks": "0-1", "rollout.ranks": "0-1", "critic.ranks": "2-3"},
    "rollout apart": {"policy.ranks": "0-1", "reference.ranks": "0-1", "critic.ranks": "0-1", "rollout.ranks": "2-3"},
    "overlapping": {"policy.ranks": "1-2", "reference.ranks": "0,3", "critic.ranks": "2-3", "rollout.ranks": "0,2"},
}
# Rewards, losses and KL of the same tokens, added up in another order.
NAMES = (
    "reward/score_mean",
    "policy/loss",
    "policy/grad_norm",
    "policy/entropy",
    "critic/loss",
    "critic/grad_norm",
    "critic/value_mean",
    "kl/per_token",
    "kl/coef",
    "lengths/response_mean",
    "rollout/prob_diff_mean",
)
PAUSE_S = 3.0


def config_of(folder: Path, name: str, *, steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    changes = {"run.num_ranks": WORLD, "telemetry.trajectories_per_step": 32, **COLOCATED, **RUNS[name], **changes}
    return small_config(folder, name.replace(" ", "-"), steps=steps, **changes)


def run_all(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in RUNS:
        run_many(rank, [(config_of(folder, name), False)])
    # A checkpoint of one placement, resumed on another and with everything everywhere.
    moved = config_of(folder, "critic apart", steps=STEPS + 1)
    run_many(rank, [(moved | {"critic": {**moved["critic"], "ranks": "all"}}, True)])
    found["times"] = update_times(rank, folder)
    return found


def update_times(rank: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Role -> (begin, end) of its updates on this rank in a step; every update of the critic takes PAUSE_S."""
    from megappo.trainer import updates
    from megappo.trainer.roles import Critic

    times: dict[str, tuple[float, float]] = {}
    plain_run, plain_update = updates.run_updates, Critic.update

    def timed(role: Any, minis: Any) -> Any:
        begin = time.monotonic()
        summary = plain_run(role, minis)
        times[role.engine.name] = (begin, time.monotonic())
        return summary

    def slow(self: Critic, *arguments: Any) -> Any:
        time.sleep(PAUSE_S)
        return plain_update(self, *arguments)

    updates.run_updates, Critic.update = timed, slow  # type: ignore[method-assign]
    try:
        config = config_of(folder, "critic apart", steps=1)
        config["run"]["name"] = "timed"
        run_many(rank, [(config, False)])
    finally:
        updates.run_updates, Critic.update = plain_run, plain_update  # type: ignore[method-assign]
    dist.barrier()
    return times


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("placed")
    write_small_task(folder)
    return folder, spawn_world(run_all, WORLD, folder, timeout_s=400)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name.replace(" ", "-") / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "critic/loss" in row]


def responses(folder: Path, name: str) -> list[list[int]]:
    files = sorted((folder / "runs" / name.replace(" ", "-") / "trajectories").glob("*.jsonl"))
    return [json.loads(line)["response_tokens"] for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("name", [name for name in RUNS if name != "colocated"])
def test_placement_changes_no_number(task: tuple[Path, list], name: str) -> None:
    folder, _ = task
    ours, theirs = rows(folder, name)[:STEPS], rows(folder, "colocated")
    assert len(ours) == len(theirs) == STEPS
    for one, other in zip(ours, theirs):
        assert {key: one[key] for key in NAMES} == pytest.approx({key: other[key] for key in NAMES}, rel=1e-4, abs=1e-5)
    assert responses(folder, name)[:32] == responses(folder, "colocated")[:32] and len(responses(folder, name)) >= 32
    assert rows(folder, name)[0]["policy/updates"] == 2 and rows(folder, name)[0]["policy/grad_norm"] > 1e-3


def test_a_run_goes_on_in_another_placement(task: tuple[Path, list]) -> None:
    folder, _ = task
    assert [row["step"] for row in rows(folder, "critic apart")] == [1, 2, 3, 4]


def test_critic_and_policy_update_at_the_same_time(task: tuple[Path, list]) -> None:
    """The policy's updates end while the critic's first one still sleeps: neither waits for the other."""
    _, ranks = task
    assert [sorted(rank["times"]) for rank in ranks] == [["policy"], ["policy"], ["critic"], ["critic"]]
    for policy in (ranks[0]["times"]["policy"], ranks[1]["times"]["policy"]):
        for critic in (ranks[2]["times"]["critic"], ranks[3]["times"]["critic"]):
            assert critic[1] - critic[0] > PAUSE_S
            assert policy[1] < critic[0] + PAUSE_S, "they overlap"
    first = rows(task[0], "timed")[0]
    assert first["timing/update_critic_s"] > 2 * PAUSE_S > first["timing/update_policy_s"], "the log has the longest of any rank"
