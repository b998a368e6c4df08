"""Names of the Hugging Face hub in a world that torchrun or srun started: rank 0 asks the hub, for all ranks."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from pydantic import BaseModel

from megappo.config.errors import ConfigError
from megappo.parallel.consensus import raised_by_all, told_by
from megappo.trainer.prepare.hub import pinned_names, with_local_models, with_values

Config = TypeVar("Config", bound=BaseModel)


def local_models_of_ranks(config: Config) -> Config:
    """`with_local_models` on every rank, with the commits that rank 0 finds. ConfigError on all ranks. Collective.

    A rank whose cache holds the commit, as that of a shared file system does, asks nothing; others download it.
    """
    rank = dist.get_rank()
    first = raised_by_all(lambda: with_local_models(config) if rank == 0 else None, ConfigError)
    pins = told_by(0, None if first is None else pinned_names(config, first))

    def with_pins() -> Config:
        try:
            return with_local_models(with_values(config, pins or {}))
        except ConfigError as error:
            raise ConfigError(f"rank {rank}: {error}") from error

    return raised_by_all(lambda: with_pins() if first is None else first, ConfigError)
