"""Runs that may write to a directory, and its state after a refused resume. One process is the world."""

import pytest
import torch.distributed as dist

from megappo.config.schema import RunConfig
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
    run_dir.claim(run, "first", resume=False)
    assert run_dir.config.read_text() == "first"
    with pytest.raises(ValueError, match="holds another run"):
        run_dir.claim(run, "second", resume=False)
    assert run_dir.config.read_text() == "first"


def test_a_resume_keeps_the_old_configuration_until_the_checkpoint_has_taken_the_new_one(run):
    run_dir = RunDir.of(run)
    with pytest.raises(ValueError, match="no run to resume"):
        run_dir.claim(run, "second", resume=True)
    run_dir.claim(run, "first", resume=False)
    run_dir.claim(run, "second", resume=True)
    assert run_dir.config.read_text() == "first"
    run_dir.record_config("second")
    assert run_dir.config.read_text() == "second"


def test_a_directory_that_cannot_be_written_is_a_users_mistake(run):
    run_dir = RunDir.of(run)
    run_dir.claim(run, "first", resume=False)
    run_dir.config.unlink()
    run_dir.config.mkdir()
    with pytest.raises(ValueError, match="config.yaml"):
        run_dir.record_config("second")


def test_replaced_exports_keep_names_of_their_own(run):
    run_dir = RunDir.of(run)
    run_dir.claim(run, "first", resume=False)
    assert not run_dir.is_exported()
    for name in ("export.old1", "export.old2"):
        run_dir.export.mkdir()
        assert run_dir.is_exported() and run_dir.export_replaced().name == name
        run_dir.export.rename(run_dir.export_replaced())
    assert not run_dir.is_exported()
