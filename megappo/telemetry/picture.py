"""Path of a picture that matplotlib, an optional package, draws for a command."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def check_plot(path: str) -> Path:
    """Check the path of the picture. ValueError if it cannot be drawn or written there."""
    target = Path(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot {path}: matplotlib is not installed; pip install 'megappo[plot]'")
    if target.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path}: the name must end in .png, .svg or .pdf")
    if not target.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no directory {target.parent}")
    return target
