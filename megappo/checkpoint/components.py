"""State of a run's small components in one JSON file: equal on all ranks, and unchanged by a trip through JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.checkpoint.manifest import STATE
from megappo.checkpoint.state import StatefulComponent
from megappo.parallel.consensus import RankFault, on_rank_zero


def encode_components(components: Mapping[str, StatefulComponent]) -> dict[str, str]:
    """Encode every component's state on this rank as JSON. ValueError if one is not plain data. Not collective."""
    return {name: _encode(name, component.state_dict()) for name, component in components.items()}


def digests(encoded: Mapping[str, str]) -> dict[str, bytes]:
    """Return the SHA-256 of every component's state, for `require_equal`."""
    return {name: hashlib.sha256(text.encode()).digest() for name, text in encoded.items()}


def require_equal(everyone: Sequence[Mapping[str, bytes]]) -> None:
    """Raise RankFault if a component's state differs between ranks. everyone: the digests of all ranks, so all raise or none."""
    for name, digest in everyone[0].items():  # only rank 0's is written, so the others must equal it
        differing = [rank for rank, theirs in enumerate(everyone) if theirs.get(name) != digest]
        if differing:
            raise RankFault(f"state of {name} on ranks {differing} differs from rank 0's")


def file_content(encoded: Mapping[str, str]) -> bytes:
    """Return the content of the file with the state of all components."""
    return json.dumps({name: json.loads(text) for name, text in encoded.items()}, indent=1).encode()


def _encode(name: str, state: dict[str, Any]) -> str:
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"state of {name} is not plain data: {error}") from None
    if json.loads(text) != state:
        raise ValueError(f"state of {name} changes on the way through JSON (tuples, or keys that are not strings)")
    return text


def read_components(source: Path, components: Mapping[str, StatefulComponent]) -> dict[str, Any]:
    """Read the state of every component from checkpoint `source`. Collective. ValueError if it holds other components."""
    # Rank 0 reads for all: a rank that failed alone would leave the others waiting.
    state = json.loads(on_rank_zero("reading the trainer's state", lambda: (source / STATE).read_text(encoding="utf-8")))
    if state.keys() != components.keys():
        raise ValueError(
            f"{source.name} holds the state of {sorted(state)}, this run has {sorted(components)}; resume with the same megappo"
        )
    return state
