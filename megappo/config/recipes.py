"""The recipes that come with megappo: configurations with the values of papers, from configs/recipes of the repository."""

from __future__ import annotations

import difflib
from pathlib import Path

from megappo.config.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]


def recipe(name: str) -> str:
    """Return the text of a recipe, comments included. Raises ConfigError for an unknown name."""
    known = {path.stem: path for path in sorted(_folder().glob("*.yaml"))}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--recipe {name}: no such recipe; {hint}known: {', '.join(known)}")
    return known[name].read_text(encoding="utf-8")


def _folder() -> Path:
    # An installed package has a copy (setup.py). A checkout, and an editable installation of it, have the files themselves.
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs" / "recipes"
