"""The real GSM8K files, which lie beside the repository where there are any; tests that need them are skipped elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(not (DIRECTORY / "train.jsonl").is_file(), reason="shared/data/gsm8k is not beside the repository")


def gsm8k(*splits: str) -> list[dict[str, str]]:
    """Records {question, answer} of these splits: train has 7,473 and test 1,319."""
    return [json.loads(line) for split in splits for line in (DIRECTORY / f"{split}.jsonl").read_bytes().splitlines()]
