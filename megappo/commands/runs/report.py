"""`megappo runs`: the tables of runs and of verified checkpoints, as text or JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megappo.checkpoint.directory import CheckpointDirectory
from megappo.checkpoint.manifest import Manifest, RefusedCheckpoint, find_wrong_content, list_files, require_complete
from megappo.commands.runs.read import BROKEN, Checkpoint, Run, find_runs, read_run, step_text
from megappo.config.errors import ConfigError
from megappo.config.run_directory import CHECKPOINTS, ENDED
from megappo.runtime.lease import LEASE
from megappo.telemetry.tables import GIB, MIB, figures, plain, table

THREADS = 8  # hashlib releases the GIL; more threads do not speed up a disk


@dataclass(frozen=True)
class Verified:
    """Result for one checkpoint. unverified: a file cannot be read, which says nothing about its data, or is not megappo's.
    removed: the live run removed it during the verification."""

    step: int
    state: Literal["ok", "damaged", "unverified", "removed"]
    files: int  # files in the manifest; 0 if it cannot be read
    bytes: int
    fault: str  # one line; empty without one

    @property
    def is_sound(self) -> bool:
        return self.state in ("ok", "removed")


def checkpoints_of(run_dir: Path, step: int | None = None) -> list[int]:
    """List the steps to verify, ascending: all, or the given one. Raises ConfigError, one line, for a wrong path or step."""
    directory = CheckpointDirectory(run_dir / CHECKPOINTS)
    try:
        os.listdir(run_dir)
        steps = sorted(directory.steps())
    except OSError as error:
        raise ConfigError(f"{run_dir}: {error.strerror}; name the directory of a run (run.output_dir/run.name)") from None
    if not steps:
        raise ConfigError(f"{run_dir} holds no checkpoint ({CHECKPOINTS}/step-N); `megappo runs {run_dir}` shows what it is")
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step}: {directory.path} has no such checkpoint; there are {', '.join(map(str, steps))}")
    return steps if step is None else [step]


def verify_checkpoint(run_dir: Path, step: int) -> Verified:
    directory = CheckpointDirectory(run_dir / CHECKPOINTS)
    place = directory.step_path(step)
    files = size = 0
    damaged: list[str] = []
    unverified: list[str] = []
    try:
        manifest = directory.read(step)
        files, size = len(manifest.files), manifest.total_bytes
        require_complete(manifest)
        damaged, unverified = _compare(place, manifest)
    except (OSError, RefusedCheckpoint) as error:
        unverified = [str(error)]
    except BROKEN as error:
        damaged = [str(error)]
    faults = damaged + unverified
    if not faults:
        return Verified(step, "ok", files, size, "")
    if not place.exists():
        return Verified(step, "removed", files, size, "")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Verified(step, "damaged" if damaged else "unverified", files, size, faults[0] + more)


def _compare(place: Path, manifest: Manifest) -> tuple[list[str], list[str]]:
    """Return a line for each file that differs from the manifest or is not in it, and a line for each that cannot be read."""
    damaged = [f"{name} is not in the manifest" for name in list_files(place) if name not in manifest.files]
    unverified = []
    # Largest first, so that no thread is left with a large one at the end.
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        checks = {name: pool.submit(find_wrong_content, place, manifest, [name]) for name in names}
    for name, check in sorted(checks.items()):
        try:
            damaged += filter(None, [check.result()])
        except (OSError, RefusedCheckpoint) as error:
            unverified.append(f"{name} cannot be read: {getattr(error, 'strerror', error)}")
    return damaged, unverified


def exit_code(verified: Sequence[Verified]) -> int:
    return int(not all(one.is_sound for one in verified))


def show_runs(directory: Path, *, as_json: bool) -> int:
    """Print the runs of a directory. Raises ConfigError, one line, if it holds none."""
    runs = [read_run(path) for path in find_runs(directory)]
    if as_json:
        print(json.dumps([_facts(run) for run in runs], indent=1, default=str))
        return 0
    now = time.time()
    rows = [_row(run, now) for run in runs]
    print("\n".join(table(["run", "state", "step", "checkpoint", "age", "size"], rows, left=2)))
    if notes := [f"  {plain(run.path.name)}: {note}" for run in runs for note in _notes(run)]:
        print("\n" + "\n".join(notes))
    return 0


def show_verified(run_dir: Path, step: int | None, *, as_json: bool) -> int:
    """Verify and print a run's checkpoints; return 1 if one is not sound. Raises ConfigError for a wrong path or step."""
    verified = [verify_checkpoint(run_dir, one) for one in checkpoints_of(run_dir, step)]
    if as_json:
        print(json.dumps([asdict(one) for one in verified], indent=1))
    else:
        rows = [[f"step-{one.step}", one.state, str(one.files), size_text(one.bytes)] for one in verified]
        lines = table(["checkpoint", "state", "files", "size"], rows, left=2)
        print("\n".join([*lines, *(f"  step-{one.step}: {plain(one.fault)}" for one in verified if one.fault)]))
    return exit_code(verified)


def _row(run: Run, now: float) -> list[str]:
    saved = ["-", "-"] if run.checkpoint is None else [f"step-{run.checkpoint.step}", age_text(now - run.checkpoint.time)]
    return [plain(run.path.name), _state_text(run, now), step_text(run), *saved, size_text(run.bytes)]


def _state_text(run: Run, now: float) -> str:
    if run.lease is not None and run.state in ("running", "died"):
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.lease.since))
        job = f", job {run.lease.job}" if run.lease.job else ""
        start = f"{plain(run.lease.host)}{plain(job)}"
        return f"running on {start} since {since}" if run.state == "running" else f"died on {start}, started {since}"
    if run.ended is None:
        return run.state
    code = f" (exit code {run.ended.code})" if run.state == "failed" else ""
    return f"{run.state}{code} {age_text(now - run.ended.time)} ago"


def _notes(run: Run) -> Iterator[str]:
    if run.checkpoint is not None and (best := run.checkpoint.best) is not None:
        yield plain(f"best checkpoint step-{best.get('step')}: {best.get('metric')} = {best.get('value')}")
    if run.ended is not None and run.ended.message and run.state in ("failed", "stopped"):
        yield plain(run.ended.message)
    if run.state == "died":
        yield f"its process is gone and left no {ENDED}: killed from outside, or its machine went down{_way_on(run.checkpoint)}"
    if run.state == "unknown" and not run.faults:
        yield f"has neither {LEASE} nor {ENDED}: an earlier version of megappo wrote none"
    yield from map(plain, run.faults)


def _way_on(checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return ""
    if checkpoint.weights_only:
        return f"; step-{checkpoint.step} holds weights only (checkpoint.save_only_model): megappo export takes it, --resume cannot"
    return f"; --resume goes on after step {checkpoint.step}"


def _facts(run: Run) -> dict[str, Any]:
    return {"name": run.path.name, **asdict(run), "path": str(run.path)}


def age_text(seconds: float) -> str:
    """Format seconds as `42 s`, `5 min`, `3 h` or `12 d`; 0 s for a clock that is behind."""
    for limit, unit, length in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{max(0, int(seconds // length))} {unit}"
    return f"{int(seconds // 86400)} d"


def size_text(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return f"{figures(size / unit)} {name}"
    return f"{size / 1024:.0f} KiB"
