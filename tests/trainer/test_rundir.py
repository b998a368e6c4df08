"""Runs that may write to a directory, and its state after a refused resume. One process is the world."""

from pathlib import Path

import pytest
import torch.distributed as dist

from megappo.checkpoint.manifest import RefusedCheckpoint
from megappo.commands.launch.restart import Start, next_start, saved_steps, set_aside
from megappo.config.run_sections import RunConfig
from megappo.runtime.ending import Ended, is_stopped, read_end, record_end
from megappo.runtime.lease import LEASE_VARIABLE, held_lease, read_lease
from megappo.trainer.rundir import RunDir


@pytest.fixture(autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run(tmp_path):
    return RunConfig(name="r", output_dir=str(tmp_path / "runs"))


def test_a_new_run_writes_its_configuration_at_once(run):
    run_dir = RunDir.of(run)
    run_dir.claim(run, "first", resume=False).release()
    assert run_dir.config.read_text() == "first"
    with pytest.raises(ValueError, match="holds another run"):
        run_dir.claim(run, "second", resume=False)
    assert run_dir.config.read_text() == "first"


def test_a_run_in_use_is_refused_and_a_refused_claim_leaves_no_lease(run):
    run_dir = RunDir.of(run)
    with run_dir.claim(run, "first", resume=False):
        with pytest.raises(ValueError, match="in use by"):
            run_dir.claim(run, "second", resume=True)
    run_dir.config.unlink()
    run_dir.config.mkdir()
    with pytest.raises(ValueError, match="holds another run"):
        run_dir.claim(run, "second", resume=False)
    assert read_lease(run_dir.root) is None


def test_rank_0_goes_on_under_the_lease_of_its_launcher(run, monkeypatch):
    run_dir = RunDir.of(run)
    with held_lease(run_dir.root, "megappo train x.yaml") as held:
        with run_dir.claim(run, "first", resume=False) as lease:
            assert lease.id == held.id
        assert read_lease(run_dir.root).id == held.id
    monkeypatch.setenv(LEASE_VARIABLE, "f00d")
    with pytest.raises(ValueError, match="the launcher of these ranks has lost the run"):
        run_dir.claim(run, "first", resume=True)


def test_a_resume_keeps_the_old_configuration_until_the_checkpoint_has_taken_the_new_one(run):
    run_dir = RunDir.of(run)
    with pytest.raises(ValueError, match="no run to resume"):
        run_dir.claim(run, "second", resume=True)
    run_dir.claim(run, "first", resume=False).release()
    run_dir.claim(run, "second", resume=True).release()
    assert run_dir.config.read_text() == "first"
    run_dir.record_config("second")
    assert run_dir.config.read_text() == "second"


def test_a_refused_resume_leaves_the_mark_of_a_stop(run):
    """It says that the run saved: what begins to work removes it."""
    run_dir = RunDir.of(run)
    run_dir.claim(run, "first", resume=False).release()
    record_end(run_dir.root, Ended("stopped", 3))
    run_dir.claim(run, "second", resume=True).release()
    assert is_stopped(run_dir.root)
    run_dir.begin()
    assert read_end(run_dir.root) is None


@pytest.mark.parametrize("killed_in", ["writing config.yaml", "the beginning"])
def test_ranks_that_are_killed_before_they_begin_start_again_from_the_beginning(run, monkeypatch, killed_in):
    """And are not taken for a run whose checkpoints are elsewhere."""
    run_dir = RunDir.of(run)
    with monkeypatch.context() as broken:
        if killed_in == "writing config.yaml":
            broken.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            run_dir.claim(run, "first", resume=False).release()
            killed()
    start = next_start([Start(0, 0, 1.0)], saved_steps(run_dir.root), 1)
    assert start.step == 0
    set_aside(run_dir.root, run_dir.root / "launch" / "001" / "attempt-0")
    run_dir.claim(run, "first", resume=False).release()
    run_dir.checkpoints.rmdir()
    with pytest.raises(RefusedCheckpoint, match=f"mount its file system .* never saved: mkdir {run_dir.checkpoints}"):
        saved_steps(run_dir.root)


def killed(*_, **__):
    raise KeyboardInterrupt


def test_a_directory_that_cannot_be_written_is_a_users_mistake(run):
    run_dir = RunDir.of(run)
    run_dir.claim(run, "first", resume=False).release()
    run_dir.config.unlink()
    run_dir.config.mkdir()
    with pytest.raises(ValueError, match="config.yaml"):
        run_dir.record_config("second")


def test_replaced_exports_keep_names_of_their_own(run):
    run_dir = RunDir.of(run)
    run_dir.claim(run, "first", resume=False).release()
    assert not run_dir.is_exported()
    for name in ("export.old1", "export.old2"):
        run_dir.export.mkdir()
        assert run_dir.is_exported() and run_dir.export_replaced().name == name
        run_dir.export.rename(run_dir.export_replaced())
    assert not run_dir.is_exported()
