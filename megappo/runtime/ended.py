"""`ended.json` of a run directory: how the run ended. Absent while it runs, and after a kill of all its processes.

Rank 0 writes it when the run has finished or was stopped on request, the launcher when the run has failed. Imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from megappo.config.redaction import hide_secrets

ENDED = "ended.json"
CONFIG = "config.yaml"  # resolved configuration of a run, in its directory from the start on

Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Ended:
    """One end of a run.

    step: last step of a run that finished or stopped; of a failed one that of its newest checkpoint, 0 without one. code: exit code
    of the ranks. message: one line. signals: rank -> name of the signal that asked it to stop. time: seconds since the epoch.
    """

    outcome: Outcome
    step: int
    code: int = 0
    message: str = ""
    signals: Mapping[str, str] = field(default_factory=dict)
    time: float = 0.0


def record_end(run_dir: Path, end: Ended) -> None:
    """Write ended.json with the present time, atomically: a reader sees the old one, or this one whole."""
    content = {**asdict(end), "time": round(time.time(), 3), "message": hide_secrets(end.message)}
    temporary = run_dir / f".{ENDED}.{os.getpid()}"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, run_dir / ENDED)


def record_failure(run_dir: Path, end: Ended) -> None:
    """Record a failure, unless the run never began here or its end is known: a refused command leaves what it finds."""
    try:
        # Rank 0 removes the one record and writes the other file when it takes the directory.
        if (run_dir / CONFIG).is_file() and not (run_dir / ENDED).exists():
            record_end(run_dir, end)
    except OSError as error:  # a full or lost disk, perhaps the cause of the failure, whose exit code counts
        print(f"megappo: {run_dir / ENDED} cannot be written: {error.strerror}", file=sys.stderr)


def read_end(run_dir: Path) -> Ended | None:
    """Read how a run ended; None if it has not, or the file is not one of ours."""
    try:
        return Ended(**json.loads((run_dir / ENDED).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def is_stopped(run_dir: Path) -> bool:
    """True if the run was stopped on request, with a checkpoint, and not resumed since."""
    end = read_end(run_dir)
    return end is not None and end.outcome == "stopped"
