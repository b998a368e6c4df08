"""Signature of a manifest: HMAC-SHA256 with the key of MEGAPPO_CHECKPOINT_KEY. Without the key nothing is signed or compared.

The manifest lists the hash of every file, so its signature stands for the whole checkpoint. Whoever has the key can sign: it
protects against those who can write to the run directory and cannot read the job's environment.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

from megappo.checkpoint.errors import RefusedCheckpoint

KEY_VARIABLE = "MEGAPPO_CHECKPOINT_KEY"  # `commands/launch/environment.py` hides values of names with KEY


def sign(text: bytes) -> dict[str, str]:
    """The manifest's `hmac` entry; empty without a key."""
    key = _key()
    return {} if key is None else {"hmac": hmac.digest(key, text, "sha256").hex()}


def check_signature(text: bytes, found: Any, name: str) -> None:
    """RefusedCheckpoint if there is a key and `found` is not its signature of `text`. found: anything, None if there is none."""
    wanted = sign(text)
    if not wanted:
        return
    if found is None:
        raise RefusedCheckpoint(
            f"{name} is not signed, and {KEY_VARIABLE} is set; nothing was changed: unset it if you trust whoever can write there"
        )
    if not isinstance(found, str) or not hmac.compare_digest(wanted["hmac"].encode(), found.encode(errors="replace")):
        raise RefusedCheckpoint(
            f"{name} was not signed with the key in {KEY_VARIABLE}; nothing was changed: set the key of the run that saved it"
        )


def _key() -> bytes | None:
    text = os.environ.get(KEY_VARIABLE)
    if text is not None and not text.strip():
        raise RefusedCheckpoint(f"{KEY_VARIABLE} is set and empty; set it to the key, or unset it")
    return None if text is None else os.fsencode(text)
