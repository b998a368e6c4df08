"""Check a command's output files and folders before its work starts. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from megappo.config.errors import ConfigError


def check_output_file(option: str, path: str, endings: tuple[str, ...] = ()) -> Path:
    """Return the path after checking that a file can be written there; nothing is changed. option: named in the message. Raises
    ConfigError for a name without one of the `endings`, an unwritable place, and anything there that is no plain file."""
    target = Path(path)
    if endings and target.suffix not in endings:
        *others, last = endings
        raise ConfigError(f"{option} {path}: the name must end in {', '.join(others)}{' or ' if others else ''}{last}")
    try:
        if target.is_dir():
            fault = "is a directory; name a file"
        # A device that is replaced by a file is lost for the whole machine.
        elif target.exists() and not target.is_file():
            fault = "is no plain file; name another"
        elif not target.absolute().parent.is_dir():
            fault = f"there is no directory {target.parent}; name a file in an existing directory"
        elif target.exists() and not os.access(target, os.W_OK):
            fault = "no permission to write there"
        else:
            fault = why_not_writable(target.absolute().parent)
    except OSError as error:  # a name that is too long
        fault = error.strerror
    if fault is not None:
        raise ConfigError(f"{option} {path}: {fault}")
    return target


def why_not_writable(folder: Path) -> str | None:
    """Return why no file can be made in a directory, None if one can. Leaves nothing behind."""
    try:
        # os.access is not enough: root passes it even in /proc and on a read-only disk.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"{folder} cannot be written to: {error.strerror}"
    return None
