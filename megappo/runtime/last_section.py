"""`rank-N.section` of an attempt's folder: the section of a rank that was killed, which can say nothing any more.

A rank writes each of its sections there and removes the file when it ends by itself. Unlike the watchdog's signs of life it is
never old. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

_BYTES = 256  # of the file, padded: a shorter section leaves nothing of a longer one


class SectionFile:
    """The writer's side, from its making to `remove`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = _path(folder, rank)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, section: str, step: int) -> None:
        """2 us: the kernel keeps the page, and writes it after the end of the process too."""
        line = json.dumps({"section": section, "step": step})
        with contextlib.suppress(OSError):  # a full disk ends no section
            os.pwrite(self._descriptor, line.ljust(_BYTES - 1).encode() + b"\n", 0)

    def remove(self) -> None:
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)


def last_section(folder: Path, rank: int) -> str | None:
    """`update_policy, step 3` of a rank that did not end by itself; None if it left none, as before the world was built."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        left = json.loads(_path(folder, rank).read_text(encoding="utf-8"))
        return f"{left['section']}, step {left['step']}" if left["step"] else left["section"]
    return None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.section"
