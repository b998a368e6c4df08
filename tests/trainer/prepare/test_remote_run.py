"""`--resume` of a run that is elsewhere: its newest valid copy comes back whole, and what is damaged there is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import MANIFEST
from megappo.checkpoint.remote import copy_checkpoint, url_of_run
from megappo.commands import cli
from megappo.commands.launch.attempt import main as attempt
from megappo.commands.runs.report import verify_checkpoint
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.config.run_directory import check_run_dir
from megappo.config.schema import TrainConfig
from megappo.trainer.prepare.remote_run import fetch, find_copies
from tests.commands.plan.checkpoints import write_run
from tests.commands.runs.folders import save


@pytest.fixture(params=["file", "memory"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> TrainConfig:
    """A run that is not here, with copies of steps 5 and 10 in a storage."""
    remote = f"file://{tmp_path}/elsewhere" if request.param == "file" else f"memory://{tmp_path.name}/elsewhere"
    made = load_config(write_run(tmp_path), [f"checkpoint.remote={remote}", f"run.output_dir={tmp_path / 'runs'}", "run.name=far"])
    for step in (5, 10):
        copy_checkpoint(save(tmp_path / "there", step), url_of_run(remote, "far"))
    return made


def run_dir_of(config: TrainConfig) -> Path:
    return Path(config.run.output_dir) / "far"


def fetched(config: TrainConfig) -> int:
    copies = find_copies(config, resume=True)
    assert copies is not None
    return fetch(copies, run_dir_of(config))


def damage(config: TrainConfig, name: str, content: bytes | None) -> None:
    storage, root = fsspec.core.url_to_fs(url_of_run(str(config.checkpoint.remote), "far"))
    if content is None:
        storage.rm_file(f"{root}/{name}")
    else:
        storage.pipe_file(f"{root}/{name}", content)


def test_the_newest_copy_comes_back_whole(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetched(config) == 10
    said, run_dir = capsys.readouterr().err, run_dir_of(config)
    assert said.startswith("megappo: fetched step-10 of ") and said.count("\n") == 1
    assert verify_checkpoint(run_dir, 10).state == "ok" and CheckpointDirectory(run_dir / "checkpoints").steps() == [10]
    assert check_run_dir(config.run, resume=True) == run_dir
    assert find_copies(config, resume=True) is None, "what is here is gone on from, whatever is elsewhere"
    assert not [path for path in run_dir.parent.iterdir() if path != run_dir] and not list(run_dir.glob("*lease*"))


def test_nothing_is_asked_without_a_resume_or_a_storage(config: TrainConfig, tmp_path: Path) -> None:
    assert find_copies(config, resume=False) is None
    assert find_copies(config.model_copy(update={"checkpoint": type(config.checkpoint)()}), resume=True) is None


SHARD = "step-10/models/policy/00000.safetensors"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (SHARD, b"x", "has 1 bytes instead of"),
        (SHARD, b"models/policy/00000.safetensors of 11" * 100, "does not match its BLAKE3 hash"),
        (SHARD, None, "models/policy/00000.safetensors is missing"),
        (f"step-10/{MANIFEST}", b"{", "is not JSON"),
    ],
)
def test_a_damaged_copy_is_told_and_the_older_one_is_taken(
    config: TrainConfig, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, says: str
) -> None:
    damage(config, name, content)
    assert fetched(config) == 5
    first, second = capsys.readouterr().err.splitlines()
    assert "/far/step-10 is damaged (" in first and says in first and second.startswith("megappo: fetched step-5 of ")
    assert CheckpointDirectory(run_dir_of(config) / "checkpoints").steps() == [5]


def test_copies_that_cannot_be_resumed_leave_nothing_here(config: TrainConfig, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "there")
    copy_checkpoint(save(tmp_path / "there", 12, weights_only=True), url_of_run(str(config.checkpoint.remote), "far"))
    with pytest.raises(ConfigError, match="step-12 there holds weights only"):
        fetched(config)
    damage(config, f"step-12/{MANIFEST}", None)
    for step in (5, 10):
        damage(config, f"step-{step}/state.json", None)
    with pytest.raises(ConfigError, match="none of the 2 copies in .*/far is valid"):
        fetched(config)
    assert check_run_dir(config.run, resume=False), "the name is free still"
    with pytest.raises(ConfigError, match="/near holds no copy of a checkpoint, and .*/near no run to resume"):
        find_copies(config.model_copy(update={"run": config.run.model_copy(update={"name": "near"})}), resume=True)


def test_a_job_fetches_at_its_first_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remote, run_dir = f"file://{tmp_path}/elsewhere", tmp_path / "runs" / "far"
    copy_checkpoint(save(tmp_path / "there", 10), url_of_run(remote, "far"))
    launch = run_dir / "launch" / "001"
    launch.mkdir(parents=True)
    config = write_run(tmp_path, f"checkpoint: {{remote: '{remote}'}}\n")
    config.write_text(config.read_text().replace("run: {", "run: {name: far, "))
    assert attempt(["begin", str(launch), str(config), "--resume"]) == 0
    said = capsys.readouterr()
    assert said.out == "--resume\n" and "fetched step-10 of" in said.err
    assert verify_checkpoint(run_dir, 10).is_sound


def test_a_resume_without_a_run_and_a_copy_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for remote, says in ((f"file://{tmp_path}/elsewhere", "holds no copy of a checkpoint"), ("null", "holds no run to resume")):
        keys = [f"checkpoint.remote={remote}", f"run.output_dir={tmp_path / 'runs'}"]
        assert cli.main(["train", str(write_run(tmp_path)), "--resume", *keys]) == 2
        line = capsys.readouterr().err
        assert says in line and line.count("\n") == 1
    assert not (tmp_path / "runs").exists()
