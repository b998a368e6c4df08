"""Compare the ends of two runs bit for bit: every tensor and state of the last checkpoint, and the metrics of every step; or only
what they were trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import POSITION, SHARD
from megappo.telemetry.jsonl import read_lines

MEASURED = (
    "time",
    "timing/",
    "throughput/",
    "memory/",
    "perf/tflops/",  # not perf/work_tflop/, which counts
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
    """step: of both last checkpoints. tensors, values, samples: how many were compared. differing: names, empty if all agree."""

    step: int
    tensors: int
    values: int
    differing: tuple[str, ...]
    samples: int = 0

    def __str__(self) -> str:
        what = f"{self.tensors} tensors and states of step {self.step}, {self.values} metrics"
        what = f"{self.samples:,} samples of {self.step} steps, none lost, none twice" if self.samples else what
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


def compare_samples(clean: Path, other: Path) -> Comparison:
    """Compare the prompts of all samples of every step, as the trajectories name them, and the ledgers of the last checkpoints.
    Texts and weights of an asynchronous run are the clock's. ValueError if one of them has no checkpoint."""
    steps = [_last_step(run) for run in (clean, other)]
    found = [dict(_samples(run)) for run in (clean, other)]
    states = [run / "checkpoints" / f"step-{step}" / "state.json" for run, step in zip((clean, other), steps)]
    ledgers = [json.loads(path.read_text("utf-8"))["loader"]["ledger"] for path in states]
    differing = _differing(*found) + (["ledger"] if ledgers[0] != ledgers[1] else [])
    return Comparison(steps[0], 0, 0, tuple(differing), len(found[0]) - 1)


def _samples(run: Path) -> Iterator[tuple[str, str]]:
    for path in sorted((run / "trajectories").iterdir()):
        yield from ((f"sample {row['sample']} of step {row['step']}", row["id"]) for row in read_lines(path))
    steps = [str(row["step"]) for row in read_lines(run / "metrics.jsonl") if row["step"]]
    yield "steps", " ".join(steps)  # one that was logged twice is a difference


def _last_step(run: Path) -> int:
    manifest = CheckpointDirectory(run / "checkpoints").newest()
    if manifest is None:
        raise ValueError(f"{run} holds no checkpoint to compare")
    return manifest.step


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if name not in one or name not in other or one[name] != other[name])


def _checkpoint(place: Path) -> Iterator[tuple[str, str]]:
    """Name and SHA-256 of every part of a checkpoint: model and optimizer tensors, loop state, random states of all ranks."""
    for engine in sorted((place / "models").iterdir()):
        for path in sorted(engine.glob(f"*{SHARD}")):
            yield from ((f"{engine.name} {name}", _digest(_raw(values))) for name, values in load_file(path).items())
        yield f"{engine.name} position", _digest((engine / POSITION).read_bytes())
    for path in (place / "state.json", *sorted(place.glob("rng-*"))):
        yield path.name, _digest(path.read_bytes())


def _raw(tensor: torch.Tensor) -> bytes:
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return head + bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _metrics(path: Path) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(read_lines(path), 1):
        # The line's number is in the name: a step logged twice is a difference.
        yield from (
            (f"{name} of step {row['step']} (line {number})", v) for name, v in row.items() if not name.startswith(VOLATILE)
        )
