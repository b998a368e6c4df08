"""Python's collector of reference cycles, paused while a plan is made.

A plan is some 100,000 tuples that stay and hold no cycle. The collector visits them again and again as they grow, and all that vLLM
keeps with them: half of the planning's time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Context without collections of cycles; what is counted by references is freed as ever."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:  # not where the caller, or an outer context, has paused it
            gc.enable()
