"""Directory of a run's checkpoints: list them, publish one atomically, remove old ones. Called on one rank only.

step-20/            complete: its manifest was written before it got this name
.tmp-step-30.x/     being written under lease x (`runtime/lease.py`), or left by a process that was killed
bad-step-10/        damaged, set aside by a resumed run for inspection
abandoned-step-40/  newer than the checkpoint that a run went on from
LATEST              name of the newest, for people and scripts; loading lists the directories themselves
BEST                name of the best by `trainer.keep_best`, in the same way

Only a process that holds the run's lease renames or removes anything that it did not write.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from megappo.checkpoint.files import sync_directory
from megappo.checkpoint.manifest import (
    DamagedCheckpoint,
    Manifest,
    RefusedCheckpoint,
    UnsafeCheckpoint,
    find_wrong_size,
    read_manifest,
    unreadable,
    write_synced,
)

logger = logging.getLogger(__name__)

LATEST, BEST_NAME = "LATEST", "BEST"
_STEP = re.compile(r"step-(\d+)")
_TEMPORARY = ".tmp-"


class CheckpointDirectory:
    """Directory of checkpoints. Names are made from step numbers; links are never followed. owner: id of the run's lease that this
    process holds; None leaves everything that others wrote as it is."""

    def __init__(self, path: Path, owner: str | None = None) -> None:
        self.path = path
        self.owner = owner
        self._removal: threading.Thread | None = None

    def step_path(self, step: int) -> Path:
        return self.path / f"step-{step}"

    def steps(self) -> list[int]:
        """List the steps of all checkpoints, newest first, damaged ones included. RefusedCheckpoint if the directory cannot be
        listed."""
        try:
            with os.scandir(self.path) as entries:
                found = [(_STEP.fullmatch(entry.name), entry) for entry in entries]
                steps = [int(match[1]) for match, entry in found if match and entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError as error:
            if os.path.lexists(self.path):  # a link to a file system that is not mounted
                raise unreadable(error, self.path) from None
            return []
        except OSError as error:
            raise unreadable(error, self.path) from None
        return sorted(steps, reverse=True)

    def read_manifest(self, step: int) -> Manifest:
        """Read a checkpoint's manifest; errors as `manifest.read_manifest`, and RefusedCheckpoint if it belongs to another step."""
        path = self.step_path(step)
        try:
            is_link = path.is_symlink()
        except OSError as error:  # of a directory that can be listed and not searched
            raise unreadable(error, path) from None
        if is_link:
            raise UnsafeCheckpoint(f"{path} is a symbolic link, which megappo never makes")
        manifest = read_manifest(path)
        if manifest.step != step:
            raise RefusedCheckpoint(
                f"{path}: its manifest is that of step {manifest.step}; give it back the name step-{manifest.step}"
            )
        return manifest

    def read(self, step: int) -> Manifest:
        """Read the manifest of a checkpoint whose files all have the right size. DamagedCheckpoint names the fault,
        RefusedCheckpoint a file that cannot be looked at."""
        manifest = self.read_manifest(step)
        try:
            wrong = find_wrong_size(self.step_path(step), manifest)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{error.filename} is missing") from None
        except OSError as error:
            raise unreadable(error, self.step_path(step)) from None
        if wrong:
            raise DamagedCheckpoint(wrong)
        return manifest

    def newest(self) -> Manifest | None:
        """Read the newest complete manifest (sizes are checked, contents are not); None if there is none. RefusedCheckpoint if a
        newer one cannot be read."""
        for step in self.steps():
            try:
                return self.read(step)
            except DamagedCheckpoint:
                continue  # the load that follows reports the fault and sets it aside
        return None

    def begin(self, step: int) -> Path:
        """Make an empty directory for a checkpoint. ValueError if the step exists or the disk lacks the space."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.remove_leftovers()
        if os.path.lexists(self.step_path(step)):
            raise ValueError(f"{self.step_path(step)} exists already")
        last = next(self._complete(), None)
        # 20 % more than the last one: optimizer state may appear after a warm-up.
        needed = int(1.2 * last.total_bytes) if last else 0
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise ValueError(f"{self.path} has {_size(free)} free, the next checkpoint needs {_size(needed)}; free some space")
        place = _free_name(self.path, f"{_TEMPORARY}step-{step}.{self.owner or secrets.token_hex(4)}")
        place.mkdir()
        return place

    def publish(self, place: Path, step: int) -> None:
        """Give the finished directory its name in one atomic rename, and point LATEST to it."""
        sync_directory(place)  # its entries must be on the disk before its name says that it is complete
        os.rename(place, self.step_path(step))
        sync_directory(self.path)
        self.point_latest_to(step)

    def point_latest_to(self, step: int) -> None:
        """Write LATEST in one atomic replacement. Failure is only a warning."""
        self._point(LATEST, step)

    def point_best_to(self, step: int | None) -> None:
        """Write BEST in the same way; None removes it."""
        if step is not None:
            self._point(BEST_NAME, step)
        elif os.path.lexists(self.path / BEST_NAME):
            _remove(self.path / BEST_NAME)

    def _point(self, name: str, step: int) -> None:
        temporary = self.path / f"{_TEMPORARY}{name}"
        try:
            write_synced(temporary, self.step_path(step).name + "\n")
            os.replace(temporary, self.path / name)
            sync_directory(self.path)
        except OSError as error:  # no load reads it, and the checkpoint that it should name is complete
            logger.warning("%s cannot be pointed to step-%d: %s", self.path / name, step, error.strerror)

    def retain(self, keep_last: int, keep: Collection[int | None], *, wait: bool = True) -> list[int]:
        """Remove all complete checkpoints but the newest `keep_last` and the steps `keep`; return the removed steps. Damaged ones
        stay and do not count. One that cannot be removed is a warning. Without `wait` they lose their names now and a thread
        removes the files."""
        complete = [manifest.step for manifest in self._complete()]
        doomed = {step: self._hide(step) for step in complete[keep_last:] if step not in keep}
        hidden = [path for path in doomed.values() if path is not None]
        if wait:
            _remove_all(hidden)
        elif hidden:
            self.finish_removal()
            # A disk takes 0.1 s and more for a large file
            self._removal = threading.Thread(target=_remove_all, args=(hidden,), name="removal of checkpoints")
            self._removal.start()
        return [step for step, path in doomed.items() if path is not None]

    def finish_removal(self) -> None:
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint to bad-step-N, so that it is not tried again."""
        return self._rename(step, f"bad-step-{step}")

    def abandon_newer(self, step: int) -> list[tuple[int, Path]]:
        """Under a lease, rename checkpoints newer than `step` to abandoned-step-N and point LATEST to `step`, from which the run
        goes on and will save their steps again. Returns (step, new path) of each."""
        if self.owner is None:
            return []
        # First, and always: LATEST must not name a checkpoint that is gone, after a kill between the renames or a newer one set
        # aside.
        self.point_latest_to(step)
        return [(newer, self._rename(newer, f"abandoned-step-{newer}")) for newer in self.steps() if newer > step]

    def remove_leftovers(self) -> None:
        """Under a lease, remove leftovers of killed or failed saves. One that cannot be removed is a warning."""
        self.finish_removal()
        # Holding the lease means that the writers of other leases' leftovers are gone.
        if self.owner is None or not self.path.is_dir():
            return
        for entry in sorted(self.path.iterdir()):
            if entry.name.startswith(_TEMPORARY):
                _remove(entry)

    def _complete(self) -> Iterator[Manifest]:
        """Yield manifests of complete checkpoints, newest first; others are skipped, as a save does not depend on them."""
        for step in self.steps():
            try:
                yield self.read(step)
            except RefusedCheckpoint as error:
                logger.warning("checkpoint of step %d is passed over: %s", step, error)
            except DamagedCheckpoint:
                continue  # stays for a person to look at

    def _hide(self, step: int) -> Path | None:
        # Renamed first: a kill during the removal leaves no half checkpoint under a valid name.
        doomed = _free_name(self.path, f"{_TEMPORARY}removed-step-{step}")
        try:
            os.rename(self.step_path(step), doomed)
        except OSError as error:
            logger.warning("old checkpoint %s cannot be removed: %s", self.step_path(step), error.strerror)
            return None
        return doomed

    def _rename(self, step: int, name: str) -> Path:
        target = _free_name(self.path, name)
        os.rename(self.step_path(step), target)
        return target


def _free_name(folder: Path, name: str) -> Path:
    target, attempt = folder / name, 1
    while os.path.lexists(target):
        attempt += 1
        target = folder / f"{name}.{attempt}"
    return target


def _remove_all(entries: Sequence[Path]) -> None:
    for entry in entries:
        _remove(entry)


def _remove(entry: Path) -> None:
    """Remove a file, a link or a directory as far as possible; the rest is a warning."""
    failed: list[tuple[str, BaseException]] = []
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, onerror=lambda _, path, fault: failed.append((path, fault[1])))
    else:
        try:
            entry.unlink()
        except OSError as error:
            failed.append((str(entry), error))
    if failed:  # it costs disk space and nothing else; the next save tries again
        path, error = failed[0]
        logger.warning("%s cannot be removed: %s: %s", entry, path, getattr(error, "strerror", error))


def _size(num_bytes: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.2f} {unit}"
    return f"{num_bytes} bytes"
