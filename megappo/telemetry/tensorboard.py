"""TensorBoard event files of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Scalars by step in `directory`. After a resume TensorBoard hides what older files hold after `resumed_step`."""

    def __init__(self, directory: Path, resumed_step: int | None = None) -> None:
        self._writer = SummaryWriter(str(directory), purge_step=None if resumed_step is None else resumed_step + 1)

    def scalars(self, metrics: Mapping[str, float], step: int) -> None:
        """Non-finite values are left out: a gap in the curve."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(str(name), value, step)
        # one flush per step keeps a live view live; a step takes seconds
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
