"""Reward code of the user: a function of a Python file, or an entry point of the group `megappo.rewards`.

A configuration names it, a data record never does. The code is loaded once, before a model is built, and runs in the ranks with
their rights.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.abc import SourceLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from megappo.error_text import first_line
from megappo.rewards.inline import InlinePart

GROUP = "megappo.rewards"


@dataclass(frozen=True)
class OwnRule:
    """Loaded reward code. call: takes a `RewardInput`, or a list of them if `batch`; its args are bound.

    requires: `answer`, and fields that every record must have. file, source, sha256: of its code; None if it has none.
    """

    name: str
    call: Callable[[Any], Any]
    batch: bool
    requires: tuple[str, ...]
    file: str | None
    source: bytes | None
    sha256: str | None

    def part(self) -> InlinePart:
        """The rule as a part of a reward."""
        return InlinePart(self.name, self.call, batch=self.batch, place=self.place)

    def place(self, error: BaseException) -> str:
        """` (mine.py:12)`: the innermost line of the rule's file that the error passed; empty if it passed none."""
        return _innermost(error, self.file)


def load_from_file(
    name: str, path: str, function: str, *, batch: bool, args: Mapping[str, Any], source: bytes | None = None
) -> OwnRule:
    """Run the file and take its function. source: its content, as read before.

    ValueError, one line: no such file or function, an exception while importing (with file and line), arguments that do not fit.
    """
    file = Path(path)
    source = read_code(path) if source is None else source
    digest = hashlib.sha256(source).hexdigest()
    module = _import(str(file), source, f"_megappo_reward_{digest[:16]}_{hashlib.sha256(path.encode()).hexdigest()[:16]}")
    found = getattr(module, function, None)
    if found is None:
        functions = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise ValueError(f"defines no {function}; its functions: {', '.join(functions) or 'none'}")
    return _rule(name, found, f"{file.name}: {function}", str(file), source, batch, args)


def read_code(path: str) -> bytes:
    """Content of a file of rules. ValueError, one line, if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}; the path is relative to the working directory") from None


def load_from_entry_point(name: str, entry_point: str, *, batch: bool, args: Mapping[str, Any]) -> OwnRule:
    """Take the function that an installed package offers. ValueError, one line, as `load_from_file`."""
    offered = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if entry_point not in offered:
        known = ", ".join(sorted(offered)) or "none"
        raise ValueError(f"no installed package has this entry point in the group {GROUP}; installed: {known}")
    try:
        found = offered[entry_point].load()
    except (Exception, SystemExit) as error:  # anything that the package does
        raise ValueError(
            f"{offered[entry_point].value} cannot be imported: {first_line(error, kind=True)}{_innermost(error, None)}"
        ) from error
    file = inspect.getsourcefile(found) if inspect.isfunction(found) else None
    source = Path(file).read_bytes() if file is not None and Path(file).is_file() else None
    return _rule(name, found, offered[entry_point].value, file, source, batch, args)


class _Source(SourceLoader):
    """Loader of bytes that were read and hashed before: no cached bytecode, none written beside the user's file."""

    def __init__(self, path: str, source: bytes) -> None:
        self._path, self._source = path, source

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str) -> bytes:
        if path != self._path:
            raise OSError(path)
        return self._source


def _import(path: str, source: bytes, module_name: str) -> ModuleType:
    """Module of a file, made once per content: two rules of one file share its state."""
    if (known := sys.modules.get(module_name)) is not None:
        return known
    spec = importlib.util.spec_from_loader(module_name, _Source(path, source))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[module_name]
        raise ValueError(f"cannot be imported: {type(error).__name__}: {error.msg} (line {error.lineno})") from None
    except (Exception, SystemExit) as error:  # anything that the file does
        del sys.modules[module_name]
        raise ValueError(f"cannot be imported: {first_line(error, kind=True)}{_innermost(error, path)}") from error
    return module


def _rule(
    name: str, found: Any, origin: str, file: str | None, source: bytes | None, batch: bool, args: Mapping[str, Any]
) -> OwnRule:
    """Check what was found and bind its args."""
    if inspect.isclass(found) or not callable(found):
        raise ValueError(f"{origin} is {'a class' if inspect.isclass(found) else type(found).__name__}, not a function")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise ValueError(f"{origin} is a coroutine or a generator; a rule returns its score")
    takes = "a list of samples" if batch else "one sample"
    try:
        signature = inspect.signature(found)
    except ValueError:  # a function of C has none; its first call shows
        signature = None
    if signature is not None:
        try:
            signature.bind(object(), **args)
        except TypeError as error:
            given = f"{takes} and args {', '.join(args)}" if args else takes
            raise ValueError(f"{origin}{signature} cannot be called with {given}: {error}") from None
    requires = getattr(found, "requires", ())
    if not isinstance(requires, (tuple, list)) or not all(isinstance(field, str) for field in requires):
        raise ValueError(f"{origin}.requires is {requires!r}, not a tuple of names")
    sha256 = None if source is None else hashlib.sha256(source).hexdigest()
    return OwnRule(name, functools.partial(found, **args), batch, tuple(requires), file, source, sha256)


def _innermost(error: BaseException, file: str | None) -> str:
    """Place in `file` where the error passed last, or its origin if file is None."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file is None or frame.filename == file]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
