"""Python's garbage collector where many objects are made that stay: while libraries are imported, and while a push is planned.

With Python's own threshold of 700 objects a quarter of the start of a rank (1 s of 4.4, 1.5 s more with vLLM) went into visiting
the million objects of imports again and again.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator

IMPORTING = 20_000  # new objects before a collection; imports take as long with five times as many
_USUAL = gc.get_threshold()


def collect_seldom() -> None:
    """Call it before heavy imports. `freeze_imports` ends it; a command that needs no more than seconds leaves it so."""
    gc.set_threshold(IMPORTING, *_USUAL[1:])


def freeze_imports() -> None:
    """Keep collections off what there is, from now on, and have as many of them as usual. Call it after heavy imports."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries that look for leaks at the end (nanobind's) take the frozen objects for some
    gc.set_threshold(*_USUAL)


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """Context without collections of cycles; what is counted by references is freed as ever.

    The plan of a push is some 100,000 tuples that stay and hold no cycle: without this, half of its time goes into visiting them,
    and all that vLLM keeps with them, as they grow.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:  # not where the caller, or an outer context, has paused it
            gc.enable()
