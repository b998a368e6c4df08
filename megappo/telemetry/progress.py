"""Console table of a run: a header, then one line per step, without control characters, so it also reads well in a log file."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from megappo.telemetry.metrics import Metric

ETA_WINDOW = 10  # steps over which the time left is averaged
HEADER_EVERY = 40  # rows


@dataclass(frozen=True)
class Column:
    """A column of the table. format: of a finite number, e.g. `.3f`."""

    title: str
    metric: str
    format: str
    width: int = 7


PPO_COLUMNS = (
    Column("score", Metric.SCORE_MEAN, ".3f"),
    Column("eval", Metric.EVAL_SCORE, ".3f"),
    Column("kl", Metric.KL_RESPONSE, ".3f"),
    Column("entropy", Metric.POLICY_ENTROPY, ".3f"),
    Column("length", Metric.RESPONSE_MEAN, ".1f"),
    Column("v loss", Metric.CRITIC_LOSS, ".4f"),
    Column("expl.v", Metric.CRITIC_EXPLAINED_VARIANCE, ".2f"),
    Column("tok/s", Metric.TOKENS_PER_S, ",.0f", 9),
    Column("s/step", Metric.STEP_SECONDS, ".2f"),
)
SFT_COLUMNS = (
    Column("loss", Metric.SFT_LOSS, ".4f"),
    Column("grad", Metric.SFT_GRAD_NORM, ".3f"),
    Column("lr", Metric.SFT_LR, ".1e", 8),
    Column("tok/s", Metric.TOKENS_PER_S, ",.0f", 9),
)


def columns_without_critic() -> tuple[str, ...]:
    """Return the metrics of PPO_COLUMNS that a run without a critic has."""
    return tuple(column.metric for column in PPO_COLUMNS if not column.metric.startswith("critic/"))


def columns_of(names: Sequence[str]) -> Sequence[Column]:
    """Return the columns of these metrics (`telemetry.progress`); PPO_COLUMNS without any. A title is the name without its group,
    or the whole name if two titles would be equal."""
    if not names:
        return PPO_COLUMNS
    usual = {column.metric: column for column in PPO_COLUMNS}
    tails = [name.split("/", 1)[1] for name in names]
    columns = []
    for name, tail in zip(names, tails):
        title = tail if tails.count(tail) == 1 else name
        columns.append(usual.get(name) or Column(title, name, ".4g", max(9, len(title))))  # 9: -1.234e-05 less its sign
    return columns


class Progress:
    """Prints rows to `stream`: the first, every `every` steps, the last. clock: seconds, for the time left."""

    def __init__(
        self, columns: Sequence[Column], stream: TextIO, every: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._columns, self._stream, self._every, self._clock = columns, stream, every, clock
        self._ends: deque[float] = deque([clock()], maxlen=ETA_WINDOW + 1)
        self._rows = 0

    def row(self, metrics: Mapping[str, float], step: int, total: int) -> None:
        """Print a row. A metric that is absent or not finite prints as `-`."""
        self._ends.append(self._clock())
        if not (step % self._every == 0 or step == total or self._rows == 0):
            return
        if self._rows % HEADER_EVERY == 0:
            self._print(self._line("step".rjust(11), [c.title for c in self._columns], "eta"))
        self._rows += 1
        cells = [_cell(metrics.get(c.metric), c.format) for c in self._columns]
        self._print(self._line(f"{step}/{total}".rjust(11), cells, self._time_left(total - step)))

    def text(self, line: str) -> None:
        self._print(line)

    def _line(self, first: str, cells: Sequence[str], last: str) -> str:
        middle = " ".join(cell.rjust(column.width) for cell, column in zip(cells, self._columns))
        return f"{first} {middle} {last.rjust(8)}"

    def _time_left(self, steps: int) -> str:
        # At least two ends: construction and this row.
        seconds = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) * steps
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

    def _print(self, line: str) -> None:
        # flush: the output of torchrun and sbatch is a pipe, and a step can take minutes
        print(line, file=self._stream, flush=True)


def _cell(value: float | None, spec: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, spec)
