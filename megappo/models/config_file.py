"""config.json of a checkpoint directory as it stands in the file. `hf_config.py` interprets it. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint directory. ValueError if it is missing or not JSON."""
    file = Path(path) / "config.json"
    if not file.is_file():
        what = "has no config.json" if Path(path).is_dir() else "is not a directory"
        raise ValueError(f"{path} {what}; a Hugging Face checkpoint directory is needed")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{file} is not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return config
