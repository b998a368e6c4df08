"""Directory of one run: the claim to write to it, and the paths in it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megappo.config.checks import STOPPED, check_run_dir, run_dir_of
from megappo.config.schema import RunConfig


@dataclass(frozen=True)
class RunDir:
    """Paths below `output_dir/name`."""

    root: Path

    @classmethod
    def of(cls, run: RunConfig) -> RunDir:
        return cls(run_dir_of(run))

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        """The final policy as a Hugging Face checkpoint."""
        return self.root / "export"

    @property
    def stopped(self) -> Path:
        """File that exists while a stopped run can be resumed."""
        return self.root / STOPPED

    def record_stop(self, step: int, received: signal.Signals | None) -> None:
        """Record that the run ended after `step` because a rank was asked to stop. received: this rank's signal, if any.
        Collective.
        """
        names: list = [None] * dist.get_world_size()
        dist.all_gather_object(names, received.name if received else None)
        asked = {str(rank): name for rank, name in enumerate(names) if name is not None}
        _on_rank_0(lambda: self.stopped.write_text(json.dumps({"step": step, "signals": asked}) + "\n"))

    def is_exported(self) -> bool:
        """True on all ranks if rank 0 sees `export`: the file systems of several nodes may differ. Collective."""
        seen = [self.export.exists()]
        dist.broadcast_object_list(seen, src=0)
        return seen[0]

    def export_replaced(self) -> Path:
        """A free name for the export that a resumed run replaces."""
        return next(path for n in range(1, 10_000) if not (path := self.root / f"export.old{n}").exists())

    def claim(self, run: RunConfig, config_text: str, *, resume: bool) -> None:
        """Check and create the directory on rank 0, and write the resolved config of a new run. Collective.

        That of a resumed run stays until `record_config`: the checkpoint may yet refuse the new one. ValueError on all ranks.
        """

        def check_and_create() -> None:
            check_run_dir(run, resume)
            self.root.mkdir(parents=True, exist_ok=True)
            self.stopped.unlink(missing_ok=True)
            if not resume:
                self.config.write_text(config_text)

        _on_rank_0(check_and_create)

    def record_config(self, config_text: str) -> None:
        """Write the resolved config with which the run goes on. Collective. ValueError on all ranks."""
        _on_rank_0(lambda: self.config.write_text(config_text))


def _on_rank_0(action: Callable[[], object]) -> None:
    problem = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except (ValueError, OSError) as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise ValueError(problem[0])
