"""`megappo export` says in one line what a directory holds where there is nothing to export."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.checkpoint.manifest import BEST, Manifest, write_manifest
from megappo.commands import cli
from megappo.commands.export import export
from megappo.commands.export.export import export_checkpoint
from tests.commands.plan.checkpoints import write_checkpoint


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
    below_a_file = tmp_path / "config.yaml" / "a" / "out"
    assert message(tmp_path, below_a_file) == (
        f'OUTPUT = "{below_a_file}": {tmp_path / "config.yaml"} is not a directory; export to another directory'
    )


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: ppo}\n")
    (tmp_path / "checkpoints").mkdir()
    assert message(tmp_path, Path("/proc/a/out")).startswith('OUTPUT = "/proc/a/out": /proc cannot be written to: ')  # by root too
    assert "File name too long; export to another" in message(tmp_path, tmp_path / ("a" * 300))


def checkpoint(run: Path, step: int, best: int | None) -> None:
    folder = run / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    facts = {BEST: {"step": best, "metric": "eval/a", "mode": "max", "value": 0.5}} if best is not None else {}
    write_manifest(folder, Manifest(step, 1, False, facts, {}))


def test_best_is_the_step_that_the_newest_checkpoint_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int | None] = []

    class Store:
        def __init__(self, directory: Path, keep_last: int) -> None:
            pass

        def load_weights(self, role: str, engine: object, step: int | None) -> int:
            loaded.append(step)
            raise InterruptedError

    model = write_checkpoint(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(f"policy: {{model: {model}}}\ndata: {{train: t}}\n")
    checkpoint(tmp_path, 4, 4), checkpoint(tmp_path, 6, 4)
    monkeypatch.setattr(export, "CheckpointStore", Store)
    monkeypatch.setattr(export, "start_alone", lambda device: None)
    for step in ("best", 6, None):
        with pytest.raises(InterruptedError):
            export_checkpoint(str(tmp_path), str(tmp_path / "out"), role="policy", step=step, engines=lambda *_: Engines())
    assert loaded == [4, 6, None]


class Engines:
    """Builds nothing of use: what would be loaded is asked for."""

    def build(self, spec: object) -> object:
        return object()


@pytest.mark.parametrize(
    ("steps", "says"),
    [((), "checkpoints holds no complete checkpoint"), ((5,), "step-5 knows of none: the run has no trainer.keep_best")],
)
def test_a_run_without_a_best_step_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: tuple[int, ...], says: str
) -> None:
    (tmp_path / "config.yaml").write_text("policy: {model: p}\ndata: {train: t}\n")
    (tmp_path / "checkpoints").mkdir()
    for step in steps:
        checkpoint(tmp_path, step, None)
    assert cli.main(["export", str(tmp_path), str(tmp_path / "out"), "--step", "best"]) == 2
    line = capsys.readouterr().err
    assert '--step = "best": ' in line and says in line and line.count("\n") == 1
    assert cli.main(["export", str(tmp_path), str(tmp_path / "out"), "--step", "worst"]) == 2
    assert "--step: worst is neither an integer >= 1 nor best" in capsys.readouterr().err
