"""The directory of one run: who may write to it, and where things lie in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megappo.config.checks import check_run_dir, run_dir_of
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

    def is_exported(self) -> bool:
        """Collective: whether rank 0 sees `export`; on several nodes the file systems may not agree, and all ranks must act alike."""
        seen = [self.export.exists()]
        dist.broadcast_object_list(seen, src=0)
        return seen[0]

    def export_replaced(self) -> Path:
        """A free name for the export that a resumed run replaces."""
        return next(path for n in range(1, 10_000) if not (path := self.root / f"export.old{n}").exists())

    def claim(self, run: RunConfig, config_text: str, *, resume: bool) -> None:
        """Collective: rank 0 checks, creates the directory and writes the resolved config; all ranks raise its error alike."""
        problem = [None]
        if dist.get_rank() == 0:
            try:
                check_run_dir(run, resume)
                self.root.mkdir(parents=True, exist_ok=True)
                self.config.write_text(config_text)
            except (ValueError, OSError) as error:
                problem = [str(error)]
        dist.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            raise ValueError(problem[0])
