"""`megappo export` says in one line what a directory holds where there is nothing to export."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.trainer.export import export_checkpoint


def message(run: Path, output: Path) -> str:
    with pytest.raises(ValueError) as error:
        export_checkpoint(str(run), str(output), role="policy", step=None)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_fine_tuning_has_exported_already(tmp_path: Path) -> None:
    """Its config has other keys than a PPO run's, which are not the user's mistake."""
    (tmp_path / "config.yaml").write_text("run: {name: sft}\ntrainer: {steps: 3, batch_size: 2}\n")
    (tmp_path / "export").mkdir()
    assert message(tmp_path, tmp_path / "out") == f"{tmp_path} has no checkpoints; its model lies in {tmp_path / 'export'} already"


def test_a_run_that_was_stopped_before_its_first_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: ppo}\n")
    assert message(tmp_path, tmp_path / "out") == f"{tmp_path} has no checkpoints"


def test_a_role_that_no_checkpoint_holds(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("policy: {model: p}\ndata: {train: t}\n")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="--role reference: checkpoints hold policy, critic"):
        export_checkpoint(str(tmp_path), str(tmp_path / "out"), role="reference", step=None)


def test_no_run_and_no_room(tmp_path: Path) -> None:
    assert "holds no run" in message(tmp_path, tmp_path / "out")
    (tmp_path / "config.yaml").write_text("run: {name: ppo}\n")
    (tmp_path / "checkpoints").mkdir()
    assert "exists; export to another directory" in message(tmp_path, tmp_path)
