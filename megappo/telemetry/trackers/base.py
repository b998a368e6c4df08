"""Protocol of a tracker: a place where the numbers of a run are shown (TensorBoard, Weights & Biases, MLflow).

A tracker may fail in any method: `group.py` counts it, and training goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from megappo.telemetry.jsonl import dump_line, replace_file

Status = Literal["finished", "stopped", "failed"]

TEXT_COLUMNS = ("id", "score", "prompt", "response", "answer")
"""Fields of a trajectory (`trainer.report.trajectories_of`) that trackers show as text."""


@dataclass(frozen=True)
class Histogram:
    """counts: n numbers of entries; edges: n + 1 ascending, finite borders of the bins."""

    counts: tuple[int, ...]
    edges: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.edges) == len(self.counts) + 1, f"{len(self.edges)} edges for {len(self.counts)} bins"


class Tracker(Protocol):
    """Calls come in the order start, records of ascending steps, finish. Values are finite; texts are whatever a policy writes."""

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
    """TEXT_COLUMNS of a trajectory as text, scores with four figures; empty where a row has none. Half a surrogate pair, which has
    no UTF-8, becomes its escape."""
    values = (row.get(name) for name in TEXT_COLUMNS)
    texts = ("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
    return tuple(text.encode("utf-8", "backslashreplace").decode("utf-8") for text in texts)


class TrackedRun:
    """Identity of a run at a tracker, by which a resumed run continues it. `trackers/NAME.json` below `root` has the id that the
    tracker knows the run by, and the last step that it was given.

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
