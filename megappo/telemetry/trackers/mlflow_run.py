"""MLflow: the server of MLFLOW_TRACKING_URI, without it a database in the run directory. Every call waits for its answer."""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megappo.config.keys import leaves
from megappo.telemetry.trackers.base import TEXT_COLUMNS, Histogram, Status, TrackedRun, texts_of

URI = "MLFLOW_TRACKING_URI"
# Defaults for the library: no reports to its makers, and an end to waiting for a server that is down.
_ENVIRONMENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
# MLflow's names of the ends of a run.
_ENDS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MAX_PARAMS = 100  # parameters that MLflow takes in one request
_MAX_PARAM_CHARS = 6000  # MLflow refuses longer values
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")  # characters that MLflow refuses in names of metrics


class Mlflow:
    """A run of the experiment `MLFLOW_EXPERIMENT_NAME` (default megappo); histograms become JSON artifacts, trajectories text
    artifacts."""

    def __init__(self, root: Path, run_name: str, note: Callable[[str], None]) -> None:
        self._root, self._name, self._note = root, run_name, note

    def start(self, config: Mapping[str, Any], resumed_step: int | None) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        mlflow: Any = importlib.import_module("mlflow")
        folder, server = self._root.absolute() / "mlflow", os.environ.get(URI)
        if not server:
            folder.mkdir(parents=True, exist_ok=True)
        self._client = mlflow.MlflowClient(tracking_uri=server or f"sqlite:///{folder / 'mlflow.db'}")
        self._tracked = TrackedRun(self._root, "mlflow")
        if self._tracked.id is None:
            self._begin(self._client, None if server else folder.as_uri())
            entities: Any = importlib.import_module("mlflow.entities")
            params = [entities.Param(name, str(value)[:_MAX_PARAM_CHARS]) for name, value in leaves(config)]
            for start in range(0, len(params), _MAX_PARAMS):
                self._client.log_batch(self._id, params=params[start : start + _MAX_PARAMS])
        else:  # its parameters cannot change any more: the artifact says what the run goes on with
            self._client.update_run(self._id, status="RUNNING")
        self._client.log_text(self._id, yaml.safe_dump(dict(config), sort_keys=False), "config.yaml")
        if not server:
            self._note(f"mlflow: {URI} is not set; to look at: mlflow ui --backend-store-uri sqlite:///{folder / 'mlflow.db'}")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if self._tracked.is_new(step):
            entities: Any = importlib.import_module("mlflow.entities")
            now_ms = int(time.time() * 1000)
            named = {_NOT_IN_NAMES.sub("_", name): value for name, value in values.items()}
            metrics = [entities.Metric(name, value, now_ms, step) for name, value in named.items()]
            self._client.log_batch(self._id, metrics=metrics)
            self._tracked.given(step)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        if self._tracked.is_new(step):
            content = {name: {"counts": h.counts, "edges": h.edges} for name, h in histograms.items()}
            self._client.log_text(self._id, json.dumps(content), f"histograms/step_{step:06d}.json")
            self._tracked.given(step)

    def text(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._tracked.is_new(step):
            samples = ("\n".join(f"{key}: {text}" for key, text in zip(TEXT_COLUMNS, texts_of(row))) for row in rows)
            self._client.log_text(self._id, "\n\n".join(samples) + "\n", f"{name}/step_{step:06d}.txt")
            self._tracked.given(step)

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._id, _ENDS[status])

    @property
    def _id(self) -> str:
        assert self._tracked.id is not None, "start comes first"
        return self._tracked.id

    def _begin(self, client: Any, artifacts: str | None) -> None:
        """Create the run, and its experiment if missing. artifacts: URI of the folder for a new experiment's files."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megappo")
        experiment = client.get_experiment_by_name(name)
        experiment_id = client.create_experiment(name, artifacts) if experiment is None else experiment.experiment_id
        run = client.create_run(experiment_id, run_name=self._name)
        self._tracked.begin(run.info.run_id)
