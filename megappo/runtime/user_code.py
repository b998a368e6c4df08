"""The user's code that a configuration names: a function of a Python file, or an entry point of an installed package. Data records
never name code. It is loaded once, before a model is built, and runs in the ranks with their rights."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.abc import SourceLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from megappo.runtime.helper_process import FAILED
from megappo.runtime.messages import first_line

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Of a reason, or of a number inside a result: part of a metric's name."""
UNDECIDED, DIED = "undecided", "died"
"""Reasons of megappo's own: what judges ran out of time or returned None; its process or sandbox died."""


class NoVerdict(Exception):
    """A judge of a sample, a part of the reward or an environment, cannot do so, which says nothing about the response. Without a
    verdict of a weighted part the sample has no score: it is trained on by no model and counted in `reward/no_verdict/REASON`.
    Raise it in code of your own."""

    def __init__(self, reason: str = UNDECIDED) -> None:
        """reason: a word under which such samples are counted. ValueError, one line, for a text that is no name of a metric."""
        if not isinstance(reason, str) or not NAME.fullmatch(reason):
            raise ValueError(f"NoVerdict({reason!r}): its reason names a metric; use letters, digits and . _ - (64 at most)")
        super().__init__(reason)
        self.reason = reason


ANSWERED, NO_VERDICT = "answered", "no verdict"
"""Words of `answer_of`, beside `helper_process.FAILED`."""


@dataclass(frozen=True)
class OwnFunction:
    """A loaded function. file, source, sha256: of its code; None if it has none."""

    call: functools.partial[Any]
    """The function with its args bound."""
    origin: str
    """Name in messages, `mine.py: score`."""
    file: str | None
    source: bytes | None

    @property
    def sha256(self) -> str | None:
        return None if self.source is None else hashlib.sha256(self.source).hexdigest()

    def reads(self, attribute: str) -> bool:
        """True if the file of the function reads an attribute of this name, as far as its text tells."""
        return self.source is not None and re.search(rb"\.%s\b" % attribute.encode(), self.source) is not None

    def place(self, error: BaseException) -> str:
        """Return ` (mine.py:12)`, the innermost line of the function's file that the error passed; empty if it passed none."""
        return innermost(error, self.file)


def answer_of(function: OwnFunction, argument: Any) -> tuple[str, Any]:
    """Call the function; return ANSWERED with its result, NO_VERDICT with the reason of the `NoVerdict` that it raised, or FAILED
    with a line on how it failed."""
    try:
        return ANSWERED, function.call(argument)
    except NoVerdict as none:
        return NO_VERDICT, none.reason
    except (Exception, SystemExit) as error:  # any fault of the user's code: the rank names the sample, and stops the run
        return FAILED, f"raised {type(error).__name__}: {error}{function.place(error)}"


@dataclass(frozen=True)
class OwnCode:
    """Place of a function: a file, or, if `path` is None, the entry points of `group`. args: keyword arguments for
    it."""

    group: str
    path: str | None
    function: str | None
    entry_point: str | None
    args: Mapping[str, Any]
    source: bytes | None = None
    """Bytes of the file as they were read before; None to read it."""

    def load(self, use: Use) -> OwnFunction:
        """Import the function. ValueError, one line: no such file, function or entry point, an exception during the import (with
        file and line), arguments that do not fit."""
        if self.path is None:
            return _function_of_entry_point(self.group, str(self.entry_point), use, self.args)
        source = read_code(self.path) if self.source is None else self.source
        return _function_of_file(self.path, str(self.function), use, self.args, source)

    def as_read(self, function: OwnFunction) -> OwnCode:
        """Return the same place with the bytes that were loaded and hashed; an installed package is imported again."""
        return self if self.path is None else replace(self, source=function.source)


@dataclass(frozen=True)
class Use:
    """Use of a function, for messages. takes: its argument, `one sample`. gives: what it should do instead of being a coroutine."""

    takes: str
    gives: str


