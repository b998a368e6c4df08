"""The launcher's world of an asynchronous run goes on when replicas of the sampler lose one of their two ranks, real vLLM, and with
one of them again: the same samples, each once, and a log that names the losses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megappo.commands.launch.local import WorldEnd
from megappo.data.loader import PromptLoader
from megappo.runtime.failure import SPARE_RANKS, end_of_lost
from tests.trainer.asynchronous_runs import write_task
from tests.trainer.lost_replicas import BACK, MID_PUSH, MID_STEP, STALE, WORLD, run_here
from tests.trainer.test_asynchronous import NOISE, lines_of, samples_of

LAST, NEXT = (WORLD - 2, WORLD - 1), (WORLD - 4, WORLD - 3)  # ranks of replicas 2, which comes back, and 1
STEPS = 8


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WorldEnd]:
    folder = tmp_path_factory.mktemp("lost")
    write_task(folder)
    faults = [f"{LAST[1]},2,{MID_STEP}", f"{NEXT[0]},4,{MID_PUSH}", *(f"{rank},{STEPS - 1},{STALE}" for rank in LAST)]
    return folder, run_here(folder, "lost", *faults, rejoins=1, **dict[str, Any]({"trainer.steps": STEPS}))


def test_a_run_goes_on_without_two_of_three_replicas_and_then_with_one_of_them(task: tuple[Path, Any]) -> None:
    """The second rank of one is killed with responses half drawn, the first of another in the exchange of a push."""
    folder, end = task
    assert (end.code, end.failure) == (0, None)
    ends = [[end_of_lost(folder / "lost.evidence", rank) for rank in ranks] for ranks in (LAST, NEXT)]
    assert ends == [[None] * 2, ["killed by SIGKILL"] * 2], "the other rank of a replica ends too"
    rows = lines_of(folder / "runs" / "lost" / "metrics.jsonl")
    live = [row["rollout/replicas"] for row in rows]
    assert live[:2] == [3, 3] and live[2] in (2, 3) and live[3:] == [2, 1, 2, 2, 2]  # the second step after the push may be done
    assert max(row["rollout/token_age_max"] for row in rows) == 2
    log = (folder / "runs" / "lost" / "events" / "replica-0.log").read_text()
    assert re.findall(r"^l \d+ (\d) \[(\d),", log, re.MULTILINE) == [("2", "2"), ("1", "3")], "the push of 4 did not count"
    assert re.findall(r"^j \d+ (\d) \[(\d),", log, re.MULTILINE) == [("2", str(BACK - 1))]
    _, back = (folder / "runs" / "lost" / "events" / "replica-2.log").read_text().split("\nx 0 0\n")
    assert re.search(r"^a \d+ 8\.", back, re.MULTILINE), "it draws for later steps"
    assert not (folder / "lost.evidence" / SPARE_RANKS).exists()


def test_adapters_that_a_replica_has_not_taken_are_seen_once_it_is_back(task: tuple[Path, Any]) -> None:
    """By the canary: it had those of its return, and then not those of the last push."""
    *right, stale = [row["rollout/canary_prob_diff_max"] for row in lines_of(task[0] / "runs" / "lost" / "metrics.jsonl")[1:]]
    assert len(right) == STEPS - 2 and max(right) < NOISE < stale / 10


def test_every_sample_is_trained_on_once_in_the_order_of_the_data(task: tuple[Path, Any]) -> None:
    folder, _ = task
    loader, found = PromptLoader(60, 8, shuffle=True, seed=1), samples_of(folder / "runs" / "lost")
    rows = {step: loader.next_step() for step in range(1, STEPS + 1)}
    wanted = {(step, sample): rows[step][sample // 2] for step in rows for sample in range(16)}
    assert {key: int(row["id"].rpartition("#")[2]) for key, row in found.items()} == wanted
    ledger = json.loads((folder / "runs" / "lost" / "checkpoints" / f"step-{STEPS}" / "state.json").read_text())["loader"]["ledger"]
    assert (ledger["asked"], ledger["trained"], sum(ledger["left_out"].values())) == (128, 128, 0)
