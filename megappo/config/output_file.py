"""Files and folders that a command is asked to write: refused in one line before its work, not after it. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from megappo.config.errors import ConfigError


def check_output_file(option: str, path: str, endings: tuple[str, ...] = ()) -> Path:
    """Check that a file can be written at `path`, which stays as it is. option, endings: for the message, and of the name.

    ConfigError for another ending, a place that cannot be written to, and what is there and no plain file: a device that is
    replaced is lost for the whole machine.
    """
    target = Path(path)
    if endings and target.suffix not in endings:
        *others, last = endings
        raise ConfigError(f"{option} {path}: the name must end in {', '.join(others)}{' or ' if others else ''}{last}")
    try:
        if target.is_dir():
            fault = "is a directory; name a file"
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
    """Reason why no file can be made in a directory, None if one can. Nothing stays there."""
    try:
        # Permissions are no answer: root has all of them, in /proc and on a disk that is mounted read-only too.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"{folder} cannot be written to: {error.strerror}"
    return None
