"""config.json of a checkpoint directory as it stands in the file. `hf_config.py` interprets it. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megappo.json_object import parse_object


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint directory. ValueError if it is missing or not JSON."""
    file = Path(path) / "config.json"
    if not file.is_file():
        what = "has no config.json" if Path(path).is_dir() else "is not a directory"
        raise ValueError(f"{path} {what}; a Hugging Face checkpoint directory is needed")
    return parse_object(file.read_bytes(), str(file))
