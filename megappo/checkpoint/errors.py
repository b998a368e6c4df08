"""Reasons not to take a checkpoint. Damage alone lets a resumed run set it aside; all others touch nothing. Imports no torch."""

from __future__ import annotations

from pathlib import Path


class DamagedCheckpoint(ValueError):
    """The files are readable and are not those that were saved: another hash or size, missing, or a torn manifest."""


class RefusedCheckpoint(ValueError):
    """A checkpoint that cannot be taken, or not by this process, and may be whole: nothing of it is renamed or removed."""


class UnsafeCheckpoint(RefusedCheckpoint):
    """The checkpoint contains something that megappo never writes. Nothing of it was run."""


def unreadable(error: OSError, path: Path) -> RefusedCheckpoint:
    """Refusal for an I/O error, which says nothing of the contents. path: of what was read, if the error does not say."""
    return RefusedCheckpoint(
        f"{error.filename or path}: {error.strerror or error}; nothing was renamed or removed: it may be whole, so make it "
        "readable (mount, permissions, disk) and try again"
    )
