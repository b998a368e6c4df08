"""Reasons not to take a checkpoint. A resumed run sets only damaged ones aside; all others it leaves as they are. Imports no
torch."""

from __future__ import annotations

from pathlib import Path


class DamagedCheckpoint(ValueError):
    """The files are readable but not as saved: another hash or size, a missing file, or a torn manifest."""


class RefusedCheckpoint(ValueError):
    """A checkpoint that cannot be taken, or not by this process, and may be whole: nothing of it is renamed or removed."""


class UnsafeCheckpoint(RefusedCheckpoint):
    """The checkpoint contains something that megappo never writes. Nothing of it was run."""


def unreadable(error: OSError, path: Path) -> RefusedCheckpoint:
    """Make the refusal for an I/O error, which says nothing about the contents. path: of what was read, if the error names none."""
    return RefusedCheckpoint(
        f"{error.filename or path}: {error.strerror or error}; nothing was renamed or removed: it may be whole, so make it "
        "readable (mount, permissions, disk) and try again"
    )
