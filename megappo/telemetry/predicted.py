"""The predicted seconds of a step beside the measured ones, once in the log of a run. The process that starts the ranks predicts
(`commands/tune/predicted.py`), since a rank imports no model of a step: it finds a file in its directory, or says nothing."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megappo.config.run_directory import PREDICTED
from megappo.telemetry.metrics import Metric
from megappo.telemetry.tables import figures, table_of

SETTLED = 4  # steps of a start, the first of which compiles and connects and is left out


class Beside:
    """Collects the first steps of a start. predicted: of one GPU, None if nothing was predicted for it: the mean tokens of
    `responses`, seconds of `stages` for each of these means (null if unknown), and those of a whole `step`."""

    def __init__(self, gpu: str = "", predicted: Mapping[str, Any] | None = None) -> None:
        self._gpu, self._predicted = gpu, predicted
        self._rows: list[Mapping[str, float]] = []

    @classmethod
    def of(cls, root: Path, gpu: str | None) -> Beside:
        """Read what was predicted for this GPU in the directory of a run."""
        path = root / PREDICTED
        if gpu is None or not path.exists():
            return cls()
        return cls(gpu, json.loads(path.read_text(encoding="utf-8")).get(gpu))

    def add(self, row: Mapping[str, float], *, is_last: bool) -> list[str]:
        """Take a step; return the table's lines after the last that counts, and nothing otherwise."""
        if self._predicted is None or len(self._rows) == SETTLED:
            return []
        self._rows.append(row)
        if len(self._rows) < (2 if is_last else SETTLED):
            return []
        rows, self._predicted, predicted = self._rows[1:], None, self._predicted
        return lines_beside(self._gpu, predicted, rows)


def lines_beside(gpu: str, predicted: Mapping[str, Any], rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Table of the stages: predicted for the mean response that these steps drew, and their medians."""
    response = median(row.get(Metric.RESPONSE_MEAN.value, 0.0) for row in rows)
    cells = []
    for stage, seconds in {**predicted["stages"], "whole step": predicted["step"]}.items():
        name = Metric.STEP_SECONDS.value if stage == "whole step" else Metric.STAGE_SECONDS.of(f"{stage}_s")
        known = [row[name] for row in rows if row.get(name) is not None]
        if not known:
            continue
        cell = {"stage": stage, "predicted s": "unknown", "measured s": figures(median(known))}
        if seconds is not None and (priced := _between(predicted["responses"], seconds, response)) > 0:
            cell |= {"predicted s": figures(priced), "measured / predicted": f"{median(known) / priced:.2f}"}
        cells.append(cell)
    begin = f"predicted for {gpu} and responses of {response:,.0f} tokens, beside the median of {len(rows)} steps"
    return [begin, *table_of(cells), "  `megappo tune CONFIG --as-is --calibrate RUN` shows the parts"]


def _between(at: Sequence[float], values: Sequence[float], wanted: float) -> float:
    """The value at `wanted` on the line through the neighbours of an ascending `at`."""
    place = min(max(bisect_left(at, wanted), 1), len(at) - 1)
    share = (wanted - at[place - 1]) / (at[place] - at[place - 1])
    return max(0.0, values[place - 1] + share * (values[place] - values[place - 1]))
