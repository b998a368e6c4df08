"""TensorBoard's event files, written by this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter

from megappo.telemetry.trackers.base import TEXT_COLUMNS, Histogram, Status, texts_of

PROBE_BYTES = 4096  # a block of most file systems


class TensorBoard:
    """Event files in `directory`, flushed with every record. After a failure the next record opens another file. After a resume
    TensorBoard hides older records of repeated steps."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None
        self._resumed_step: int | None = None
        self._config: Mapping[str, Any] | None = None

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> None:
        self._config, self._resumed_step = config, resumed_step

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        def write(writer: SummaryWriter) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        self._write(write)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        def write(writer: SummaryWriter) -> None:
            for name, histogram in histograms.items():
                middles = [(low + high) / 2 for low, high in zip(histogram.edges, histogram.edges[1:])]
                writer.add_histogram_raw(
                    name,
                    min=histogram.edges[0],
                    max=histogram.edges[-1],
                    num=sum(histogram.counts),
                    # Sums over the middles of the bins: TensorBoard shows neither, and readers take them for a rough mean.
                    sum=sum(count * middle for count, middle in zip(histogram.counts, middles)),
                    sum_squares=sum(count * middle**2 for count, middle in zip(histogram.counts, middles)),
                    bucket_limits=list(histogram.edges[1:]),
                    bucket_counts=list(histogram.counts),
                    global_step=step,
                )

        self._write(write)

    def text(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        text = "\n\n---\n\n".join(_markdown(row) for row in rows)
        self._write(lambda writer: writer.add_text(name, text, step))

    def finish(self, status: Status) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, action: Callable[[SummaryWriter], None]) -> None:
        # TensorBoard's writer does not recover: until the action has succeeded there is none.
        writer, self._writer = self._writer or self._opened(), None
        action(writer)
        writer.flush()  # keeps a live view live; a step takes seconds
        self._writer = writer

    def _opened(self) -> SummaryWriter:
        _require_room(self._directory)
        writer = SummaryWriter(str(self._directory), purge_step=None if self._resumed_step is None else self._resumed_step + 1)
        if self._config:
            writer.add_text("config", _indented(yaml.safe_dump(dict(self._config), sort_keys=False)), self._resumed_step or 0)
        # A second file hides nothing of the first.
        self._resumed_step, self._config = None, None
        return writer


def _require_room(directory: Path) -> None:
    """Raise OSError if a small file cannot be written here; TensorBoard's writer would leave an empty file and a thread's
    traceback."""
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / ".room"
    try:
        probe.write_bytes(bytes(PROBE_BYTES))
    finally:
        probe.unlink(missing_ok=True)


def _markdown(row: Mapping[str, Any]) -> str:
    # Indented, so that nothing in a text counts as markup
    return "\n\n".join(f"**{name}**\n\n{_indented(text)}" for name, text in zip(TEXT_COLUMNS, texts_of(row)) if text)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))
