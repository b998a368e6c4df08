"""Names of the Hugging Face hub in a world that torchrun or srun started: rank 0 asks the hub, for all ranks."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from pydantic import BaseModel

from megappo.config.errors import ConfigError
from megappo.trainer.prepare.hub import pinned_names, with_local_models, with_values

Config = TypeVar("Config", bound=BaseModel)


def local_models_of_ranks(config: Config) -> Config:
    """`with_local_models` on every rank, with the commits that rank 0 finds. ConfigError on all ranks. Collective.

    A rank whose cache holds the commit, as that of a shared file system does, asks nothing; others download it.
    """
    found: list = [None, None]
    if dist.get_rank() == 0:
        found = _attempt(config)
    told: list = [pinned_names(config, found[0]) if found[0] is not None else None, found[1]]
    dist.broadcast_object_list(told, src=0)
    pins, fault = told
    if fault is None and dist.get_rank() != 0:
        found = _attempt(with_values(config, pins))
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault or found[1])
    for rank, text in enumerate(faults):
        if text is not None:
            raise ConfigError(text if rank == 0 else f"rank {rank}: {text}")
    assert found[0] is not None, "without a fault there are directories"
    return found[0]


def _attempt(config: BaseModel) -> list:
    """[configuration, None], or [None, the reason against it]."""
    try:
        return [with_local_models(config), None]
    except ConfigError as error:
        return [None, str(error)]
