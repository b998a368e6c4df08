"""The line between a mistake of the user and a fault: the moment at which a command has accepted its input. Imports no torch.

Before it, a ValueError of megappo says what to change: one line, exit code 2. After it, nothing that the user wrote is wrong any
more, and a ValueError needs its traceback (exit code 1: a restart may help).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_MARK = "_raised_on_accepted_input"


@contextlib.contextmanager
def input_accepted(*, unless: tuple[type[ValueError], ...] = ()) -> Iterator[None]:
    """Context of all work on accepted input: a ValueError out of it is a fault.

    unless: errors that still tell the user what to do, as where a command finds that nothing it may choose from works.
    """
    try:
        yield
    except ValueError as error:
        if not isinstance(error, unless):
            setattr(error, _MARK, True)  # not another type: callers and readers of the traceback get the error as it was raised
        raise


def is_fault(error: ValueError) -> bool:
    """True if the error came out of `input_accepted`."""
    return hasattr(error, _MARK)
