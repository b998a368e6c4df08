"""The chaos script: a short run under faults ends as one without them, and a difference would be noticed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from benchmarks import chaos
from benchmarks.reliability import live
from benchmarks.reliability.compare import compare
from benchmarks.reliability.faults import KINDS
from benchmarks.reliability.live import Row
from benchmarks.reliability.soak import draw, productive_s, wall_s
from tests.forked_commands import start_command
from tests.trainer.small_run import run_many, small_config, write_small_task
from tests.worlds import spawn_world

STEPS = 14  # the fewest for two faults
FAULTS = ["late", "corrupt"]  # a flipped bit is followed by a kill
KEYS = {
    "rollout.engine": "megatron",  # starts in a second
    "telemetry.trackers": [],
    "telemetry.trajectories_every": 0,
    "checkpoint.save_every": 2,
    "checkpoint.export_at_end": False,
}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """small.yaml, and its clean run in runs/clean."""
    folder = tmp_path_factory.mktemp("chaos")
    write_small_task(folder)
    config = small_config(folder, "clean", steps=STEPS, **KEYS)
    # Without effect, and refused.
    del config["telemetry"]["trajectories_per_step"], config["data"]["eval"], config["trainer"]["eval_every"]
    spawn_world(run_many, 2, [(config, False)])
    config["run"]["name"] = "small"
    (folder / "small.yaml").write_text(yaml.safe_dump(config))
    return folder


class Forked:
    """In place of the `Popen` of `megappo train`: the command in a fork, whose ranks are forks of a child of it."""

    def __init__(self, command: list[str], *, env: dict[str, str], **_: object) -> None:
        assert command[:3] == [sys.executable, "-m", "megappo"]
        with tempfile.TemporaryDirectory() as folder:
            pipe = f"{folder}/said"
            os.mkfifo(pipe)
            self._process = start_command(*command[3:], output=pipe, errors=pipe, environment=env)
            self.stdout = open(pipe, errors="replace")
        self.pid, self.kill, self.wait = self._process.pid, self._process.kill, self._process.join

    def poll(self) -> int | None:
        return self._process.exitcode


def test_a_run_under_faults_ends_with_the_bits_of_a_clean_one(task, capfd, monkeypatch):
    monkeypatch.setattr(live, "subprocess", SimpleNamespace(Popen=Forked, DEVNULL=None, PIPE=None, STDOUT=None))
    arguments = [str(task / "small.yaml"), "--faults", str(len(FAULTS)), "--kinds", ",".join(FAULTS), "--seed", "3"]
    code = chaos.main([*arguments, "--clean", str(task / "runs" / "clean")])
    said = capfd.readouterr().out
    assert code == 0, said
    assert f"survived: {len(FAULTS)} of {len(FAULTS)}; the command ended with exit code 0" in said
    assert "end equal bit for bit: yes (" in said and "effective training time: " in said
    rows = [line.split() for line in said.splitlines() if line.rstrip().endswith(("restarted", "went on"))]
    assert sorted(row[-1] for row in rows) == ["on", "restarted"]
    assert any((task / "runs" / "small-chaos" / "checkpoints").glob("bad-step-*")), "the corrupted one was found"


@pytest.fixture
def copied(task, tmp_path) -> Path:
    return Path(shutil.copytree(task / "runs" / "clean", tmp_path / "copy"))


def test_a_run_equals_its_copy(task, copied):
    found = compare(task / "runs" / "clean", copied)
    assert found.differing == () and found.step == STEPS and found.values > 20 * STEPS
    assert found.tensors > 100, "weights and both moments of policy and critic"


def test_a_tensor_that_differs_by_its_last_bit_is_named(task, copied):
    path = next((copied / "checkpoints" / f"step-{STEPS}" / "models" / "critic").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")  # of the values, behind the header
    header = json.loads(data[8:start])
    name = next(name for name in header if "exp_avg_sq" in name)
    data[start + header[name]["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    assert compare(task / "runs" / "clean", copied).differing == (f"critic {name}",)


def test_a_metric_that_differs_and_a_step_that_is_missing_are_named(task, copied):
    path = copied / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[4]["critic/loss"] += 1e-12
    rows[5]["timing/step_s"] += 1.0  # of the machine
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    differing = compare(task / "runs" / "clean", copied).differing
    assert "critic/loss of step 5 (line 5)" in differing and f"critic/loss of step {STEPS} (line {STEPS})" in differing
    assert not any("step 6 " in name for name in differing)


def test_random_states_of_every_rank_are_compared(task, copied):
    path = copied / "checkpoints" / f"step-{STEPS}" / "rng-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert compare(task / "runs" / "clean", copied).differing == ("rng-00001.safetensors",)


def test_the_list_of_faults_is_that_of_the_seed():
    lists = [draw(list(KINDS), 20, seed, steps=100, save_every=2, ranks=2, training_ranks=2) for seed in (0, 0, 1)]
    assert lists[0] == lists[1] != lists[2]
    assert sorted(one.kind for one in lists[0][: len(KINDS)]) == sorted(KINDS), "every kind once before any comes again"
    steps = [one.step for one in lists[0]]
    assert all(later - step >= 3 for step, later in zip(steps, steps[1:])), "a checkpoint lies between two faults"
    assert steps[-1] <= 100 - 2 * 2 - 2, "the last one is undone or over before the last checkpoint"
    apart = draw(list(KINDS), 30, 0, steps=200, save_every=2, ranks=3, training_ranks=2)
    assert {one.rank for one in apart} == {0, 1, 2}
    assert all(one.rank < 2 for one in apart if one.kind in ("nan", "slow")), "a rank that only generates has no gradients"


def test_the_effective_time_leaves_out_repeated_steps_and_the_way_back():
    clean = [Row(step, 10.0 * step, 8.0, 0.0) for step in range(1, 6)]
    assert wall_s(clean) == productive_s(clean) == 48.0, "what lies between steps, saves for example, counts"
    # After step 4 a fault: back to step 2, whose successor ends at 75.
    restarted = [*clean[:4], Row(3, 75.0, 8.0, 0.0), Row(4, 85.0, 8.0, 0.0), Row(5, 95.0, 8.0, 0.0)]
    assert wall_s(restarted) == 93.0
    assert productive_s(restarted) == 8 + 10 + 8 + 10 + 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--faults", "0"], "argument --faults: 0 is not an integer >= 1"),
        (["--faults", "6"], "6 faults need at least 26 steps with checkpoint.save_every = 2"),
        (["--kinds", "kill,flood"], "flood is no fault; there are kill, stop"),
        (["--kinds", "full", "--ranks", "1"], "full needs two ranks"),
        (["--kinds", "nan", "checkpoint.save_every=1", "--faults", "1"], "nan needs checkpoint.save_every >= 2"),
        (["checkpoint.save_every=0"], "faults are counted in saves"),
        (
            ["rollout.engine=vllm", "rollout.ranks=2", "rollout.max_staleness=1", "algorithm.importance_sampling=none", "--ranks=3"]
            + [f"{role}.ranks=0-1" for role in ("policy", "critic", "reference")],
            "set telemetry.trajectories_every=1 telemetry.trajectories_per_step=32",
        ),
        (["trainer.steps=null", "trainer.epochs=1"], "trainer.steps = null"),
        (["trainer.stepss=1"], "unknown key; did you mean trainer.steps?"),
        (["run.name=other", "--clean", "absent"], f"the clean run absent did not come to step {STEPS}"),
        (["run.name=clean", "--clean", "absent", "--crash"], "unrecognized arguments: --crash"),
    ],
)
def test_wrong_arguments_are_one_line(task, capsys, changes, said):
    assert chaos.main([str(task / "small.yaml"), "--faults", "2", *changes]) == 2
    error = capsys.readouterr().err
    assert error.startswith("chaos: ") and error.count("\n") == 1 and said in error
