"""What a trial is and what came of it, as files: FOLDER/NAME.json and FOLDER/NAME.result.json. Running it is `trial.py`'s."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from megappo.config.schema import OffloadConfig, TrainConfig

REPEATS = 3
RUNNING = "running"  # in a world's folder: the name of the trial that it is at


class Trial(BaseModel):
    """One role of `config` in its layout there. label: what a user calls it. Tokens are of every sequence; samples: of a pass and
    of an update."""

    config: TrainConfig
    role: str
    label: str
    samples: int
    prompt_tokens: int
    response_tokens: int
    repeats: int = REPEATS


class Measured(BaseModel):
    """Seconds, the least of the repeats. forward_s: of a pass without gradients over the samples; update_s: of one optimizer step
    on them, None where the role does not train.

    What is offloaded moves once in a phase, however many passes and updates it has. load_s: in forward_s, of the weights that come
    from host memory. trip_s: not in update_s, of weights and optimizer state that come and go back in a phase of updates.
    """

    forward_s: float
    update_s: float | None
    load_s: float = 0.0
    trip_s: float = 0.0

    def __str__(self) -> str:
        return f"forward {self.forward_s:.4g} s" + (f", update {self.update_s:.4g} s" if self.update_s is not None else "")


def moves(offload: OffloadConfig) -> bool:
    """True if a phase of updates moves, or allocates anew, what others do not need: its trial times a phase, too."""
    return offload.parameters or offload.gradients or offload.optimizer


class Failed(BaseModel):
    """A trial that took its world down, and why."""

    reason: str

    def __str__(self) -> str:
        return f"failed: {self.reason}"


Outcome = Measured | Failed
_OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)


def write_trial(folder: Path, name: str, trial: Trial) -> None:
    """The description that the ranks read."""
    _write(trial_file(folder, name), trial.model_dump_json())


def read_trial(folder: Path, name: str) -> Trial:
    return Trial.model_validate_json(trial_file(folder, name).read_text(encoding="utf-8"))


def trial_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def outcome_file(folder: Path, name: str) -> Path:
    """Without it a trial is still to be run."""
    return folder / f"{name}.result.json"


def write_outcome(folder: Path, name: str, outcome: Outcome) -> None:
    """As soon as the trial is over: those after it may end the world."""
    _write(outcome_file(folder, name), outcome.model_dump_json())


def read_outcome(folder: Path, name: str) -> Outcome | None:
    """None where the trial did not end."""
    file = outcome_file(folder, name)
    return _OUTCOME.validate_json(file.read_text(encoding="utf-8")) if file.exists() else None


def world_folder(folder: Path, names: Sequence[str]) -> Path:
    """Where a world that runs these trials leaves what it is at, and the evidence of its end (`launch/failure.py`)."""
    return folder / f"{names[0]}.world"


def _write(path: Path, text: str) -> None:
    """As a whole, so that a reader on another node never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
