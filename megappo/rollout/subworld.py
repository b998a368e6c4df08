"""A torch.distributed world of some ranks of the world, for an engine that takes the default process group for its own.

vLLM counts its ranks from 0 to the size of the default group, and makes groups by `new_group`, which all ranks of the default group
have to call. On ranks of its own, the engine therefore works inside a `SubWorld`: there the default group is the group of these
ranks, a rank is its position in it, and the other ranks need not know of anything that happens inside.

Why so, and not
- by making vLLM's calls on the other ranks too: their number and order depend on vLLM's version and on the model;
- by giving vLLM's initialisation other ranks: it has no argument for them, so half of its `parallel_state` would be copied here;
- by exchanging the default group alone: torch names groups by a counter, which would run ahead inside. The next group of the whole
  world would have another name on the other ranks, and its members would wait for each other for ever.
torch keeps all of this in one object, `distributed_c10d._world`, an "extension point to override"; its tests of ranks as threads
replace it too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from megappo.config.run_sections import TimeoutsConfig

# Names of groups are numbers, and the functional collectives find groups of all worlds by them. Those of a subworld start at the
# number of its own group times this; the world never makes as many.
_NAMES = 1 << 32


class SubWorld:
    """World of the ranks of `group`, whose members alone have it.

    Made once for each group and not for each engine: the names of groups that one engine made must not come again for the next,
    which would find their addresses in the store.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        world = dist.distributed_c10d._world
        name, tag = world.pg_names[group], world.pg_to_tag[group]
        self.ranks = tuple(dist.get_process_group_ranks(group))
        # The attributes of torch's `_World`, and how the run counts these ranks (`platform.device.ranks_of_run`).
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
        """Make this the world of torch.distributed for the calling thread; the former one comes back at the end.

        Groups keep working outside as arguments of collectives, except where ranks of the world are named (`src`, `dst`).
        """
        module: Any = dist.distributed_c10d
        former = module._world
        module._world = _ByThread(self._state, former)
        try:
            yield
        finally:
            module._world = former


class _ByThread:
    """State of torch.distributed that is `inner` for the thread that makes this, and `outer` for all others.

    A thread that writes a checkpoint or computes rewards meanwhile must not take another rank for its own.
    """

    def __init__(self, inner: Any, outer: Any) -> None:
        vars(self).update(inner=inner, outer=outer, thread=threading.get_ident())

    def _seen(self) -> Any:
        return self.inner if threading.get_ident() == self.thread else self.outer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seen(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._seen(), name, value)


def prepare_rollout_world(ranks: Sequence[int], timeouts: TimeoutsConfig = TimeoutsConfig()) -> SubWorld | None:
    """World of the ranks that generate; None on the others. Collective: all ranks of the world call it in the same order.

    ranks: increasing world ranks. Its exchanges have the limit `meeting_s`, as those of the world on the host.
    """
    ranks = list(ranks)
    assert ranks == sorted(set(ranks)), f"ranks {ranks} are not increasing"
    group = dist.new_group(ranks, timeout=timedelta(seconds=timeouts.meeting_s), group_desc="rollout")
    return SubWorld(group) if isinstance(group, dist.ProcessGroup) else None
