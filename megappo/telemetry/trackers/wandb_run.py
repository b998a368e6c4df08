"""Weights & Biases, online or into files of the run directory. Its own service takes the records and sends them."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import psutil

from megappo.telemetry.trackers.base import TEXT_COLUMNS, Histogram, Status, TrackedRun, texts_of

if TYPE_CHECKING:
    import wandb

INIT_S = 60.0  # wandb's own limit on the first answer of its server


class Wandb:
    """A run of the project `WANDB_PROJECT` (default megappo); with WANDB_MODE=offline it goes to `wandb/` of the run directory, for
    `wandb sync`. W&B reads its variables itself, such as WANDB_RUN_GROUP."""

    def __init__(self, root: Path, run_name: str, note: Callable[[str], None]) -> None:
        self._root, self._name, self._note = root, run_name, note
        self._run: wandb.Run | None = None

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to its makers
        import wandb

        self._tracked = TrackedRun(self._root, "wandb")
        if self._tracked.id is None:
            self._tracked.begin(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megappo"),
            name=os.environ.get("WANDB_NAME", self._name),
            id=self._tracked.id,
            resume="allow",
            reinit="create_new",  # and not a run that the user's own code has opened
            dir=str(self._root),
            config=dict(config),
            # The address of a git remote may hold a password, and code is the user's own.
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, init_timeout=INIT_S),
        )
        if self._run.offline:
            self._note(f"wandb: offline; to upload: wandb sync {self._root / 'wandb'}/offline-run-*-{self._tracked.id}")
        else:
            self._note(f"wandb: {self._run.url or 'disabled by WANDB_MODE'}")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, dict(values))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        import wandb

        arrays = {name: (numpy.asarray(h.counts), numpy.asarray(h.edges)) for name, h in histograms.items()}
        self._log(step, {f"{name}_histogram": wandb.Histogram(np_histogram=pair) for name, pair in arrays.items()})

    def text(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        self._log(step, {name: wandb.Table(columns=list(TEXT_COLUMNS), data=[list(texts_of(row)) for row in rows])})

    def finish(self, status: Status) -> None:
        import wandb

        if self._run is not None:
            self._run.finish(exit_code=1 if status == "failed" else 0)
        wandb.teardown()

    def _log(self, step: int, values: dict[str, Any]) -> None:
        assert self._run is not None, "start comes first"
        if self._tracked.is_new(step):
            self._run.log(values, step=step)
            self._tracked.given(step)


def end_service() -> None:
    """Kill the service that wandb has started: if it hangs, wandb's exit handler would keep this process from ending."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "wandb-core" in child.name():
                child.kill()
