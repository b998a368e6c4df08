"""A trial and its outcome as files: FOLDER/NAME.json and FOLDER/NAME.result.json. `trial.py` runs it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from megappo.config.schema import TrainConfig

REPEATS = 3  # timed passes of each kind, of which the fastest counts
RUNNING = "running"  # file in a world's folder with the name of the current trial


class Trial(BaseModel):
    """One role of `config` in its layout there."""

    config: TrainConfig
    role: str
    label: str
    """Its name for users."""
    samples: int
    """Sequences of a pass and of an update."""
    prompt_tokens: int
    response_tokens: int
    """`prompt_tokens`, `response_tokens`: of every sequence."""
    repeats: int = REPEATS


class Measured(BaseModel):
    """Seconds, the least of the repeats. Offloaded parts move once in a phase, for any number of passes and updates."""

    forward_s: float
    """A pass without gradients over the samples."""
    update_s: float | None
    """One optimizer step on the samples; None if the role does not train."""
    load_s: float = 0.0
    """Part of `forward_s`: weights that come from host memory."""
    trip_s: float = 0.0
    """Not in `update_s`: weights and optimizer state that come and go back in a phase of updates."""

    def __str__(self) -> str:
        return f"forward {self.forward_s:.4g} s" + (f", update {self.update_s:.4g} s" if self.update_s is not None else "")


class Failed(BaseModel):
    """A trial that took its world down, with the reason."""

    reason: str

    def __str__(self) -> str:
        return f"failed: {self.reason}"


Outcome = Measured | Failed
_OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)


def write_trial(folder: Path, name: str, trial: Trial) -> None:
    _write(trial_file(folder, name), trial.model_dump_json())


def read_trial(folder: Path, name: str) -> Trial:
    return Trial.model_validate_json(trial_file(folder, name).read_text(encoding="utf-8"))


def trial_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def outcome_file(folder: Path, name: str) -> Path:
    """Path of a trial's outcome. A trial without this file is still to be run."""
    return folder / f"{name}.result.json"


def write_outcome(folder: Path, name: str, outcome: Outcome) -> None:
    """Write an outcome at the end of its trial, because a later trial may end the world."""
    _write(outcome_file(folder, name), outcome.model_dump_json())


def read_outcome(folder: Path, name: str) -> Outcome | None:
    """Read an outcome; None if the trial has none."""
    file = outcome_file(folder, name)
    return _OUTCOME.validate_json(file.read_text(encoding="utf-8")) if file.exists() else None


def world_folder(folder: Path, names: Sequence[str]) -> Path:
    """Folder of the world that runs these trials: the name of the current one, and evidence of failures (`runtime/failure.py`)."""
    return folder / f"{names[0]}.world"


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)  # atomic: a reader on another node never sees half of it
