"""What a trial is and what it took, as files: FOLDER/NAME.json and FOLDER/NAME.result.json. Running it is `trial.py`'s."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from pydantic import BaseModel

from megappo.config.schema import TrainConfig

REPEATS = 3


class Trial(BaseModel):
    """One role of `config` in its layout there. Tokens are of every sequence; samples: of a pass and of an update."""

    config: TrainConfig
    role: str
    samples: int
    prompt_tokens: int
    response_tokens: int
    repeats: int = REPEATS


class Measured(BaseModel):
    """Seconds, the least of the repeats. forward_s: of a pass without gradients over the samples; update_s: of one optimizer step
    on them, None where the role does not train."""

    forward_s: float
    update_s: Optional[float]


def write_trial(folder: Path, name: str, trial: Trial) -> None:
    """The description that the ranks read."""
    (folder / f"{name}.json").write_text(trial.model_dump_json(), encoding="utf-8")


def read_trial(folder: Path, name: str) -> Trial:
    return Trial.model_validate_json((folder / f"{name}.json").read_text(encoding="utf-8"))


def write_measured(folder: Path, name: str, measured: Measured) -> None:
    """By rank 0, as soon as the trial is over."""
    (folder / f"{name}.result.json").write_text(measured.model_dump_json(), encoding="utf-8")


def read_measured(folder: Path, name: str) -> Optional[Measured]:
    """What rank 0 wrote; None where the trial did not end."""
    file = folder / f"{name}.result.json"
    return Measured.model_validate_json(file.read_text(encoding="utf-8")) if file.exists() else None
