"""Path of a picture that matplotlib, an optional package, draws for a command."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from megappo.config.output_file import check_output_file


def check_plot(path: str) -> Path:
    """Check the path of the picture. ValueError if it cannot be drawn or written there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot {path}: matplotlib is not installed; pip install 'megappo[plot]'")
    return check_output_file("--plot", path, (".png", ".svg", ".pdf"))
