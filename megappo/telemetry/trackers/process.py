"""Helper process of one tracker: reads records from its input, one JSON object a line, and gives them to the tracker.

Its library may block, replace handlers of the process or die, and none of it reaches the rank. Each failure is reported on the
output. The process ends with its rank: after `finish`, at the end of its input, or once it has another parent.

python -m megappo.telemetry.trackers.process NAME PARENT_PID
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megappo.config.redaction import hide_secrets
from megappo.config.run_sections import TelemetryConfig
from megappo.runtime.error_text import first_line
from megappo.telemetry.trackers.base import Histogram, Status, Tracker
from megappo.telemetry.trackers.mlflow_run import Mlflow
from megappo.telemetry.trackers.wandb_run import Wandb

TRACKERS = {"wandb": Wandb, "mlflow": Mlflow}

FAILURES = 2  # in a row, after which a tracker is started anew: the service that wandb starts dies of a SIGTERM
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # between attempts to start
GRACE_S = 5.0  # for a tracker to close a run whose rank has gone
PARENT_EVERY_S = 0.5

Report = Callable[[Mapping[str, str]], None]


class Session:
    """One tracker over the life of the process. make: builds it. report: takes {"lost": reason} or {"note": text}."""

    def __init__(self, make: Callable[[], Tracker], report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._report, self._clock = make, report, clock
        self._tracker: Tracker | None = None
        self._opening: Mapping[str, Any] = {}
        self._failures = 0
        self._pause_s, self._not_before = FIRST_PAUSE_S, 0.0
        self._reason = "it has not been started"

    def take(self, record: Mapping[str, Any]) -> None:
        """Give a record to the tracker; `start` among them."""
        if record["do"] == "start":
            self._opening = record
            self._start()
            return
        if self._tracker is None and self._clock() >= self._not_before:
            self._start()
        if self._tracker is None:
            self._report({"lost": self._reason})
            return
        try:
            give(self._tracker, record)
        except Exception as error:  # whatever a library raises: it costs this record
            self._reason = reason_of(error)
            self._report({"lost": self._reason})
            self._failures += 1
            if self._failures >= FAILURES:
                self._tracker, self._failures = None, 0
        else:
            self._failures = 0

    def _start(self) -> None:
        try:
            tracker = self._make()
            tracker.start(self._opening["config"], self._opening["resumed_step"])
        except Exception as error:  # no network, a wrong key, a full disk
            self._reason = reason_of(error)
            self._report({"lost": self._reason})
            self._not_before = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        else:
            self._tracker, self._pause_s = tracker, FIRST_PAUSE_S


def give(tracker: Tracker, record: Mapping[str, Any]) -> None:
    """Call the tracker's method for a record."""
    match record["do"]:
        case "metrics":
            tracker.metrics(record["step"], record["values"])
        case "histograms":
            found = {name: Histogram(tuple(h["counts"]), tuple(h["edges"])) for name, h in record["histograms"].items()}
            tracker.histograms(record["step"], found)
        case "text":
            tracker.text(record["step"], record["name"], record["rows"])
        case "finish":
            tracker.finish(record["status"])


def reason_of(error: Exception) -> str:
    """One line for a warning, without the password of an address."""
    return hide_secrets(first_line(error, kind=True))


def _follow(parent: int) -> None:
    """End this process soon after `parent` has ended, even if a call of the tracker never returns."""
    while os.getppid() == parent:
        time.sleep(PARENT_EVERY_S)
    time.sleep(GRACE_S)
    os._exit(1)


def main(name: str, parent: int) -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what a library prints is no reply
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()

    def report(reply: Mapping[str, str]) -> None:
        print(json.dumps(reply), file=replies)

    session: Session | None = None
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):  # the rank was killed while it wrote
            break
        record = json.loads(line)
        if session is None:  # `start`, the first record, says what to track
            root, telemetry = Path(record["root"]), TelemetryConfig.model_validate(record["telemetry"])
            session = Session(lambda: TRACKERS[name](root, telemetry, lambda text: report({"note": text})), report)
        session.take(record)
        if record["do"] == "finish":
            session = None
            break
    if session is not None:  # the rank has gone without a word
        status: Status = "failed"
        session.take({"do": "finish", "status": status})
    replies.flush()
    os._exit(0)  # exit handlers of libraries wait for their networks: `finish` has waited


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
