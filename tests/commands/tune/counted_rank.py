"""One rank that counts what a trial copies between host and device while it times, and what a phase of the trainer copies.

    python -m tests.commands.tune.counted_rank FOLDER

FOLDER/trials.json names the trials; FOLDER/copies.json is what was copied: trial -> what was timed -> [direction, bytes].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megappo.commands.tune import trial as tried
from megappo.commands.tune.trials import read_trial
from megappo.config.batch import UpdateSchedule
from megappo.engine.build import RoleEngines
from megappo.engine.offload import StorageOffload
from megappo.parallel.device import start_alone, start_distributed
from megappo.runtime.world import is_rank
from megappo.trainer.experience.experience import Experience
from megappo.trainer.kernel_selection import choose_kernels
from megappo.trainer.updates import first_epoch, mini_batches, run_updates, update_reads

copies: list[tuple[str, int]] = []


def count_copies() -> None:
    copy = StorageOffload._copy

    def counted(self: StorageOffload, *, to_host: bool) -> None:
        copies.append(("to host" if to_host else "to device", sum(self._sizes)))
        copy(self, to_host=to_host)

    StorageOffload._copy = counted


def copied_by(work: Callable[[], Any]) -> list[tuple[str, int]]:
    """By the second call: the first one makes the optimizer's state."""
    work()
    copies.clear()
    work()
    return list(copies)


def trainers_updates(trial: Any, passes: Any) -> None:
    """Two updates of the trial's role, as in stage 6."""
    schedule = UpdateSchedule(1, trial.samples // 2, "token-mean")
    truncated = torch.zeros(passes.batch.num_sequences, dtype=torch.bool)
    experience = Experience.of_whole(passes.batch.with_fields(sequence_fields={"truncated": truncated}))
    engine = passes.role.engine
    reads = update_reads(trial.role, trial.config.algorithm)
    sent = first_epoch(experience, engine.shares, reads, schedule.mini_batch_size, seed=0)
    run_updates(passes.role, mini_batches(sent, engine.shares, engine.host_group, schedule, trial.response_tokens, seed=0))


def main(folder: Path) -> None:
    device = torch.device("cpu")
    start_distributed(device) if is_rank() else start_alone(device)
    choose_kernels("reference", device)
    count_copies()
    found: dict[str, dict[str, Any]] = {}
    for name in json.loads((folder / "trials.json").read_text()):
        trial, timed = read_trial(folder, name), {}

        def fastest(work: Callable[[], Any], repeats: int, timed: dict[str, Any] = timed, **_: Any) -> float:
            timed[work.__name__] = copied_by(work)
            return 1.0

        tried._fastest = fastest
        tried.run_trial(trial, device)
        passes = tried._build_passes(trial, RoleEngines(trial.config.model, tried.TIMEOUTS, device))
        timed["the trainer's updates"] = copied_by(partial(trainers_updates, trial, passes))
        found[name] = timed
    (folder / "copies.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
