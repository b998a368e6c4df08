"""A run that is stopped and resumed ends with the same bits as one that was not: policy tp=2, critic pp=2, adaptive KL, real
vLLM.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.reliability.compare import MEASURED
from megappo.telemetry.metrics import MODEL_STAGES, STAGES, metric_names, open_beginnings
from tests.listening import WILDCARDS, Listener, Watch
from tests.trainer.small_run import run_many, small_config, write_small_task
from tests.worlds import spawn_world

STEPS, HALF = 4, 2
EVALUATED = {"trainer.eval_every": HALF}  # as the last step of the first half is
# Wall time, and what depends on it, is not part of the state.
VOLATILE = (*MEASURED, "rollout/push_verified", "step")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_small_task(folder)
    # A profile changes nothing of what is compared below.
    whole = small_config(folder, "whole", steps=STEPS, **{**EVALUATED, "telemetry.profile_steps": [2]})
    first_half = small_config(folder, "halves", steps=HALF, **EVALUATED)
    both_halves = small_config(folder, "halves", steps=STEPS, **EVALUATED)
    other = small_config(folder, "other_seed", steps=HALF, **{**EVALUATED, "run.seed": 5})
    with Watch() as watch:
        spawn_world(run_many, 2, [(whole, False), (first_half, False), (both_halves, True), (other, False)])
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
    shards = sorted(p.relative_to(whole) for p in whole.rglob("models/*/*.safetensors"))
    assert shards and shards == sorted(p.relative_to(halves) for p in halves.rglob("models/*/*.safetensors"))
    for name in (*shards, "rng-00000.safetensors", "rng-00001.safetensors"):
        assert (whole / name).read_bytes() == (halves / name).read_bytes(), name
    exports = [(runs / "runs" / name / "export" / "model.safetensors") for name in ("whole", "halves")]
    assert exports[0].read_bytes() == exports[1].read_bytes()


def test_nothing_listens_on_all_interfaces(runs: Path) -> None:
    """Ranks, vLLM's engines in them, their helpers, and the store of the ranks, as of `megappo train`."""
    seen = [Listener(*listener) for listener in json.loads((runs / "listeners.json").read_text())]
    assert seen and not [listener for listener in seen if listener.address in WILDCARDS]


def test_the_replaced_export_is_kept(runs: Path) -> None:
    assert (runs / "runs" / "halves" / "export.old1" / "model.safetensors").is_file()


def test_a_profiled_step_has_a_trace_of_every_rank_that_names_the_stages(runs: Path) -> None:
    folder = runs / "runs" / "whole" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [f"step_000002_rank_0000{rank}.json.gz" for rank in range(2)]
    for path in folder.iterdir():
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        named = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        assert {f"stage {stage}" for stage in STAGES if stage not in ("evaluate", "check_replicas")} <= named, "those of every step"
        stage = next(event for event in events if event["name"] == "stage update_policy")
        inside = [e for e in events if e.get("cat") == "cpu_op" and stage["ts"] <= e["ts"] <= stage["ts"] + stage["dur"]]
        assert len(inside) > 100, "the operations of the stage lie in its range"


def test_statistics_of_a_run_are_logged_under_names_that_a_configuration_may_show(runs: Path) -> None:
    rows = [json.loads(line) for line in (runs / "runs" / "whole" / "metrics.jsonl").read_text().splitlines()]
    names = metric_names(["exact_match", "has_eos"], ["policy", "critic", "reference"])
    beginnings = open_beginnings([])
    logged = {name for row in rows for name in row if not name.startswith(beginnings)}
    assert logged - {"step", "time"} <= set(names)
    last = rows[-1]
    assert last["perf/work_tflop/update_policy/policy"] == pytest.approx(3 * last["perf/work_tflop/logprobs/policy"])
    assert 0 < last["perf/tflops/step"] < max(last[f"perf/tflops/{stage}"] for stage in MODEL_STAGES)
    # Its ranks are forked from the tests' server, whose pages are theirs too.
    assert 0 < last["memory/update_policy_peak_gib"] <= last["memory/host_peak_gib"] < 16


def test_another_seed_gives_other_numbers(runs: Path) -> None:
    """Negative control: the comparison above would notice."""
    assert metrics(runs, "other_seed")[1:HALF] != metrics(runs, "whole")[1:HALF]
