"""Log of a run: metrics.jsonl, trackers, trajectories and the console, whose table has a header, then one line per step, without
control characters, so it also reads well in a log file. Every rank calls; rank 0 writes. Nothing here ends a run: what cannot be
written is lost and counted (`side_work.py`)."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch.distributed as dist

from megappo.telemetry.jsonl import MetricsFile, write_lines
from megappo.telemetry.metrics import Metric
from megappo.telemetry.plot import write_learning_curve
from megappo.telemetry.predicted import Beside
from megappo.telemetry.side_work import SideWork
from megappo.telemetry.statistics import StatisticsBlock
from megappo.telemetry.summary import run_summary
from megappo.telemetry.trackers.base import Histogram, Status, Tracker
from megappo.telemetry.trackers.group import Trackers

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
    Column("eval", Metric.EVAL_LOSS, ".4f"),
    Column("grad", Metric.SFT_GRAD_NORM, ".3f"),
    Column("lr", Metric.SFT_LR, ".1e", 8),
)


def columns_without_critic() -> tuple[str, ...]:
    """Return the metrics of PPO_COLUMNS that a run without a critic has."""
    return tuple(column.metric for column in PPO_COLUMNS if column.metric.partition("/")[0] != "critic")


def columns_of(names: Sequence[str]) -> Sequence[Column]:
    """Return the columns of these metrics (`telemetry.progress`); PPO_COLUMNS without any. A title is the name without its group,
    or the whole name if two titles would be equal."""
    if not names:
        return PPO_COLUMNS
    usual = {column.metric: column for column in (*PPO_COLUMNS, *SFT_COLUMNS)}
    tails = [name.split("/", 1)[1] for name in names]
    columns = []
    for name, tail in zip(names, tails):
        title = tail if tails.count(tail) == 1 else name
        columns.append(usual.get(name) or Column(title, name, ".4g", max(9, len(title))))  # 9: -1.234e-05 less its sign
    titles = [column.title for column in columns]
    return [one if titles.count(one.title) == 1 else replace(one, title=one.metric, width=len(one.metric)) for one in columns]


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
    # z: -0.0001 is 0.000 as 0.0001 is.
    return "-" if value is None or not math.isfinite(value) else format(value, f"z{spec}")


logger = logging.getLogger(__name__)


class EvaluationResult(Protocol):
    """Result of one set of an evaluation, e.g. `trainer.evaluation.Evaluation`. name: empty for the set of `data.eval`."""

    @property
    def name(self) -> str: ...
    def metrics(self) -> dict[str, float]: ...
    def describe(self) -> str: ...


class RunLog:
    """Writes metrics.jsonl, trajectories/ and learning_curve.svg to `root`, the same to trackers, the table to `stream` (None:
    stdout), about `rows` rows in all, or one a step (0). trackers: by name, not started. config: the run's, without secrets.
    progress, summary_every: see `config.run_sections.TelemetryConfig`. beside: predicted seconds of a step."""

    def __init__(
        self,
        root: Path,
        trackers: Mapping[str, Tracker] | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        progress: Sequence[str] = (),
        summary_every: int = 0,
        rows: int = 0,
        stream: TextIO | None = None,
        beside: Beside | None = None,
    ) -> None:
        self._root, self._beside = root, beside or Beside()
        self._writes = not dist.is_initialized() or dist.get_rank() == 0
        self._stream = stream or sys.stdout
        self._side_work = SideWork()
        self._file = MetricsFile(root / "metrics.jsonl")
        self._trackers = Trackers(trackers or {}, config or {}, self._side_work)
        self._progress: Progress | None = None
        self._columns, self._rows = columns_of(progress), rows
        self._block = StatisticsBlock(summary_every)
        self._held: tuple[int, dict[str, float]] | None = None
        self._warned: set[str] = set()

    def resume_after(self, step: int) -> None:
        """Drop the log after `step`. Call it before the first step of a resumed run."""
        if self._writes:
            self._trackers.resume_after(step)
            self._side_work.run("metrics.jsonl", lambda: self._file.truncate_after(step))

    def note(self, text: str) -> None:
        """Print a line to the console."""
        if self._writes:
            self._side_work.run("console", lambda: print(text, file=self._stream, flush=True))

    def step(self, metrics: Mapping[str, float], step: int, total_steps: int, timeline: Sequence[str] = ()) -> None:
        """Log one step: a line in the file, scalars, a row on the console. timeline: lines for a statistics block that is
        due."""
        if self._writes:
            row = {**self._take_held(step), **metrics}
            self._write(row, step)
            every = max(1, total_steps // self._rows) if self._rows else 1
            progress = self._progress = self._progress or Progress(self._columns, self._stream, every)
            self._side_work.run("console", lambda: progress.row(row, step, total_steps))
            is_last = step == total_steps
            for text in (*self._beside.add(row, is_last=is_last), *self._block.add(row, step, is_last=is_last, more=timeline)):
                self.note(text)

    def evaluation(self, evaluation: EvaluationResult, step: int) -> None:
        """Log the result of one set with the weights after `step`; it joins the line of that step, logged next. Step 0 has no such
        line: `end_of_start` writes one. Named sets have no column in the table and print a line."""
        if not self._writes:
            return
        held = self._take_held(step)
        self._held = (step, {**held, **evaluation.metrics()})
        if step == 0 or evaluation.name:
            self.note(f"{f'step {step}' if step else 'before training'}: {evaluation.describe()}")

    def end_of_start(self) -> None:
        """Write what was evaluated before the first step to a line of its own."""
        if self._writes:
            self._take_held(None)

    def trajectories(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write samples of a step in full, one JSON object each (`trainer.trajectories`), to a file of their own."""
        path = self._root / "trajectories" / f"step_{step:06d}.jsonl"

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_lines(path, [{"step": step, **row} for row in rows])  # replaces the file of a step that a resumed run repeats

        if self._writes:
            self._side_work.run("trajectories", write)
            self._trackers.text(step, "trajectories", rows)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Show distributions of a step in the trackers."""
        if self._writes:
            self._trackers.histograms(step, histograms)

    def close(self, status: Status = "finished") -> None:
        """Finish the files, draw the learning curve, and ask the trackers to close the run (`wait`)."""
        if not self._writes:
            return
        self._take_held(None)
        self._side_work.run("metrics.jsonl", self._file.close)
        self._trackers.finish(status)
        self._side_work.run("learning_curve.svg", lambda: write_learning_curve(self._root))
        if self._side_work.lost:
            logger.warning(self._side_work.summary())

    def summary(self) -> None:
        """Print the summary of the run, which is over (`telemetry/summary.py`)."""
        if self._writes:
            self._side_work.run("summary", lambda: print("", *run_summary(self._root), sep="\n", file=self._stream, flush=True))

    def wait(self) -> None:
        """Wait, within limits, for trackers that have records yet to write. The last call."""
        if self._writes:
            known = self._side_work.num_lost
            self._trackers.wait()
            if self._side_work.num_lost > known:
                logger.warning(self._side_work.summary())

    def _take_held(self, step: int | None) -> dict[str, float]:
        """Return the held evaluation if it is of `step`; write one of another step to its own line."""
        if self._held is None:
            return {}
        (at, metrics), self._held = self._held, None
        if at == step:
            return metrics
        self._write(metrics, at)
        return {}

    def _write(self, metrics: Mapping[str, float], step: int) -> None:
        plain = {str(getattr(name, "value", name)): value for name, value in metrics.items()}
        for name, value in plain.items():
            if not math.isfinite(value) and name not in self._warned:
                self._warned.add(name)
                logger.warning("%s is %s at step %d; it is logged as null (said once)", name, value, step)
        plain[Metric.LOST_RECORDS.value] = self._side_work.num_lost
        record = {"step": step, "time": round(time.time(), 3), **plain}
        self._side_work.run("metrics.jsonl", lambda: self._file.append(record))
        self._trackers.metrics(step, plain)
