"""Protocol of a tracker, which shows the numbers of a run (TensorBoard, Weights & Biases, MLflow). A tracker may fail in any
method: `group.py` counts it, and training goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from megappo.telemetry.jsonl import dump_line, replace_file

Status = Literal["finished", "stopped", "failed"]

TEXT_COLUMNS = ("id", "score", "prompt", "response", "answer")
"""Fields of a trajectory (`trainer/extras.py`) that trackers show as text."""


@dataclass(frozen=True)
class Histogram:
    """Histogram of n bins. counts: n numbers of entries; edges: n + 1 ascending, finite borders."""

    counts: tuple[int, ...]
    edges: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.edges) == len(self.counts) + 1, f"{len(self.edges)} edges for {len(self.counts)} bins"


class Tracker(Protocol):
    """A place for a run's numbers. Calls: start, records of ascending steps, finish. Values are finite; texts may hold anything."""

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> None:
        """Open the run, or continue it. config: the run's, without secrets. resumed_step: records after it come again."""
        ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None: ...

    def text(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show samples, TEXT_COLUMNS of each, under `name`."""
        ...

    def finish(self, status: Status) -> None:
        """Close the run. No record follows."""
        ...


def texts_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return TEXT_COLUMNS of a trajectory as text, scores with four figures, empty where the row has none."""
    values = (row.get(name) for name in TEXT_COLUMNS)
    texts = ("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
    # A lone surrogate, which has no UTF-8, becomes its escape
    return tuple(text.encode("utf-8", "backslashreplace").decode("utf-8") for text in texts)


class TrackedRun:
    """Identity of a run at a tracker, by which a resumed run continues it: id and last step given, in `root`/trackers/NAME.json.
    Trackers take no step twice, so the steps that a resumed run repeats are left out (`is_new`)."""

    def __init__(self, root: Path, name: str) -> None:
        self._path = root / "trackers" / f"{name}.json"
        found = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        self.id: str | None = found.get("id")
        self._step: int = found.get("step", -1)
        self._last_before = self._step

    def begin(self, run_id: str) -> None:
        """Store the id of a new run."""
        self.id = run_id
        self._write()

    def is_new(self, step: int) -> bool:
        """True if no record of this step was given before this start."""
        return step > self._last_before

    def given(self, step: int) -> None:
        """Store the step of a record that was given."""
        if step > self._step:
            self._step = step
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, dump_line({"id": self.id, "step": self._step}))
