"""Verification of checkpoints before anything in them is opened: manifest, required files, sizes, hashes.

Collective, with the files divided among the ranks; `runs/verify.py` does it in one process. All ranks return or raise the same. A
wrong hash or size and a file that nobody sees are damage; an I/O error, and a file that some ranks do not see, refuse and touch
nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megappo.checkpoint.contents import require_complete
from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.errors import DamagedCheckpoint, RefusedCheckpoint, UnsafeCheckpoint, unreadable
from megappo.checkpoint.manifest import FileEntry, Manifest, find_wrong_content, find_wrong_size
from megappo.parallel.consensus import on_every_rank, on_rank_zero, warn_once

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_ANEW = "start anew without --resume, under another run.name"  # the old directory holds a run


def newest_verified(directory: CheckpointDirectory, skip: Collection[int] = ()) -> Manifest:
    """Newest valid checkpoint but those of `skip`. Under a lease, damaged ones are renamed to bad-step-N.

    ValueError if there is none; RefusedCheckpoint if a newer one cannot be read.
    """
    steps = _on_rank_zero("looking for checkpoints", lambda: _tidy_steps(directory))
    damaged = 0
    for step in steps:
        if step in skip:
            continue
        try:
            return verify(directory, step)
        except DamagedCheckpoint as error:
            damaged += 1
            fate = on_rank_zero("setting a damaged checkpoint aside", lambda: _set_aside(directory, step))
            warn_once(logger, "step-%d is damaged (%s); %s, trying the next older one", step, error, fate)
    if not steps and not on_rank_zero("looking for checkpoints", directory.path.exists):
        raise RefusedCheckpoint(f"{directory.path} does not exist on rank 0; mount its file system, or {_ANEW}")
    passed_over = [step for step in steps if step in skip]
    if passed_over:
        found = f"no valid checkpoint besides those passed over ({', '.join(f'step-{step}' for step in passed_over)})"
    else:
        found = f"{damaged} damaged checkpoints and no valid one" if damaged else "no checkpoint"
    raise ValueError(f"{directory.path} holds {found}; {_ANEW}")


def verify(directory: CheckpointDirectory, step: int) -> Manifest:
    """Manifest of a checkpoint after all its files were hashed. DamagedCheckpoint or RefusedCheckpoint, on every rank."""
    manifest = _on_rank_zero("reading the manifest", lambda: _read_complete(directory, step))
    # Any rank can hash any file: the directory is shared.
    mine = _equal_shares(manifest.files, dist.get_world_size())[dist.get_rank()]
    # Only sizes first: they find a torn file without reading gigabytes.
    for what, check in (("comparing sizes", find_wrong_size), ("verifying the checkpoint", find_wrong_content)):
        reports = on_every_rank(what, lambda: _look(lambda: check(directory.step_path(step), manifest, mine)))
        _raise_first(directory, step, reports)
    return manifest


def _equal_shares(files: Mapping[str, FileEntry], number: int) -> list[list[str]]:
    """Divide files into `number` lists of about equally many bytes."""
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


def _look(check: Callable[[], str | None]) -> tuple[str | None, ValueError | None, str | None]:
    """Result of a check on this rank: (damage, refusal, path of a file that is missing here)."""
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
    """Collective. Raise the first fault of any rank: refusals first, as they leave the checkpoint alone."""
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


def _on_rank_zero(what: str, action: Callable[[], Result]) -> Result:
    """`on_rank_zero`, with the faults of a checkpoint raised as themselves on every rank."""

    def attempt() -> tuple[Any, ValueError | None]:
        try:
            return action(), None
        except (DamagedCheckpoint, RefusedCheckpoint) as error:
            return None, error

    result, fault = on_rank_zero(what, attempt)
    if fault is None:
        return result
    raise type(fault)(f"rank 0: {fault}" if type(fault) is RefusedCheckpoint else str(fault))
