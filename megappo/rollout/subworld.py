"""A torch.distributed world of some of the ranks, for an engine that takes the default process group for its own.

vLLM ranks count from 0 to the size of the default group, and all its ranks must call `new_group`. Inside a `SubWorld` the default
group is the group of the engine's ranks, a rank is its position in it, and the other ranks take no part. This replaces torch's
`distributed_c10d._world`, a documented extension point. Exchanging the default group alone is not enough: torch names groups by a
counter, which would then differ between ranks, and the next group of the whole world would wait for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from megappo.config.run_sections import TimeoutsConfig

# Group names are numbers, and functional collectives look groups of all worlds up by them. Those of a subworld start at the number
# of its own group times this; the world never makes as many.
_NAMES = 1 << 32


class SubWorld:
    """World of the ranks of `group`, which exists on its members only. Make it once per group: engines that share it get new group
    names, while a second SubWorld would repeat names whose addresses are still in the store."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        world = dist.distributed_c10d._world
        name, tag = world.pg_names[group], world.pg_to_tag[group]
        self.ranks = tuple(dist.get_process_group_ranks(group))
        # The attributes of torch's `_World`, and the run's numbers of these ranks (`parallel.device.ranks_of_run`).
        self._state = SimpleNamespace(
            ranks_of_run=self.ranks,
            default_pg=group,
            pg_map={group: world.pg_map[group]},
            pg_names={group: name},
            pg_group_ranks={group: {position: position for position in range(group.size())}},
            pg_backend_config={group: world.pg_backend_config[group]},
            pg_to_tag={group: tag},
            tags_to_pg={tag: [group]},
            pg_coalesce_state={},
            comms=[],
            group_count=(int(name) + 1) * _NAMES,
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the world of torch.distributed for the calling thread; restore the former one at the end. Groups of the former
        world still work inside, except where world ranks are named (`src`, `dst`)."""
        module: Any = dist.distributed_c10d
        former = module._world
        module._world = _ByThread(self._state, former)
        try:
            yield
        finally:
            module._world = former

    @contextlib.contextmanager
    def installed(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Make this the world of all threads; restore the former one at the end. Yields `outside`, in whose context the former one
        is that of the calling thread."""
        module: Any = dist.distributed_c10d
        former, module._world = module._world, self._state

        @contextlib.contextmanager
        def outside() -> Iterator[None]:
            module._world = _ByThread(former, self._state)
            try:
                yield
            finally:
                module._world = self._state

        try:
            yield outside
        finally:
            module._world = former


class _ByThread:
    """State of torch.distributed that is `inner` for the creating thread and `outer` for all others."""

    def __init__(self, inner: Any, outer: Any) -> None:
        vars(self).update(inner=inner, outer=outer, thread=threading.get_ident())

    def _seen(self) -> Any:
        # Threads that write a checkpoint or compute rewards must keep the run's ranks
        return self.inner if threading.get_ident() == self.thread else self.outer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seen(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._seen(), name, value)


def prepare_rollout_world(ranks: Sequence[int], timeouts: TimeoutsConfig = TimeoutsConfig()) -> SubWorld | None:
    """Make the world of the ranks that generate; None on the others. Collective: all ranks of the world call it in the same order.
    ranks: increasing world ranks. Exchanges in it are limited by `meeting_s`."""
    ranks = list(ranks)
    assert ranks == sorted(set(ranks)), f"ranks {ranks} are not increasing"
    group = dist.new_group(ranks, timeout=timedelta(seconds=timeouts.meeting_s), group_desc="rollout")
    return SubWorld(group) if isinstance(group, dist.ProcessGroup) else None
