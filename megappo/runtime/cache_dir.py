"""Folder of what megappo keeps between runs and can make anew: verdicts on kernels, tokenised data. Imports nothing of megappo."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MEGAPPO_CACHE"


def cache_dir() -> Path:
    """MEGAPPO_CACHE, else XDG_CACHE_HOME/megappo, else ~/.cache/megappo; it need not exist. ValueError if the user has no home."""
    if folder := os.environ.get(VARIABLE):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megappo"
    except RuntimeError:  # a container's user without a name, and no HOME
        raise ValueError(f"no home directory for the cache of prepared data: set {VARIABLE} to a folder of yours") from None
