"""Meetings on the host: the ranks wait for each other and prove that they are at the same point of the schedule.

Ranks that differ there (one micro-batch fewer, a skipped update) would abort inside a collective without a name, or wait in a
pipeline for ever. A meeting is one all-reduce of two integers; details are exchanged only if the ranks differ.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.resilience.ranks import name_ranks, ranks_by_value

# Seconds after which a waiting rank leaves a mark for the message about those that are missing. Meetings are shorter as a rule
# and leave none.
_MARK_S = 1.0


class RankIsLate(RuntimeError):
    """A rank did not reach a meeting in time, or was lost meanwhile."""


class ScheduleDiverged(RuntimeError):
    """The ranks are at different points of the schedule; raised on all of them with the same message."""


@dataclass(frozen=True)
class Point:
    """Point of the schedule before some work. work: named in messages. The rest is of a pass.

    number: passes of the role so far. lengths: digest of the batch's sequence lengths.
    """

    work: str
    number: int | None = None
    micro_batches: int | None = None
    lengths: int | None = None

    def digest(self) -> int:
        # 7 bytes: its negative is an int64 too.
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=7).digest(), "big")

    def __str__(self) -> str:
        if self.micro_batches is None:
            return f"before {self.work}"
        return f"before {self.work} (pass {self.number}) with {self.micro_batches} micro-batches, lengths {self.lengths:08x}"


@dataclass(frozen=True)
class Limit:
    """Time limit of a meeting. key: its name in the configuration."""

    key: str
    seconds: float


def meet(point: Point, limit: Limit, group: dist.ProcessGroup) -> None:
    """Wait until every rank of `group` is at this point. Collective over it, on the host. Messages name ranks of the world.

    ScheduleDiverged on every rank if one is at another point. RankIsLate after the limit; it names the ranks that are missing.
    """
    digest = point.digest()
    extremes = torch.tensor([digest, -digest])  # maxima of both are equal in size if all digests are
    _combine(extremes, point, limit, group)
    if extremes[0] != -extremes[1]:
        points: list = [None] * group.size()
        dist.all_gather_object(points, point, group=group)
        at = dict(zip(dist.get_process_group_ranks(group), points))
        raise ScheduleDiverged(f"the ranks are at different points of the schedule: {_by_rank(at)}")


def _combine(extremes: Tensor, point: Point, limit: Limit, group: dist.ProcessGroup) -> None:
    """Take the maximum over all ranks of the group, in place."""
    options: Any = dist.AllreduceOptions()  # torch's stub has another type for the operation
    options.reduceOp = dist.ReduceOp.MAX
    options.timeout = timedelta(seconds=limit.seconds)
    # The method, whose limit is its own: the group's is that of exchanges on the host.
    work = group.allreduce([extremes], options)
    grace_s = min(_MARK_S, limit.seconds / 2)
    if _is_over(work, grace_s):
        return
    # By the group: a rank may be in the meeting of one role while ranks of another role wait for it.
    marks = dist.PrefixStore(f"megappo.meeting.{group.group_name}", dist.distributed_c10d._get_default_store())
    marks.set(str(dist.get_rank()), point.work)
    try:
        work.wait()
    except RuntimeError as error:
        time.sleep(grace_s)  # the others that are here leave their marks by then
        missing = _missing(marks, group)
        raise RankIsLate(
            f"rank {dist.get_rank()} waited for {missing} before {point.work} ({limit.key} = {limit.seconds:g}): {error}"
        ) from error
    marks.delete_key(str(dist.get_rank()))


def _is_over(work: dist.Work, seconds: float) -> bool:
    """True if it succeeds within this time. A failure is raised again by the next `wait`."""
    try:
        return work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        return False


def _missing(marks: dist.Store, group: dist.ProcessGroup) -> str:
    """Ranks of the group without a mark, in words."""
    try:
        missing = [rank for rank in dist.get_process_group_ranks(group) if not marks.check([str(rank)])]
    except RuntimeError:  # the store is gone with the process that held it
        missing = []
    return name_ranks(missing) if missing else "the others"


def _by_rank(points: Mapping[int, Point]) -> str:
    groups = ranks_by_value(points)
    return "; ".join(f"{name_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} {point}" for point, ranks in groups.items())
