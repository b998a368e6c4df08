"""Folder of what megappo keeps between runs and can make anew: verdicts on kernels, tokenised data. Imports nothing of megappo."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MEGAPPO_CACHE"


def cache_dir() -> Path:
    """MEGAPPO_CACHE, else XDG_CACHE_HOME/megappo, else ~/.cache/megappo; it need not exist."""
    if folder := os.environ.get(VARIABLE):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megappo"
