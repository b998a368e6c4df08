"""Freed memory of a rank's process: how much of it malloc keeps for the next allocation.

By its own rule glibc keeps twice the largest block that was freed and returns the rest to the system, which clears each page
anew: a seventh of a rank's work on experience, whose buffers of some MiB come and go in every exchange of a step.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 128 << 20
MAPPED_FROM = 32 << 20  # larger blocks go back one by one, as ever: the largest threshold that glibc takes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt


def keep_freed_memory() -> bool:
    """Let malloc keep up to KEPT_BYTES for later blocks of less than MAPPED_FROM. False if the C library has no such rule."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*rule) for rule in ((_MMAP_THRESHOLD, MAPPED_FROM), (_TRIM_THRESHOLD, KEPT_BYTES)))
