"""Verification of checkpoints before anything in them is opened: manifest, required files, sizes, hashes.

Collective, with the files divided among the ranks, which all return or raise the same. A wrong hash or size, and a file that no
rank sees, are damage; an I/O error, and a file that only some ranks see, refuse and touch nothing. Hashing takes about as long as a
load and can run in a thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.files import FileEntry
from megappo.checkpoint.manifest import (
    DamagedCheckpoint,
    Manifest,
    RefusedCheckpoint,
    UnsafeCheckpoint,
    find_wrong_content,
    find_wrong_size,
    require_complete,
    unreadable,
)
from megappo.parallel.consensus import on_every_rank, on_rank_zero, warn_once

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ANEW = "start anew without --resume, under another run.name"  # the old directory holds a run


_Look = tuple[str | None, ValueError | None, str | None]
"""T of a check on one rank: damage, a refusal, the path of a file that is missing there."""


class Verification:
    """Check of one checkpoint's content in a thread, after its manifest and file sizes. Both methods are collective. manifest: not
    to be trusted before `finish`."""

    def __init__(self, directory: CheckpointDirectory, step: int) -> None:
        """Start the check. DamagedCheckpoint or RefusedCheckpoint, on every rank, for what is found at once."""
        self._directory = directory
        self.manifest = _on_rank_zero("reading the manifest", lambda: _read_complete(directory, step))
        # Any rank can hash any file: the directory is shared.
        mine = _equal_shares(self.manifest.files, dist.get_world_size())[dist.get_rank()]
        # Sizes first: they find a torn file without reading gigabytes.
        sizes = on_every_rank("comparing sizes", lambda: self._look(find_wrong_size, mine))
        _raise_first(directory, step, sizes)
        self._found: _Look | Exception = (None, None, None)
        # A daemon: a start that fails meanwhile does not wait for it.
        self._thread = threading.Thread(target=self._hash, args=(mine,), name="verification", daemon=True)
        self._thread.start()

    def _hash(self, mine: list[str]) -> None:
        try:
            self._found = self._look(find_wrong_content, mine)
        except Exception as error:  # raised by `finish`, in the thread that waits
            self._found = error

    def _look(self, check: Callable[[Path, Manifest, list[str]], str | None], mine: list[str]) -> _Look:
        return _look(lambda: check(self._directory.step_path(self.manifest.step), self.manifest, mine))

    def finish(self) -> Manifest:
        """Wait until all ranks have hashed their files; return the manifest. DamagedCheckpoint or RefusedCheckpoint on every
        rank."""

        def found() -> _Look:
            self._thread.join()
            if isinstance(self._found, Exception):
                raise self._found
            return self._found

        _raise_first(self._directory, self.manifest.step, on_every_rank("verifying the checkpoint", found))
        return self.manifest


def newest_verified(directory: CheckpointDirectory, skip: Collection[int] = ()) -> Manifest:
    """Return the newest valid checkpoint that is not in `skip`. Under a lease, damaged ones are renamed to bad-step-N. Collective.
    ValueError if there is none; RefusedCheckpoint if a newer one cannot be read."""
    return _newest(directory, skip, verify)


def begin_with_newest(directory: CheckpointDirectory, skip: Collection[int] = ()) -> Verification:
    """Find the newest checkpoint as `newest_verified` does, its content still to be verified: call `finish`, and
    `set_damaged_aside` if that finds damage."""
    return _newest(directory, skip, Verification)


def _newest(directory: CheckpointDirectory, skip: Collection[int], check: Callable[[CheckpointDirectory, int], T]) -> T:
    steps = _on_rank_zero("looking for checkpoints", lambda: _tidy_steps(directory))
    damaged = 0
    for step in steps:
        if step in skip:
            continue
        try:
            return check(directory, step)
        except DamagedCheckpoint as error:
            damaged += 1
            set_damaged_aside(directory, step, error)
    if not steps and not on_rank_zero("looking for checkpoints", directory.path.exists):
        raise RefusedCheckpoint(f"{directory.path} does not exist on rank 0; mount its file system, or {_ANEW}")
    passed_over = [step for step in steps if step in skip]
    if passed_over:
        found = f"no valid checkpoint besides those passed over ({', '.join(f'step-{step}' for step in passed_over)})"
    else:
        found = f"{damaged} damaged checkpoints and no valid one" if damaged else "no checkpoint"
    raise ValueError(f"{directory.path} holds {found}; {_ANEW}")


def set_damaged_aside(directory: CheckpointDirectory, step: int, damage: DamagedCheckpoint) -> None:
    """Rename a damaged checkpoint, under a lease, and log it. Collective."""
    fate = on_rank_zero("setting a damaged checkpoint aside", lambda: _set_aside(directory, step))
    warn_once(logger, "step-%d is damaged (%s); %s, trying the next older one", step, damage, fate)


def verify(directory: CheckpointDirectory, step: int) -> Manifest:
    """Return the manifest of a checkpoint after hashing all its files. DamagedCheckpoint or RefusedCheckpoint, on every rank."""
    return Verification(directory, step).finish()


def _equal_shares(files: Mapping[str, FileEntry], number: int) -> list[list[str]]:
    shares: list[list[str]] = [[] for _ in range(number)]
    sizes = [0] * number
    for name in sorted(files, key=lambda name: (-files[name].bytes, name)):
        least = sizes.index(min(sizes))
        shares[least].append(name)
        sizes[least] += files[name].bytes
    return shares


def _read_complete(directory: CheckpointDirectory, step: int) -> Manifest:
    manifest = directory.read_manifest(step)
    require_complete(manifest)
    return manifest


def _tidy_steps(directory: CheckpointDirectory) -> list[int]:
    directory.remove_leftovers()
    return directory.steps()


def _set_aside(directory: CheckpointDirectory, step: int) -> str:
    if directory.owner is None:
        return "left as it is"
    try:
        return f"renamed to {directory.set_aside(step).name}"
    except OSError as error:
        return f"not renamed ({error.strerror})"


def _look(check: Callable[[], str | None]) -> _Look:
    try:
        return check(), None, None
    except FileNotFoundError as error:
        return None, None, str(error.filename)
    except OSError as error:
        # ESTALE and the like: the path is of this rank's mount, so the rank is named.
        return None, unreadable(error, Path(str(error.filename))), None
    except UnsafeCheckpoint as error:
        return None, error, None


def _raise_first(directory: CheckpointDirectory, step: int, reports: Sequence[tuple]) -> None:
    """Raise the first fault of any rank: refusals first, as they leave the checkpoint alone. Collective."""
    for rank, (_, refusal, _) in enumerate(reports):
        if refusal is not None:
            raise type(refusal)(f"rank {rank}: {refusal}")
    missing = next(((rank, path) for rank, (_, _, path) in enumerate(reports) if path is not None), None)
    if missing is not None:
        rank, path = missing
        seen = on_every_rank("looking for a missing file", lambda: os.path.lexists(path))
        if any(seen):
            raise RefusedCheckpoint(
                f"{path}: not visible on rank {rank}, visible on {sum(seen)} of {len(seen)} ranks; nothing was renamed or removed: "
                "the run directory must be on a file system that all ranks share (is it mounted on every node?)"
            )
        raise DamagedCheckpoint(f"{os.path.relpath(path, directory.step_path(step))} is missing")
    for damage, _, _ in reports:
        if damage is not None:
            raise DamagedCheckpoint(damage)


def _on_rank_zero(what: str, action: Callable[[], T]) -> T:
    """Call `on_rank_zero`; faults of a checkpoint are raised as themselves on every rank."""

    def attempt() -> tuple[Any, ValueError | None]:
        try:
            return action(), None
        except (DamagedCheckpoint, RefusedCheckpoint) as error:
            return None, error

    result, fault = on_rank_zero(what, attempt)
    if fault is None:
        return result
    raise type(fault)(f"rank 0: {fault}" if type(fault) is RefusedCheckpoint else str(fault))
