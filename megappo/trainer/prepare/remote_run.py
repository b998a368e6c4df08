"""`--resume` of a run that is not on this machine: fetches its newest checkpoint from `checkpoint.remote`. Imports no torch."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import DamagedCheckpoint, RefusedCheckpoint
from megappo.checkpoint.remote import fetch_files, fetch_manifest, list_copies, url_of_run
from megappo.config.errors import ConfigError, problem
from megappo.config.run_directory import CHECKPOINTS, check_run_dir, holds_run, run_dir_of
from megappo.config.supervised import AnyConfig
from megappo.runtime.lease import Lease
from megappo.telemetry.tables import GIB


@dataclass(frozen=True)
class Copies:
    """Complete copies of a run's checkpoints. url: of the run. steps: newest first."""

    remote: str
    url: str
    steps: tuple[int, ...]


def find_copies(config: AnyConfig, *, resume: bool) -> Copies | None:
    """Find the copies to resume from; None if the run is here, has no `checkpoint.remote`, or is no resume. ConfigError without a
    copy."""
    remote, run_dir = config.checkpoint.remote, run_dir_of(config.run)
    if not resume or remote is None or holds_run(run_dir):
        return None
    url = url_of_run(remote, config.run.name)
    try:
        steps = list_copies(url)
    except ValueError as error:
        raise ConfigError(problem("checkpoint.remote", remote, str(error))) from error
    if not steps:
        fix = f"{url} holds no copy of a checkpoint, and {run_dir} no run to resume; leave --resume out or name another run"
        raise ConfigError(problem("checkpoint.remote", remote, fix))
    check_run_dir(config.run, resume=False)
    return Copies(remote, url, tuple(steps))


def fetch(copies: Copies, run_dir: Path) -> int:
    """Fetch the newest valid copy into the run's directory, completely or not at all; return its step. Damaged copies are skipped.
    ConfigError, one line, if no copy is valid, or one holds weights only."""
    with Lease.acquire(run_dir, "megappo train --resume (fetching)"):
        folder = Path(tempfile.mkdtemp(prefix=f".{run_dir.name}.fetched-", dir=run_dir.parent))
        try:
            return _fetch_newest(copies, CheckpointDirectory(run_dir / CHECKPOINTS), folder)
        except (OSError, RefusedCheckpoint) as error:
            raise ConfigError(problem("checkpoint.remote", copies.remote, f"not fetched: {error}")) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _fetch_newest(copies: Copies, directory: CheckpointDirectory, folder: Path) -> int:
    for step in copies.steps:
        place, begun = folder / f"step-{step}", time.monotonic()
        place.mkdir()
        try:
            manifest = fetch_manifest(copies.url, step, place)
            if manifest.model_only:
                fix = f"step-{step} there holds weights only (checkpoint.save_only_model) and cannot be resumed"
                raise ConfigError(problem("checkpoint.remote", copies.remote, fix))
            fetch_files(copies.url, manifest, place)
        except DamagedCheckpoint as error:
            _say(f"{copies.url}/step-{step} is damaged ({error}); nothing is changed there")
            continue
        directory.path.mkdir(parents=True, exist_ok=True)
        directory.publish(place, step)
        size, seconds = manifest.total_bytes / GIB, time.monotonic() - begun
        _say(f"fetched step-{step} of {copies.url} ({size:.3g} GiB in {seconds:.1f} s); the run goes on from there")
        return step
    raise ConfigError(
        problem("checkpoint.remote", copies.remote, f"none of the {len(copies.steps)} copies in {copies.url} is valid")
    )


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"megappo: {text}", file=sys.stderr, flush=True)
