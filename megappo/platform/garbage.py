"""Python's garbage collector while libraries are imported: they make a million objects that live as long as the process.

With Python's own threshold of 700 objects a quarter of the start of a rank (1 s of 4.4, 1.5 s more with vLLM) went into visiting
them again and again.
"""

from __future__ import annotations

import atexit
import gc

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
