"""Meetings on the host: the ranks wait for each other and prove that they are at the same point of the schedule. Ranks that differ
(one micro-batch fewer, a skipped update) would abort in a collective that names nobody, or wait in a pipeline for ever. A meeting
is one all-reduce of a few integers; details are exchanged only if the ranks differ."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.parallel.device import ranks_of_run
from megappo.runtime.messages import name_ranks, ranks_by_value

# Seconds after which a waiting rank leaves a mark, so that messages can name the missing ranks. Most meetings are shorter.
_MARK_S = 1.0
# Numbers in the first exchange of a meeting: two digests, then values. The size is fixed, as gloo aborts at messages of different
# sizes; it is enough for a pass on four replicas without a second exchange.
_FIRST_SIZE = 16


class RankIsLate(RuntimeError):
    """A rank did not reach a meeting in time, or was lost meanwhile."""


class ScheduleDiverged(RuntimeError):
    """The ranks are at different points of the schedule; raised on all of them with the same message."""


@dataclass(frozen=True)
class Point:
    """Point of the schedule before some work, named in messages. Only passes have the other fields."""

    work: str
    number: int | None = None
    """Passes of the role so far."""
    share: int | None = None
    """Share of the batch that this rank's replica has."""
    lengths: int | None = None
    """Digest of the share's sequence lengths, equal on the ranks of a replica only."""

    def digest(self) -> int:
        """Hash work and number: equal on all ranks at the same point, whatever their shares."""
        # 7 bytes: its negative is an int64 too.
        return int.from_bytes(hashlib.blake2b(repr((self.work, self.number)).encode(), digest_size=7).digest(), "big")

    def __str__(self) -> str:
        number = "" if self.number is None else f" (pass {self.number})"
        lengths = "" if self.lengths is None else f" with lengths {self.lengths:08x} of share {self.share}"
        return f"before {self.work}{number}{lengths}"


@dataclass(frozen=True)
class Limit:
    """Time limit of a meeting. key: its name in the configuration."""

    key: str
    seconds: float


def meet(point: Point, limit: Limit, group: dist.ProcessGroup, values: Sequence[int] = ()) -> list[int]:
    """Wait until every rank of `group` is at this point; return the elementwise maximum of all ranks' `values`. Collective over the
    group, on the host. Messages name world ranks. ScheduleDiverged on every rank if one is at another point. RankIsLate after the
    limit; it names the missing ranks."""
    digest = point.digest()
    first = torch.zeros(_FIRST_SIZE, dtype=torch.int64)
    first[:2] = torch.tensor([digest, -digest])  # maxima of both are equal in size if all digests are
    early = values[: _FIRST_SIZE - 2]
    first[2 : 2 + len(early)] = torch.tensor(early, dtype=torch.int64)
    _combine(first, point, limit, group)
    if first[0] != -first[1]:
        raise_diverged(point, group)
    rest = torch.tensor(values[len(early) :], dtype=torch.int64)
    if len(rest):
        _combine(rest, point, limit, group)
    return [*first[2 : 2 + len(early)].tolist(), *rest.tolist()]


def raise_diverged(point: Point, group: dist.ProcessGroup) -> NoReturn:
    """Raise ScheduleDiverged with the points of all ranks of the group. Collective."""
    points: list = [None] * group.size()
    dist.all_gather_object(points, point, group=group)
    at = dict(zip(ranks_of_run(group), points))
    raise ScheduleDiverged(f"the ranks are at different points of the schedule: {_by_rank(at)}")


def _combine(largest: Tensor, point: Point, limit: Limit, group: dist.ProcessGroup) -> None:
    options: Any = dist.AllreduceOptions()  # torch's stub has another type for the operation
    options.reduceOp = dist.ReduceOp.MAX
    options.timeout = timedelta(seconds=limit.seconds)
    # The method takes a limit of its own; dist.all_reduce would use the group's.
    work = group.allreduce([largest], options)
    grace_s = min(_MARK_S, limit.seconds / 2)
    if _is_over(work, grace_s):
        return
    # By the group: a rank may be in the meeting of one role while ranks of another role wait for it.
    marks = dist.PrefixStore(f"megappo.meeting.{group.group_name}", dist.distributed_c10d._get_default_store())
    ranks = ranks_of_run(group)
    own = ranks[group.rank()]
    marks.set(str(own), point.work)
    try:
        work.wait()
    except RuntimeError as error:
        time.sleep(grace_s)  # the others that are here leave their marks by then
        missing = _missing(marks, ranks)
        raise RankIsLate(
            f"rank {own} waited for {missing} before {point.work} ({limit.key} = {limit.seconds:g}): {error}"
        ) from error
    marks.delete_key(str(own))


def _is_over(work: dist.Work, seconds: float) -> bool:
    try:
        # A failure is raised again by the next `wait`
        return work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        return False


def _missing(marks: dist.Store, ranks: Sequence[int]) -> str:
    try:
        missing = [rank for rank in ranks if not marks.check([str(rank)])]
    except RuntimeError:  # the store is gone with the process that held it
        missing = []
    return name_ranks(missing) if missing else "the others"


def _by_rank(points: Mapping[int, Point]) -> str:
    """Name the ranks that differ: by their passes, or by lengths in the replicas whose ranks have different ones."""
    passes = {rank: replace(point, share=None, lengths=None) for rank, point in points.items()}
    if len(set(passes.values())) > 1:  # lengths differ from replica to replica as a rule, and would part those that are at one pass
        groups = ranks_by_value(passes)
    else:
        known: dict[int | None, set[int | None]] = {}
        for point in points.values():
            known.setdefault(point.share, set()).add(point.lengths)
        groups = ranks_by_value({rank: point for rank, point in points.items() if len(known[point.share]) > 1})
    return "; ".join(f"{name_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} {point}" for point, ranks in groups.items())
