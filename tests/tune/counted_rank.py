"""One rank that counts what a trial copies between host and device while it times, and what a phase of the trainer copies.

    python -m tests.tune.counted_rank FOLDER

FOLDER/trials.json names the trials; FOLDER/copies.json is what was copied: trial -> what was timed -> [direction, bytes].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megappo.trainer.kernels import choose_kernels

from megappo.engine.offload import StorageOffload
from megappo.launch.world import is_rank
from megappo.parallel.groups import build_groups
from megappo.platform.device import start_alone, start_distributed
from megappo.prepare.layouts import layout_of
from megappo.trainer.updates import MiniBatches, run_updates
from megappo.tune import trial as tried
from megappo.tune.trials import read_trial

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


def main(folder: Path) -> None:
    device = torch.device("cpu")
    start_distributed(device) if is_rank() else start_alone(device)
    choose_kernels("reference", device)
    count_copies()
    found: dict[str, dict[str, Any]] = {}
    for name in json.loads((folder / "trials.json").read_text()):
        trial, timed = read_trial(folder, name), {}

        def fastest(work: Callable[[], Any], repeats: int, timed: dict[str, Any] = timed) -> float:
            timed[work.__name__] = copied_by(work)
            return 1.0

        tried._fastest = fastest
        tried.run_trial(trial, device)
        section = getattr(trial.config, trial.role)
        engine = tried._build_engine(trial, build_groups(layout_of(section.parallel, dist.get_world_size())), device)
        passes = tried._Passes(trial, engine)
        mini_batches = MiniBatches(trial.samples // 2, 1, "token-mean", trial.response_tokens)
        timed["the trainer's updates"] = copied_by(lambda: run_updates(passes._role, passes._batch, mini_batches, seed=0))
        found[name] = timed
    (folder / "copies.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
