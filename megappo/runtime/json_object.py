"""JSON objects in text that others wrote: a model's files, lines of data."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from megappo.runtime.error_text import first_line


class NestedTooDeeply(ValueError):
    """Text nested deeper than Python's own limit."""


def parse_object(content: bytes, what: str, *, finite: bool = False) -> dict[str, Any]:
    """The object that `content` holds, in UTF-8. finite: refuse NaN and Infinity, which JSON lacks and transformers writes.

    ValueError, one line that begins with `what`: no UTF-8, no JSON, or something else than an object; NestedTooDeeply.
    """
    try:
        value = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant if finite else None)
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not valid JSON: byte {error.start} is not UTF-8; save it as UTF-8") from error
    except RecursionError:
        raise NestedTooDeeply(f"{what} is not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} is not valid JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a JSON {type(value).__name__}, not an object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")
