"""Surroundings of all ranks, checked together before a model is built: a rank that raised alone would leave the others waiting."""

from __future__ import annotations

import torch.distributed as dist

from megappo.config.errors import ConfigError
from megappo.config.schema import TrainConfig
from megappo.parallel.consensus import raised_by_all
from megappo.trainer.prepare.data import EvaluationData, RunData
from megappo.trainer.prepare.recorded import RecordedData
from megappo.trainer.prepare.surroundings import require_isolation_here, require_servers_here, require_storage


def require_surroundings(config: TrainConfig, data: RunData | RecordedData | EvaluationData, *, resume: bool) -> None:
    """ConfigError on all ranks, naming the first such rank, if one of them cannot isolate programs or reach a reward server.

    Rank 0 also opens the storage for copies of checkpoints, which it alone makes. Collective.
    """

    def require() -> None:
        try:
            require_isolation_here(config)
            require_servers_here(data, resume=resume)
            if dist.get_rank() == 0:
                require_storage(config)
        except ConfigError as error:
            raise ConfigError(f"rank {dist.get_rank()}: {error}") from error

    raised_by_all(require, ConfigError)
