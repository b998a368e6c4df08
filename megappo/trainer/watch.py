"""The watchdog of this rank in a run: its peers, its connection to the job's store, its folder."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megappo.config.run_sections import TimeoutsConfig
from megappo.parallel.consensus import gathered
from megappo.runtime.failure import ATTEMPT_DIR
from megappo.runtime.life import LAUNCHER_LISTENS, SignOfLife
from megappo.runtime.verdict import Member
from megappo.runtime.watchdog import EXCHANGE_S, Watchdog


@contextmanager
def watched(timeouts: TimeoutsConfig, run_dir: Path) -> Iterator[Watchdog]:
    """Watch this rank inside. Collective. Stacks and verdict go to the attempt's folder, or to `stacks` below `run_dir`."""
    rank = dist.get_rank()
    ranks = gathered((uuid.uuid4().hex, Member.of_process(rank, os.getpid())))
    store = None
    if len(ranks) > 1:
        # A connection of its own: another thread's request may wait for minutes. Rank 0's name, as one world may run many times.
        default: Any = dist.distributed_c10d._get_default_store()  # the method is missing in torch's stub
        store = dist.PrefixStore(f"megappo.watchdog.{ranks[0][0]}", default.clone())
    folder = Path(os.environ.get(ATTEMPT_DIR) or run_dir / "stacks")
    folder.mkdir(parents=True, exist_ok=True)
    sign = _sign_of_life(rank, len(ranks), timeouts) if LAUNCHER_LISTENS in os.environ else None
    with Watchdog(rank, [member for _, member in ranks], store, timeouts, folder, sign) as watchdog:
        yield watchdog
    if folder.parent == run_dir:
        with contextlib.suppress(OSError):  # not empty: another rank is still there, or an earlier attempt left its stacks
            folder.rmdir()


def _sign_of_life(rank: int, world_size: int, timeouts: TimeoutsConfig) -> SignOfLife:
    """Sign of this rank to the launcher, on a connection of its own."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    # The ranks watch each other first: they know more.
    head_start_s = 2 * EXCHANGE_S if world_size > 1 else 0.0
    return SignOfLife(store.clone(), rank, timeouts.heartbeat_s + head_start_s)
