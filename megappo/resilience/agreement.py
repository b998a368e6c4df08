"""One decision of all ranks, from what each of them knows."""

from __future__ import annotations

import torch
import torch.distributed as dist


def any_rank(flag: bool) -> bool:
    """Collective over the world, on the host: whether the flag is set on at least one rank."""
    count = torch.tensor(int(flag))
    dist.all_reduce(count)
    return bool(count)
