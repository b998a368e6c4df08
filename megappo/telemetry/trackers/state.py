"""Identity of a run at a tracker, kept in the run directory: a resumed run continues it."""

from __future__ import annotations

import json
from pathlib import Path

from megappo.telemetry.jsonl import dump_line, replace_file


class TrackedRun:
    """`trackers/NAME.json` below `root`: the id that the tracker knows the run by, and the last step that it was given.

    Trackers take no step back, so the steps that a resumed run repeats are left out (`is_new`).
    """

    def __init__(self, root: Path, name: str) -> None:
        self._path = root / "trackers" / f"{name}.json"
        found = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        self.id: str | None = found.get("id")
        self._step: int = found.get("step", -1)
        self._last_before = self._step

    def begin(self, run_id: str) -> None:
        """Keep the id of a new run."""
        self.id = run_id
        self._write()

    def is_new(self, step: int) -> bool:
        """True if no record of this step was given before this start."""
        return step > self._last_before

    def given(self, step: int) -> None:
        """Keep the step of a record that was given."""
        if step > self._step:
            self._step = step
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, dump_line({"id": self.id, "step": self._step}))
