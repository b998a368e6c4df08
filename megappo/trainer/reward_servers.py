"""Reward servers, asked once by every rank before a model is built."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from megappo.config.errors import ConfigError
from megappo.prepare.remote_rewards import require_reachable
from megappo.rewards.base import PreparedPart


def require_servers(parts: Mapping[str, PreparedPart], *, resume: bool) -> None:
    """ConfigError on all ranks if one of them cannot have its samples scored. Collective where a part is of a server."""
    if all(part.ask is None for part in parts.values()):
        return
    fault = None
    try:
        require_reachable(parts, resume=resume)
    except ConfigError as error:
        fault = str(error)
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    for rank, found in enumerate(faults):
        if found is not None:
            raise ConfigError(f"rank {rank}: {found}")
