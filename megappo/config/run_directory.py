"""Directory of a run: its path, whether a new or resumed run may use it, files in it that precede the run, and the permissions of
all (`run.permissions` as the process's umask). Imports no torch."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Literal

from megappo.config.errors import ConfigError, problem
from megappo.config.output_file import why_not_writable
from megappo.config.run_sections import RunConfig

Permissions = Literal["private", "group", "world"]

# Bits that new files do not get. Nobody but the owner writes: whoever can write a checkpoint can change what a run learns.
_MASKS: dict[Permissions, int] = {"private": 0o077, "group": 0o027, "world": 0o022}


def apply_permissions(permissions: Permissions) -> None:
    """Set the umask of this process and of those that it starts. Call it before the run writes anything."""
    os.umask(_MASKS[permissions])


def open_to_readers_of(folder: Path, file: Path) -> None:
    """Let the readers of a folder read a file that its writer made private; safetensors ignores the umask."""
    file.chmod(folder.stat().st_mode & 0o666)


CHECKPOINTS = "checkpoints"  # folder for checkpoints (`checkpoint/directory.py`)
LAUNCHES = "launch"  # folder that `megappo launch` fills before the run starts
LEASE = "lease.json"  # says which process has the run (`runtime/lease.py`)
METRICS = "metrics.jsonl"
# Seconds of a step on the GPUs of the run, which the process that starts the ranks predicts (`telemetry/predicted.py`)
PREDICTED = "predicted.json"
EXPORTED = "export"  # the final policy as a Hugging Face checkpoint
# How the run ended; absent while it runs and after a kill of all its processes. Rank 0 writes it for a run that finished or was
# stopped on request, the launcher for one that failed.
ENDED = "ended.json"


def run_dir_of(run: RunConfig) -> Path:
    """Return `output_dir/name`. Raises ConfigError if a link leads out of output_dir."""
    path = Path(run.output_dir) / run.name
    if not path.resolve().is_relative_to(Path(run.output_dir).resolve()):
        raise ConfigError(problem("run.name", run.name, f"{path} is a link that leads out of run.output_dir; choose another name"))
    return path


def check_run_dir(run: RunConfig, resume: bool, *, resumable: bool = True) -> Path:
    """Check the directory of a run without touching it, and return it. A new run needs an absent or empty directory, a resumed run
    one that holds a run. resumable: the command has --resume. Raises ConfigError."""
    path = run_dir_of(run)
    base = Path(run.output_dir)
    # The nearest directory that exists: the run creates the others.
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ConfigError(problem("run.output_dir", run.output_dir, f"{existing} is a file; name a directory"))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            problem("run.output_dir", run.output_dir, f"no permission to write in {existing}; choose another directory")
        )
    if (fault := why_not_writable(existing)) is not None:
        raise ConfigError(problem("run.output_dir", run.output_dir, f"{fault}; choose another directory"))
    occupied = holds_run(path)
    if occupied and not resume:
        # Without a checkpoint, as of a run that was interrupted at its start, there is nothing to resume.
        continues = resumable and has_saved(path)
        fix = f"{path} holds another run{'' if continues or not resumable else ', without a checkpoint'}"
        fix += f"; use run.name={_free_name(base, run.name)} for a new one"
        fix += ", or continue it with --resume" if continues else ""
        if not has_saved(path) and _made_no_step(path):
            fix += f", or free the name, as that run ended before its first step: rm -r {shlex.quote(str(path))}"
        raise ConfigError(problem("run.name", run.name, fix))
    if resume and not occupied:
        runs = sorted(entry.name for entry in base.iterdir() if entry.is_dir())[:8] if base.is_dir() else []
        there = f"runs there: {', '.join(runs)}" if runs else "there are no runs there"
        raise ConfigError(
            problem("run.name", run.name, f"{path} holds no run to resume ({there}); leave --resume out or name one of them")
        )
    return path


def holds_run(run_dir: Path) -> bool:
    """True if a run has left anything in its directory."""
    return run_dir.is_dir() and any(not precedes_run(entry.name) for entry in run_dir.iterdir())


def precedes_run(name: str) -> bool:
    """True for an entry that is there before the run starts: `megappo launch` writes its folder, and the process that starts the
    ranks its lease and a prediction."""
    return name in (LAUNCHES, PREDICTED) or is_lease(name)


def has_saved(run_dir: Path) -> bool:
    """True if the run has made a checkpoint, whole or damaged, or if its checkpoints cannot be listed."""
    try:
        return any(name.startswith("step-") for name in os.listdir(run_dir / CHECKPOINTS))
    except FileNotFoundError:
        return os.path.lexists(run_dir / CHECKPOINTS)  # a link to a file system that is not mounted
    except OSError:
        return True


def _made_no_step(run_dir: Path) -> bool:
    """True if a run began here, has ended, and logged no step: nothing is lost with its directory."""
    if not (run_dir / ENDED).is_file() or os.path.lexists(run_dir / LEASE):
        return False
    try:
        lines = (run_dir / METRICS).read_text(encoding="utf-8").splitlines()
        return all(json.loads(line)["step"] == 0 for line in lines)  # an evaluation before the first step is step 0
    except FileNotFoundError:
        return True
    except (OSError, ValueError, TypeError, KeyError):
        return False


def is_lease(name: str) -> bool:
    """True for the file names that a lease uses in a run directory."""
    return name == LEASE or name.startswith(f".{LEASE}.")


def _free_name(base: Path, name: str) -> str:
    return next(f"{name}-{n}" for n in range(2, 10_000) if not (base / f"{name}-{n}").exists())