def _function_of_file(path: str, name: str, use: Use, args: Mapping[str, Any], source: bytes) -> OwnFunction:
    digest = hashlib.sha256(source).hexdigest()
    module = _import(path, source, f"_megappo_own_{digest[:16]}_{hashlib.sha256(path.encode()).hexdigest()[:16]}")
    found = getattr(module, name, None)
    if found is None:
        functions = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise ValueError(f"defines no {name}; its functions: {', '.join(functions) or 'none'}")
    return _function(found, f"{Path(path).name}: {name}", path, source, use, args)


def _function_of_entry_point(group: str, name: str, use: Use, args: Mapping[str, Any]) -> OwnFunction:
    offered = {entry.name: entry for entry in importlib.metadata.entry_points(group=group)}
    if name not in offered:
        known = ", ".join(sorted(offered)) or "none"
        raise ValueError(f"no installed package has this entry point in the group {group}; installed: {known}")
    try:
        found = offered[name].load()
    except (Exception, SystemExit) as error:  # anything that the package does
        raise ValueError(
            f"{offered[name].value} cannot be imported: {first_line(error, kind=True)}{innermost(error, None)}"
        ) from error
    file = inspect.getsourcefile(found) if inspect.isfunction(found) else None
    source = Path(file).read_bytes() if file is not None and Path(file).is_file() else None
    return _function(found, offered[name].value, file, source, use, args)


def read_code(path: str) -> bytes:
    """Read a file of code. ValueError, one line, if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}; the path is relative to the working directory") from None


def innermost(error: BaseException, file: str | None) -> str:
    """Return the place in `file` where the error passed last, or its origin if file is None."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file is None or frame.filename == file]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


class _Source(SourceLoader):
    """Loader of bytes that were read and hashed before: uses no cached bytecode and writes none beside the user's file."""

    def __init__(self, path: str, source: bytes) -> None:
        self._path, self._source = path, source

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str) -> bytes:
        if path != self._path:
            raise OSError(path)
        return self._source


def _import(path: str, source: bytes, module_name: str) -> ModuleType:
    # Once per content: two functions of one file share its state
    if (known := sys.modules.get(module_name)) is not None:
        return known
    spec = importlib.util.spec_from_loader(module_name, _Source(path, source))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    _find_neighbours(path)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[module_name]
        raise ValueError(f"cannot be imported: {type(error).__name__}: {error.msg} (line {error.lineno})") from None
    except (Exception, SystemExit) as error:  # anything that the file does
        del sys.modules[module_name]
        raise ValueError(f"cannot be imported: {first_line(error, kind=True)}{innermost(error, path)}") from error
    return module


def _find_neighbours(path: str) -> None:
    """Let the file import modules beside it and in the working directory."""
    # Behind all others, so that a random.py there replaces no library's; for good, as a function may import when it is called.
    for folder in (os.path.dirname(os.path.abspath(path)), os.getcwd()):
        if folder not in sys.path:
            sys.path.append(folder)


def _function(found: Any, origin: str, file: str | None, source: bytes | None, use: Use, args: Mapping[str, Any]) -> OwnFunction:
    if inspect.isclass(found) or not callable(found):
        raise ValueError(f"{origin} is {'a class' if inspect.isclass(found) else type(found).__name__}, not a function")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise ValueError(f"{origin} is a coroutine or a generator; {use.gives}")
    _require_fit(found, origin, use, args)
    call: Callable[..., Any] = found
    return OwnFunction(functools.partial(call, **args), origin, file, source)


def _require_fit(found: Any, origin: str, use: Use, args: Mapping[str, Any]) -> None:
    """Raise ValueError if the function does not take its argument and these args."""
    try:
        signature = inspect.signature(found)
    except ValueError:  # a function of C has none; its first call shows
        return
    try:
        signature.bind(object(), **args)
    except TypeError as error:
        given = f"{use.takes} and args {', '.join(args)}" if args else use.takes
        raise ValueError(f"{origin}{signature} cannot be called with {given}: {error}") from None
