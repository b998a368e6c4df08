"""A launcher that is killed takes its ranks along, the run can be resumed at once, and it ends with the bits of one that was not
killed. The files of both runs have the modes of `run.permissions`.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from benchmarks.reliability.compare import MEASURED
from tests.forked_commands import run_command
from tests.trainer.small_run import run_many, small_config, write_small_task
from tests.worlds import spawn_world

KEYS = {"rollout.engine": "megatron", "checkpoint.save_every": 1, "checkpoint.keep_last": 50, "data.eval": None}
WHOLE, AT_LEAST, MORE, ENDLESS = 8, 1, 2, 1000  # steps
GONE_S = 2.0
LONGEST_S = 400  # of a start that takes 20 s, while other tests use all cores
VOLATILE = (*MEASURED, "rollout/push_verified")


@dataclass
class Runs:
    """folder: of both runs. gone_s: from the launcher's end to that of its last rank. step: last one of the resumed run."""

    folder: Path
    gone_s: float
    in_use: str
    step: int

    def checkpoint(self, name: str) -> Path:
        return self.folder / name / "checkpoints" / f"step-{self.step}"

    def metrics(self, name: str) -> list[dict]:
        rows = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in rows][: self.step]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    place = tmp_path_factory.mktemp("launcher")
    write_small_task(place)
    private = {**KEYS, "run.permissions": "private"}
    spawn_world(run_many, 2, [(config_of(place, "whole", WHOLE, **KEYS), False)])
    gone_s, in_use = start_and_kill(place, config_of(place, "killed", ENDLESS, **private))
    saved = (int(path.name.removeprefix("step-")) for path in (place / "runs/killed/checkpoints").glob("step-*"))
    step = max(saved) + MORE
    assert step <= WHOLE
    spawn_world(run_many, 2, [(config_of(place, "killed", step, **private), True)])
    return Runs(place / "runs", gone_s, in_use, step)


def config_of(place: Path, name: str, steps: int, **overrides) -> dict:
    """Without an evaluation, which the last step of a run makes and the same step of a longer one does not."""
    config = small_config(place, name, steps=steps, **overrides)
    del config["trainer"]["eval_every"]
    return config


def start_and_kill(place: Path, config: dict) -> tuple[float, str]:
    """Seconds that the ranks outlived the launcher, and what a second launcher said while the first one ran."""
    path = place / "killed.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "megappo", "train", str(path)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    log = (place / "killed.log").open("w")
    launcher = subprocess.Popen(command, env=environment | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
    try:
        newest = place / "runs/killed/checkpoints" / f"step-{AT_LEAST}"
        wait_until(lambda: newest.is_dir() or launcher.poll() is not None, LONGEST_S)
        ranks = psutil.Process(launcher.pid).children(recursive=True)  # and helpers, if any
        assert len(ranks) >= 2, (place / "killed.log").read_text()
        for rank in ranks:
            rank.suspend()  # or they would make many steps meanwhile
        # A fork asks at once. A new interpreter may import for longer than the first launcher waits for a rank's sign of life.
        second = run_command(*command[3:], "--resume", cwd=place)
        assert second.returncode == 2, second.stderr
        for rank in ranks:
            rank.resume()
        os.kill(launcher.pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: not any(lives(rank) for rank in ranks), 30)
        return time.monotonic() - killed, second.stderr
    finally:
        launcher.kill()
        launcher.wait()


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def modes(folder: Path) -> dict[int, list[str]]:
    """Permission bits -> paths that have them."""
    found: dict[int, list[str]] = {}
    for path in (folder, *folder.rglob("*")):
        found.setdefault(stat.S_IMODE(path.stat().st_mode), []).append(str(path.relative_to(folder)))
    return found


def test_the_ranks_end_with_their_launcher(runs: Runs) -> None:
    assert runs.gone_s < GONE_S


def test_a_second_launcher_was_refused_in_one_line(runs: Runs) -> None:
    assert runs.in_use.count("\n") == 1 and "is in use by `megappo train" in runs.in_use


def test_the_resumed_run_has_the_numbers_of_one_that_was_not_killed(runs: Runs) -> None:
    whole, killed = runs.metrics("whole"), runs.metrics("killed")
    assert [row["step"] for row in killed] == list(range(1, runs.step + 1))
    assert killed == whole


def test_the_resumed_run_has_the_weights_of_one_that_was_not_killed(runs: Runs) -> None:
    whole, killed = runs.checkpoint("whole"), runs.checkpoint("killed")
    shards = sorted(path.relative_to(whole) for path in whole.rglob("models/*/*.safetensors"))
    assert shards and all((whole / shard).read_bytes() == (killed / shard).read_bytes() for shard in shards)
    assert json.loads((whole / "state.json").read_text()) == json.loads((killed / "state.json").read_text())


def test_nothing_is_left_of_the_lease(runs: Runs) -> None:
    assert not [path for name in ("whole", "killed") for path in (runs.folder / name).glob("*lease*")]


@pytest.mark.parametrize(("name", "files", "folders"), [("whole", 0o640, 0o750), ("killed", 0o600, 0o700)])
def test_all_files_of_a_run_have_the_mode_of_its_permissions(runs: Runs, name: str, files: int, folders: int) -> None:
    found = modes(runs.folder / name)
    assert set(found) == {files, folders}, {oct(mode): paths[:5] for mode, paths in found.items()}
    assert any(path.startswith("export/model") for path in found[files])
    assert any("rng-00001" in path for path in found[files]) and any("tensorboard" in path for path in found[files])
