"""Directory of one run: the claim to write to it, and the paths in it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from megappo.config.run_directory import CHECKPOINTS, ENDED, EXPORTED, check_run_dir, run_dir_of
from megappo.config.run_sections import RunConfig
from megappo.data.tokenizers import Tokenizer
from megappo.engine.base import Engine
from megappo.parallel.consensus import RankFault, gathered, raised_by_all, told_by
from megappo.runtime.ending import CONFIG, Ended, record_end
from megappo.runtime.lease import LEASE_VARIABLE, Lease
from megappo.telemetry.jsonl import replace_file

T = TypeVar("T")


@dataclass(frozen=True)
class RunDir:
    """Paths below `output_dir/name`."""

    root: Path

    @classmethod
    def of(cls, run: RunConfig) -> RunDir:
        return cls(run_dir_of(run))

    @property
    def config(self) -> Path:
        return self.root / CONFIG

    @property
    def checkpoints(self) -> Path:
        return self.root / CHECKPOINTS

    @property
    def export(self) -> Path:
        """The final policy as a Hugging Face checkpoint."""
        return self.root / EXPORTED

    @property
    def profiles(self) -> Path:
        """Traces of profiled steps."""
        return self.root / "profile"

    def record_finish(self, step: int) -> None:
        """Record that the run reached its end, `step`. Collective over the world."""
        _on_rank_0(lambda: record_end(self.root, Ended("finished", step)))

    def record_stop(self, step: int, received: signal.Signals | None) -> None:
        """Record that the run ended after `step` as a rank was asked to stop. received: this rank's signal. Collective over the
        world."""
        names = gathered(received.name if received else None)
        asked = {str(rank): name for rank, name in enumerate(names) if name is not None}
        _on_rank_0(lambda: record_end(self.root, Ended("stopped", step, message="asked to stop", signals=asked)))

    def is_exported(self) -> bool:
        """Return True on all ranks if rank 0 sees `export`, as file systems of nodes may differ. Collective over the world."""
        return told_by(0, self.export.exists())

    def export_replaced(self) -> Path:
        """Return a free name for the export that a resumed run replaces."""
        return next(path for n in range(1, 10_000) if not (path := self.root / f"export.old{n}").exists())

    def claim(self, run: RunConfig, config_text: str, *, resume: bool, saves: bool = True) -> Lease:
        """Take the lease of the directory on rank 0 and write the resolved config of a new run. Collective over the world.
        The lease is the launcher's if it holds one; release it at the end on every rank. saves: create the folder of checkpoints
        too. ValueError on all ranks, also with the text of LeaseHeld."""

        def take_and_write() -> Lease:
            check_run_dir(run, resume)
            launcher = os.environ.get(LEASE_VARIABLE)
            command = f"megappo {' '.join(sys.argv[1:3])}"  # `train CONFIG`
            lease = Lease.acquire(self.root, command) if launcher is None else Lease.of_launcher(self.root, launcher)
            try:
                check_run_dir(run, resume)  # again: the holder before may have written meanwhile
                # A resumed run keeps its config until `record_config`: the checkpoint may yet refuse the new one.
                if not resume:
                    # The folder first: a run whose configuration is there and whose folder is not has lost its file system.
                    if saves:
                        self.checkpoints.mkdir()
                    self.config.write_text(config_text, encoding="utf-8")
            except BaseException:
                lease.release()
                raise
            return lease

        return _on_rank_0(take_and_write)

    def begin(self) -> None:
        """Remove the record of the last end, once the run is known to start. Collective over the world."""
        _on_rank_0(lambda: (self.root / ENDED).unlink(missing_ok=True))

    def record_config(self, config_text: str) -> None:
        """Write the resolved config of a resumed run. Collective over the world. ValueError on all ranks."""
        # Atomically: on a full disk the configuration of the run so far stays.
        _on_rank_0(lambda: replace_file(self.config, config_text.encode()))


def _on_rank_0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and return its result on every rank. ValueError on all ranks."""

    def attempt() -> T | None:
        try:
            return action() if dist.get_rank() == 0 else None
        except OSError as error:
            raise ValueError(str(error)) from error

    return cast(T, told_by(0, raised_by_all(attempt, ValueError)))


def export_policy(engine: Engine | None, run_dir: RunDir, source: Path, tokenizer: Tokenizer) -> None:
    """Write the policy for transformers and vLLM; rename an export that a resumed run replaces. Collective over the world.
    engine: None on ranks where it does not live."""
    if dist.get_rank() == 0 and run_dir.export.exists():
        run_dir.export.rename(run_dir.export_replaced())
    dist.barrier()
    raised_by_all(
        lambda: None if engine is None else engine.export(run_dir.export, source, tokenizer), ValueError, OSError, RankFault
    )
