"""Permissions of the files of a run: `run.permissions` as the process's umask. Imports nothing heavy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Permissions = Literal["private", "group", "world"]

# Bits that new files do not get. Nobody but the owner writes: whoever can write a checkpoint can change what a run learns.
_MASKS: dict[Permissions, int] = {"private": 0o077, "group": 0o027, "world": 0o022}


def apply_permissions(permissions: Permissions) -> None:
    """Set the umask of this process and of those that it starts. Call it before the run writes anything."""
    os.umask(_MASKS[permissions])


def open_to_readers_of(folder: Path, file: Path) -> None:
    """Let the readers of a folder read a file that its writer made private; safetensors ignores the umask."""
    file.chmod(folder.stat().st_mode & 0o666)
