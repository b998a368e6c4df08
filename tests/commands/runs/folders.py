"""Run directories as a run leaves them, made without one."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import Manifest, fingerprint_file, list_files, write_manifest
from megappo.runtime.lease_record import process_table

HOUR = 3600


FILES = (
    "models/policy/position.json",
    "models/policy/00000.safetensors",
    "state.json",
    "rng-00000.safetensors",
)


def save(run_dir: Path, step: int, *, weights_only: bool = False) -> Path:
    """A checkpoint of one rank with the names that every one has."""
    place = CheckpointDirectory(run_dir / "checkpoints").step_path(step)
    for name in FILES:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(f"{name} of {step}".encode() * 100)
    entries = {name: fingerprint_file(place / name) for name in list_files(place)}
    write_manifest(place, Manifest(step, 1, weights_only, {}, entries))
    return place


def write_metrics(run_dir: Path, steps: int) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "time": 1.0}) + "\n" for step in range(steps + 1)))


def write_lease(run_dir: Path, **changes: Any) -> None:
    """A lease that this process holds."""
    run_dir.mkdir(parents=True, exist_ok=True)
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    now = int(time.time())
    who = {"id": "abc", "host": socket.gethostname(), "pid": os.getpid(), "started": started, "pids": process_table()}
    record = {**who, "since": now - HOUR, "beat": now, "command": "megappo train", "job": None, "restart": "0", **changes}
    (run_dir / "lease.json").write_text(json.dumps(record))
    os.utime(run_dir / "lease.json", (record["beat"], record["beat"]))


def write_end(run_dir: Path, outcome: str = "finished", **changes: Any) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    end = {"time": time.time() - HOUR, "outcome": outcome, "step": 3, "code": 0, "message": "", "signals": {}}
    (run_dir / "ended.json").write_text(json.dumps({**end, **changes}))
