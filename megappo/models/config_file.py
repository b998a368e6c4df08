"""config.json of a checkpoint directory as it stands in the file. `hf_config.py` interprets it. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megappo.runtime.json_object import parse_object


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint directory. ValueError if it is missing, unreadable or not JSON."""
    file = Path(path) / "config.json"
    try:
        if not file.is_file() and Path(path).is_dir():
            raise ValueError(f"{path} has no config.json; a Hugging Face checkpoint directory is needed")
        if not file.is_file():
            how = f"`hf download OWNER/NAME --local-dir {path}` fetches a checkpoint; its name on the hub, OWNER/NAME, does as well"
            raise ValueError(f"{path} is not a directory; {how}")
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    return parse_object(content, str(file))
