"""Compare the ends of two runs bit for bit: every tensor and state of the last checkpoint, and the metrics of every step."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.safe_load import load_index, load_tensors_and_plain_data
from megappo.telemetry.jsonl import read_lines

MEASURED = (
    "time",
    "timing/",
    "throughput/",
    "memory/",
    "perf/tflops/",  # not perf/tflop/, which counts
    "perf/mfu/",
    "perf/hfu/",
    "perf/tokens_per_s/",
    "rollout/push_seconds",
)
"""Prefixes of metrics that the machine and its load decide; all others repeat bit for bit. Tests that compare runs import it."""
# Those that faults and restarts change besides. They are no part of the state.
VOLATILE = (*MEASURED, "checkpoint/", "rollout/push_verified")


@dataclass(frozen=True)
class Comparison:
    """step: of both last checkpoints. tensors, values: how many were compared. differing: names, empty if all bits are equal."""

    step: int
    tensors: int
    values: int
    differing: tuple[str, ...]

    def __str__(self) -> str:
        what = f"{self.tensors} tensors and states of step {self.step}, {self.values} metrics"
        if not self.differing:
            return f"yes ({what})"
        more = f" and {len(self.differing) - 4} more" if len(self.differing) > 4 else ""
        return f"no: {', '.join(self.differing[:4])}{more} (of {what})"


def compare(clean: Path, other: Path) -> Comparison:
    """Compare two run directories. ValueError if one of them has no checkpoint."""
    steps = [_last_step(run) for run in (clean, other)]
    states = [dict(_checkpoint(run / "checkpoints" / f"step-{step}")) for run, step in zip((clean, other), steps)]
    metrics = [dict(_metrics(run / "metrics.jsonl")) for run in (clean, other)]
    differing = [] if steps[0] == steps[1] else [f"last step ({steps[0]}, {steps[1]})"]
    differing += _differing(*states) + _differing(*metrics)
    return Comparison(steps[0], len(states[0]), len(metrics[0]), tuple(differing))


def _last_step(run: Path) -> int:
    manifest = CheckpointDirectory(run / "checkpoints").newest()
    if manifest is None:
        raise ValueError(f"{run} holds no checkpoint to compare")
    return manifest.step


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if name not in one or name not in other or one[name] != other[name])


def _checkpoint(place: Path) -> Iterator[tuple[str, str]]:
    """Name and SHA-256 of every part of a checkpoint: model and optimizer tensors, loop state, random states of all ranks."""
    for engine in sorted((place / "megatron").iterdir()):
        yield from ((f"{engine.name} {name}", digest) for name, digest in _tensors(engine))
        common = load_tensors_and_plain_data(engine / "common.pt", "common.pt")
        yield f"{engine.name} common", _digest(repr(_plain(common)).encode())
    for path in (place / "state.json", *sorted(place.glob("rng-*"))):
        yield path.name, _digest(path.read_bytes())


def _tensors(engine: Path) -> Iterator[tuple[str, str]]:
    for index, entry in load_index((engine / ".metadata").read_bytes()).storage_data.items():
        with (engine / entry.relative_path).open("rb") as file:
            file.seek(entry.offset)
            content = file.read(entry.length)
        value = load_tensors_and_plain_data(io.BytesIO(content), index.fqn)
        where = "" if index.offset is None else f" at {tuple(index.offset)}"
        yield f"{index.fqn}{where}", _digest(_raw(value) if isinstance(value, torch.Tensor) else content)


def _raw(tensor: torch.Tensor) -> bytes:
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return head + bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _plain(value: Any) -> Any:
    """Tensors as their bytes, so that `repr` shows every bit of them."""
    if isinstance(value, torch.Tensor):
        return _raw(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _metrics(path: Path) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(read_lines(path), 1):
        # The line's number is in the name: a step logged twice is a difference.
        yield from (
            (f"{name} of step {row['step']} (line {number})", v) for name, v in row.items() if not name.startswith(VOLATILE)
        )
