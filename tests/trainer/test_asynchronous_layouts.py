"""Staleness 0 is the synchronous run bit for bit in other layouts of both halves: engines that span ranks, two replicas, LoRA,
FSDP2, freed gradients, a teacher, greedy responses, experts. Two of four ranks train; the synchronous run is on those two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability.compare import compare
from tests.trainer.asynchronous_runs import config_of, only_when_waited_for, pauses, run, run_synchronous
from tests.trainer.small_run import set_keys, taught, write_small_task, write_teacher
from tests.trainer.test_asynchronous import NOISE, OWN, lines_of, samples_of
from tests.trainer.test_moe_run import write_experts
from tests.worlds import spawn_world

STEPS = 2
LORA = {"rank": 4, "alpha": 8.0}
FSDP2 = {f"{role}.engine": "fsdp2" for role in ("policy", "critic", "reference")}
LAYOUTS: dict[str, dict[str, Any]] = {
    "two replicas": {
        "policy.parallel": {},
        "algorithm.estimator": "remax",
        "policy.offload": ["gradients"],
        "policy.ema": {"decay": 0.5},
        "trainer.evaluate_with": "ema",
    },
    "fsdp2, lora merged": {**FSDP2, "policy.parallel": {}, "critic.parallel": {"cp": 2}, "rollout.tp": 2, "policy.lora": LORA},
    "experts": {"policy.parallel": {"ep": 2}, "critic.parallel": {"tp": 2, "sequence_parallel": True, "ep": 2}},
    "lora apart": {"critic.parallel": {"tp": 2}, "policy.lora": LORA, "rollout.adapter": "separate", "rollout.tp": 2},
}


def name_of(layout: str, staleness: int | None) -> str:
    return layout.replace(",", "").replace(" ", "-") + ("" if staleness is None else f".halves-{staleness}")


def layout_of(folder: Path, name: str, staleness: int | None) -> dict[str, Any]:
    here = {} if staleness is None else {"run.num_ranks": 4, "rollout.ranks": "2-3"}
    changes = {"trainer.steps": STEPS, **LAYOUTS[name], **here}
    if name == "two replicas":
        changes |= taught(folder, coef=0.5) | ({} if staleness is None else {"teacher.ranks": "0-1"})
    if name == "experts":
        changes["policy.model"] = str(folder / "moe")
    config = config_of(folder, name_of(name, staleness), staleness, **changes)
    if "estimator" in config["algorithm"]:
        del config["critic"], config["algorithm"]["bootstrap_truncated"]
    if "lora" in config["policy"]:
        del config["reference"]  # the policy without its adapters
    return config


def run_all(rank: int, folder: Path) -> None:
    for seed, name in enumerate(LAYOUTS):
        run_synchronous(rank, layout_of(folder, name, None))
        with pauses(rank, seed, 0.01, 0.1):
            run(rank, layout_of(folder, name, 0))
    with only_when_waited_for():  # with a few places, so that responses of a step begin one after the other
        run(rank, set_keys(layout_of(folder, "experts", 1), {"rollout.max_num_seqs": 10}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    write_small_task(folder)
    write_teacher(folder)
    write_experts(folder)
    spawn_world(run_all, 4, folder)
    return folder / "runs"


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_staleness_it_is_the_synchronous_run_bit_for_bit(runs: Path, name: str) -> None:
    colocated, apart = (runs / name_of(name, staleness) for staleness in (None, 0))
    found = compare(colocated, apart)
    assert found.tensors > 40 and found.values > (140 if name == "two replicas" else 150)  # without those of a critic
    assert [one for one in found.differing if not one.startswith((*OWN, "state.json"))] == []
    samples = samples_of(colocated)
    assert len(samples) == STEPS * 16 and samples == samples_of(apart)


def test_experts_of_responses_that_a_push_cut_are_replayed(runs: Path) -> None:
    _, second = rows = lines_of(runs / name_of("experts", 1) / "metrics.jsonl")
    assert second["rollout/requests_cut"] > 0 and second["rollout/token_age_max"] == 1
    assert all(0 < row["policy/rerouted"] < 0.5 for row in rows), "some would go elsewhere"
    assert second["rollout/canary_prob_diff_max"] < NOISE
