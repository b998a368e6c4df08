"""Restart policy of a run, for Slurm jobs and this machine alike: where the next attempt starts, and when to give up.

Progress is a newer checkpoint. Three starts from the newest one may fail without progress, then three from the one before it, which
covers a bad checkpoint; then the run is given up. Imports no torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import DamagedCheckpoint, RefusedCheckpoint
from megappo.config.run_directory import CHECKPOINTS, ENDED, precedes_run
from megappo.runtime.ending import CONFIG, is_stopped
from megappo.runtime.world import SKIP_STEPS

MAX_STARTS_AT_A_STEP = 3
_STARTS = "attempts.jsonl"


class NoProgress(ValueError):
    """Further attempts would end like the last ones; the message is one line."""


@dataclass(frozen=True)
class Start:
    """One line of attempts.jsonl."""

    attempt: int
    step: int  # checkpoint that the attempt starts from; 0 without one
    time: float = 0.0
    nodes: str = ""
    skipped: tuple[int, ...] = ()  # newer checkpoints that it passes over

    def environment(self) -> dict[str, str]:
        return {SKIP_STEPS: ",".join(map(str, self.skipped))}


def newest_step(run_dir: Path) -> int:
    """Step of the newest complete checkpoint, 0 without one. Raises RefusedCheckpoint if it cannot be read or is elsewhere."""
    manifest = CheckpointDirectory(run_dir / CHECKPOINTS).newest()
    if manifest is None:
        require_never_saved(run_dir)
    return manifest.step if manifest is not None else 0


def require_never_saved(run_dir: Path) -> None:
    """Raise RefusedCheckpoint if other files say that the run has saved: its checkpoints are elsewhere then, not gone."""
    checkpoints = run_dir / CHECKPOINTS
    # A run makes the folder before it writes its configuration.
    if (run_dir / CONFIG).exists() and not checkpoints.exists():
        reason = "does not exist, though the run has started"
    elif is_stopped(run_dir):
        reason = f"holds no complete checkpoint, though {ENDED} says that the run saved one"
    else:
        return
    raise RefusedCheckpoint(
        f"{checkpoints} {reason}; nothing was moved: mount its file system here (if the run never saved: mkdir {checkpoints})"
    )


def saved_steps(run_dir: Path) -> dict[int, float]:
    """Map the steps of complete checkpoints to the epoch seconds of their writing. Raises RefusedCheckpoint as `newest_step`."""
    directory = CheckpointDirectory(run_dir / CHECKPOINTS)
    saved = {}
    for step in directory.steps():
        try:
            directory.read(step)
        except DamagedCheckpoint:
            continue  # the load that follows reports the fault and sets it aside
        saved[step] = directory.step_path(step).stat().st_mtime
    if not saved:
        require_never_saved(run_dir)
    return saved


def next_start(starts: Sequence[Start], saved: Mapping[int, float], attempt: int) -> Start:
    """Choose the checkpoint for the next attempt; saved: from `saved_steps`. Raises NoProgress if none is worth a try."""
    last = starts[-1] if starts else None
    # A skipped checkpoint is still there if the attempt failed before renaming it.
    skipped = tuple(step for step in last.skipped if step in saved and saved[step] <= last.time) if last is not None else ()
    steps = [step for step in sorted(saved, reverse=True) if step not in skipped]
    newest = steps[0] if steps else 0
    start = Start(attempt, newest, round(time.time(), 3), os.environ.get("SLURM_JOB_NODELIST", ""), skipped)
    if last is None or newest > last.step:
        return start
    tried = _since_progress(starts)
    if len(tried) < 2 * MAX_STARTS_AT_A_STEP:
        if sum(each.step == newest for each in tried) < MAX_STARTS_AT_A_STEP:
            return start
        if len(steps) > 1 and not any(each.skipped for each in tried):  # back by one, and no further
            return replace(start, step=steps[1], skipped=(newest, *skipped))
    counts = {each.step: sum(other.step == each.step for other in tried) for each in tried}
    said = " and ".join(f"{count} attempts started at step {step}" for step, count in counts.items())
    raise NoProgress(f"{said} and none reached another checkpoint: not tried again")


def _since_progress(starts: Sequence[Start]) -> Sequence[Start]:
    first = len(starts) - 1
    while first > 0 and starts[first - 1].step >= starts[first].step:
        first -= 1
    return starts[first:]


# ----------------------------------------------------------------------------------------------------------------- records


def read_starts(launch_dir: Path) -> list[Start]:
    """Read the starts of this launch, in order."""
    path = launch_dir / _STARTS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    # A full disk or a crash of the machine may have cut off a line; it does not count.
    records = [json.loads(line) for line in lines if line.endswith("}\n")]
    return [Start(**{**record, "skipped": tuple(record.get("skipped", ()))}) for record in records]


def record_start(launch_dir: Path, start: Start) -> Path:
    """Append a start to attempts.jsonl; return the folder of the attempt."""
    folder = launch_dir / f"attempt-{start.attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    with (launch_dir / _STARTS).open("a+", encoding="utf-8") as file:
        file.seek(max(0, file.tell() - 1))
        after_a_part = file.read(1) not in ("", "\n")
        file.write("\n" * after_a_part + json.dumps(asdict(start)) + "\n")
    return folder


def set_aside(run_dir: Path, folder: Path) -> None:
    """Move the leftovers of an attempt that saved no checkpoint into `folder`, so that the next one can start anew."""
    for entry in sorted(run_dir.iterdir()) if run_dir.is_dir() else ():
        if not precedes_run(entry.name):  # the launch's records and a live launcher's lease stay
            folder.mkdir(parents=True, exist_ok=True)
            names = (entry.name, *(f"{entry.name}.old{n}" for n in range(1, 10_000)))
            entry.rename(next(path for name in names if not (path := folder / name).exists()))
