"""A run that is stopped and resumed ends with the same bits as one that was not: policy tp=2, critic pp=2, adaptive KL, real
vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.reliability.compare import MEASURED
from tests.listening import WILDCARDS, Listener, Watch
from tests.trainer.small_run import run_many, small_config, write_small_task
from tests.worlds import spawn_world

STEPS, HALF = 12, 6
# Wall time, and what depends on it, is not part of the state.
VOLATILE = (*MEASURED, "rollout/push_verified", "step")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_small_task(folder)
    whole = small_config(folder, "whole", steps=STEPS)
    first_half = small_config(folder, "halves", steps=HALF)
    both_halves = small_config(folder, "halves", steps=STEPS)
    other = small_config(folder, "other_seed", steps=HALF, **{"run.seed": 5})
    with Watch() as watch:
        spawn_world(run_many, 2, [(whole, False), (first_half, False), (both_halves, True), (other, False)], timeout_s=500)
    (folder / "listeners.json").write_text(json.dumps(sorted(watch.seen)))
    return folder


def metrics(folder: Path, name: str) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k == "step" or not k.startswith(VOLATILE)} for row in rows]


def test_metrics_of_every_step_are_equal_to_the_last_bit(runs: Path) -> None:
    whole, halves = metrics(runs, "whole"), metrics(runs, "halves")
    assert [row["step"] for row in halves] == [row["step"] for row in whole]
    for mine, other in zip(halves, whole):
        assert mine == other


def test_weights_optimizer_state_and_components_are_equal_to_the_last_bit(runs: Path) -> None:
    whole, halves = (runs / "runs" / name / "checkpoints" / f"step-{STEPS}" for name in ("whole", "halves"))
    assert json.loads((whole / "state.json").read_text()) == json.loads((halves / "state.json").read_text())
    shards = sorted(p.relative_to(whole) for p in whole.rglob("*.distcp"))
    assert shards and shards == sorted(p.relative_to(halves) for p in halves.rglob("*.distcp"))
    for name in (*shards, "rng-00000.safetensors", "rng-00001.safetensors"):
        assert (whole / name).read_bytes() == (halves / name).read_bytes(), name
    exports = [(runs / "runs" / name / "export" / "model.safetensors") for name in ("whole", "halves")]
    assert exports[0].read_bytes() == exports[1].read_bytes()


def test_nothing_listens_on_all_interfaces(runs: Path) -> None:
    """Ranks, vLLM's engines in them and their helpers; this world has no rendezvous by TCP."""
    seen = [Listener(*listener) for listener in json.loads((runs / "listeners.json").read_text())]
    assert seen and not [listener for listener in seen if listener.address in WILDCARDS]


def test_the_replaced_export_is_kept(runs: Path) -> None:
    assert (runs / "runs" / "halves" / "export.old1" / "model.safetensors").is_file()


def test_another_seed_gives_other_numbers(runs: Path) -> None:
    """Negative control: the comparison above would notice."""
    assert metrics(runs, "other_seed")[1:HALF] != metrics(runs, "whole")[1:HALF]
