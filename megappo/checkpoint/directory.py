"""Directory of a run's checkpoints: list them, publish one atomically, remove old ones. Called on one rank only.

step-20/         complete: its manifest was written before it got this name
.tmp-step-30.x/  being written, or left by a process that was killed; removed before the next save or load
bad-step-10/     damaged, set aside by a load for inspection
LATEST           name of the newest, for people and scripts; loading lists the directories themselves
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from megappo.checkpoint.manifest import Manifest, find_wrong_size, read_manifest, sync_directory, write_synced

LATEST = "LATEST"
_STEP = re.compile(r"step-(\d+)")
_TEMPORARY = ".tmp-"


class CheckpointDirectory:
    """Directory of checkpoints. Names are made from step numbers; links are never followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def step_path(self, step: int) -> Path:
        return self.path / f"step-{step}"

    def steps(self) -> list[int]:
        """Steps of all checkpoints, newest first, damaged ones included."""
        if not self.path.is_dir():
            return []
        found = ((_STEP.fullmatch(entry.name), entry) for entry in self.path.iterdir())
        steps = (int(match[1]) for match, entry in found if match and entry.is_dir() and not entry.is_symlink())
        return sorted(steps, reverse=True)

    def read(self, step: int) -> Manifest:
        """Manifest of a checkpoint whose files all have the right size. ValueError names the fault."""
        manifest = read_manifest(self.step_path(step))
        if manifest.step != step:
            raise ValueError(f"its manifest is that of step {manifest.step}")
        if wrong := find_wrong_size(self.step_path(step), manifest):
            raise ValueError(wrong)
        return manifest

    def newest(self) -> Manifest | None:
        """Manifest of the newest complete checkpoint (sizes are checked, contents are not); None if there is none."""
        for step in self.steps():
            try:
                return self.read(step)
            except ValueError:
                continue  # the load that follows reports the fault and sets it aside
        return None

    def begin(self, step: int, token: str) -> Path:
        """Make an empty directory for a checkpoint. ValueError if the step exists or the disk lacks the space."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.remove_leftovers()
        if self.step_path(step).exists():
            raise ValueError(f"{self.step_path(step)} exists already")
        last = self.newest()
        # 20 % more than the last one: optimizer state may appear after a warm-up.
        needed = int(1.2 * last.total_bytes) if last else 0
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise ValueError(
                f"{self.path} has {free / 2**30:.2f} GiB free, the next checkpoint needs {needed / 2**30:.2f}; free some space"
            )
        place = self.path / f"{_TEMPORARY}step-{step}.{token}"
        place.mkdir()
        return place

    def publish(self, place: Path, step: int) -> None:
        """Give the finished directory its name, in one atomic rename, and point LATEST to it."""
        sync_directory(place)  # its entries must be on the disk before its name says that it is complete
        os.rename(place, self.step_path(step))
        sync_directory(self.path)
        temporary = self.path / f"{_TEMPORARY}{LATEST}"
        write_synced(temporary, self.step_path(step).name + "\n")
        os.replace(temporary, self.path / LATEST)
        sync_directory(self.path)

    def retain(self, keep_last: int, step: int) -> list[int]:
        """Remove all complete checkpoints but the newest `keep_last` and `step`. Damaged ones stay and do not count."""
        complete = [candidate for candidate in self.steps() if self._is_complete(candidate)]
        excess = [candidate for candidate in complete[keep_last:] if candidate != step]
        for candidate in excess:
            # Renamed first: a kill during the removal leaves no half checkpoint under a valid name.
            doomed = self.path / f"{_TEMPORARY}removed-step-{candidate}"
            os.rename(self.step_path(candidate), doomed)
            shutil.rmtree(doomed)
        return excess

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint to bad-step-N, so that it is not tried again."""
        target, attempt = self.path / f"bad-step-{step}", 1
        while target.exists():
            attempt += 1
            target = self.path / f"bad-step-{step}.{attempt}"
        os.rename(self.step_path(step), target)
        return target

    def remove_leftovers(self) -> None:
        """Remove leftovers of killed or failed saves."""
        if not self.path.is_dir():
            return
        for entry in self.path.iterdir():
            if entry.name.startswith(_TEMPORARY):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def _is_complete(self, step: int) -> bool:
        try:
            self.read(step)
        except ValueError:
            return False
        return True
