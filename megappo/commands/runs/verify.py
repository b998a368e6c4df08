"""Verify a run's checkpoints by manifest, sizes and every hash, without changing them: safe beside a live run. A load verifies too
(`checkpoint/verification.py`) and sets a damaged checkpoint aside; this only reports. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import Manifest, RefusedCheckpoint, find_wrong_content, list_files, require_complete
from megappo.commands.runs.read import BROKEN
from megappo.config.errors import ConfigError
from megappo.config.run_directory import CHECKPOINTS

THREADS = 8  # hashlib releases the GIL; more threads do not speed up a disk


@dataclass(frozen=True)
class Verified:
    """Result for one checkpoint. unverified: a file cannot be read, which says nothing about its data, or is not megappo's.
    removed: the live run removed it during the verification."""

    step: int
    state: Literal["ok", "damaged", "unverified", "removed"]
    files: int  # of the manifest, as `bytes`; 0 if it cannot be read
    bytes: int
    fault: str  # one line; empty without one

    @property
    def is_sound(self) -> bool:
        return self.state in ("ok", "removed")


def checkpoints_of(run_dir: Path, step: int | None = None) -> list[int]:
    """List the steps to verify, ascending: all, or the given one. Raises ConfigError, one line, for a wrong path or step."""
    directory = CheckpointDirectory(run_dir / CHECKPOINTS)
    try:
        os.listdir(run_dir)
        steps = sorted(directory.steps())
    except OSError as error:
        raise ConfigError(f"{run_dir}: {error.strerror}; name the directory of a run (run.output_dir/run.name)") from None
    if not steps:
        raise ConfigError(f"{run_dir} holds no checkpoint ({CHECKPOINTS}/step-N); `megappo runs {run_dir}` shows what it is")
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step}: {directory.path} has no such checkpoint; there are {', '.join(map(str, steps))}")
    return steps if step is None else [step]


def verify_checkpoint(run_dir: Path, step: int) -> Verified:
    directory = CheckpointDirectory(run_dir / CHECKPOINTS)
    place = directory.step_path(step)
    files = size = 0
    damaged: list[str] = []
    unverified: list[str] = []
    try:
        manifest = directory.read(step)
        files, size = len(manifest.files), manifest.total_bytes
        require_complete(manifest)
        damaged, unverified = _compare(place, manifest)
    except (OSError, RefusedCheckpoint) as error:
        unverified = [str(error)]
    except BROKEN as error:
        damaged = [str(error)]
    faults = damaged + unverified
    if not faults:
        return Verified(step, "ok", files, size, "")
    if not place.exists():
        return Verified(step, "removed", files, size, "")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Verified(step, "damaged" if damaged else "unverified", files, size, faults[0] + more)


def _compare(place: Path, manifest: Manifest) -> tuple[list[str], list[str]]:
    """Return a line for each file that differs from the manifest or is not in it, and a line for each that cannot be read."""
    damaged = [f"{name} is not in the manifest" for name in list_files(place) if name not in manifest.files]
    unverified = []
    # Largest first, so that no thread is left with a large one at the end.
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        checks = {name: pool.submit(find_wrong_content, place, manifest, [name]) for name in names}
    for name, check in sorted(checks.items()):
        try:
            damaged += filter(None, [check.result()])
        except (OSError, RefusedCheckpoint) as error:
            unverified.append(f"{name} cannot be read: {getattr(error, 'strerror', error)}")
    return damaged, unverified


def exit_code(verified: Sequence[Verified]) -> int:
    return int(not all(one.is_sound for one in verified))
