"""Process groups of one role, built from its layout and placement, and passed as arguments, never as module globals.

Only making groups is collective over the world, so roles on different ranks never wait for each other. Timeouts (`run.timeouts`):
inside a pass ranks are at most a pass apart, and a short limit shows a hanging rank. Between passes ranks do work of different
length and `meet` on the host with a long limit: an exchange on the device would charge its short limit for the late rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, cast, overload

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megappo.config.run_sections import TimeoutsConfig
from megappo.parallel import meeting
from megappo.parallel.device import limit_of, set_limit, world_group
from megappo.parallel.layout import Coordinates, ParallelLayout, Placement
from megappo.parallel.meeting import Limit, Point

_NO_VALUE = -(1 << 62)  # below every digest and its negative


class AgreedPass(NamedTuple):
    """Size of a pass: micro-batches of every replica, and sequences of all replicas together."""

    micro_batches: int
    sequences: int


@dataclass(frozen=True)
class ProcessGroups:
    """Groups of this rank in one layout. placement: world ranks of the layout's positions."""

    layout: ParallelLayout
    placement: Placement
    coordinates: Coordinates
    collection: ProcessGroupCollection
    host: dist.ProcessGroup
    """All ranks of the role, for exchanges on the host with the limit `meeting_s`, and of experience; the world if the role is on
    all of it."""
    timeouts: TimeoutsConfig = TimeoutsConfig()

    @property
    def position(self) -> int:
        """Position of this rank in the layout."""
        at = self.coordinates
        return self.layout.rank_of(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp)

    def world_rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the world rank at these coordinates."""
        return self.placement.rank_of(self.layout.rank_of(tp=tp, cp=cp, dp=dp, pp=pp))

    def meet(self, before: str) -> None:
        """Wait, on the host, until every rank of the role is here. Collective over these. before: the next work, for the message.
        Errors as `meeting.meet`, after `meeting_s`."""
        meeting.meet(Point(before), Limit("run.timeouts.meeting_s", self.timeouts.meeting_s), self.host)

    def agree(self, work: str, number: int, lengths: Tensor, micro_batches: int) -> AgreedPass:
        """Check that every rank of the role is about to run this pass, and agree on its size. Collective over these, on the host.
        work, number: name of the pass, and how many the role has made. lengths: [B] of this replica's sequences. micro_batches:
        that they need. Errors as `meeting.meet`; ScheduleDiverged too if ranks of a replica have other sequences."""
        # Ranks are at most a pass apart here, so the limit is that of exchanges inside a pass
        seconds = limit_of(self.tp)
        key = "pass_s" if seconds == self.timeouts.pass_s else "start_s"
        dp, share = self.layout.dp, self.coordinates.dp
        digest = zlib.crc32(lengths.numpy().tobytes())
        # Per replica: its ranks' digests (equal if the largest and the negative of the smallest are), and its number of sequences.
        slots = [_NO_VALUE] * (3 * dp)
        slots[share::dp] = digest, -digest, lengths.numel()
        point, limit = Point(work, number, share, digest), Limit(f"run.timeouts.{key}", seconds)
        largest, *found = meeting.meet(point, limit, self.host, [micro_batches, *slots])
        if any(high != -low for high, low in zip(found[:dp], found[dp : 2 * dp])):
            meeting.raise_diverged(point, self.host)
        return AgreedPass(largest, sum(found[2 * dp :]))

    def limit(self, seconds: float) -> None:
        """Set the timeout of later exchanges within these groups. Not collective."""
        for group in self._distinct():
            set_limit(group, seconds)

    def _distinct(self) -> Iterable[dist.ProcessGroup]:
        return {id(group): group for group in vars(self.collection).values() if group is not None}.values()

    @property
    def tp(self) -> dist.ProcessGroup:
        return self.collection.tp

    @property
    def pp(self) -> dist.ProcessGroup:
        return self.collection.pp

    @property
    def dp(self) -> dist.ProcessGroup:
        return self.collection.dp

    @property
    def cp(self) -> dist.ProcessGroup:
        return self.collection.cp

    @property
    def everyone(self) -> dist.ProcessGroup:
        """All ranks of the role."""
        return self.collection.intra_dist_opt

    @property
    def is_first_stage(self) -> bool:
        return self.coordinates.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pp == self.layout.pp - 1

    @property
    def is_reporter(self) -> bool:
        """True on the one rank of a dp replica that reports the last stage's results (tp and cp rank 0)."""
        return self.is_last_stage and self.coordinates.tp == 0 and self.coordinates.cp == 0


def meet(before: str, limit_s: float) -> None:
    """Wait as `ProcessGroups.meet` does, for all ranks of the world. Collective over the world."""
    meeting.meet(Point(before), Limit("run.timeouts.meeting_s", limit_s), world_group())


def settle(roles: Iterable[ProcessGroups], timeouts: TimeoutsConfig) -> None:
    """Set the timeout of exchanges on the device and within roles to `pass_s`, once every kind of pass has run."""
    for groups in roles:
        groups.limit(timeouts.pass_s)
        set_limit(groups.host, timeouts.pass_s, device_only=True)
    set_limit(world_group(), timeouts.pass_s, device_only=True)


@overload
def build_groups(layout: ParallelLayout, placement: None = None, timeouts: TimeoutsConfig = ...) -> ProcessGroups: ...


@overload
def build_groups(layout: ParallelLayout, placement: Placement, timeouts: TimeoutsConfig = ...) -> ProcessGroups | None: ...


def build_groups(
    layout: ParallelLayout, placement: Placement | None = None, timeouts: TimeoutsConfig = TimeoutsConfig()
) -> ProcessGroups | None:
    """Create every group of the layout; None on ranks that the placement leaves out. placement: None for all ranks. Collective over
    the world: all ranks, those left out too, call it in the same order. Timeouts are `start_s` until `settle`."""
    rank = dist.get_rank()
    placement = placement or Placement.whole(dist.get_world_size())
    assert len(placement) == layout.world_size, f"a layout of {layout.world_size} ranks on {len(placement)}"
    limit = timedelta(seconds=timeouts.start_s)
    built: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def along(*axes: str) -> dist.ProcessGroup:
        ranks = [placement.ranks_of(positions) for positions in layout.axis_groups(*axes)]
        key = tuple(map(tuple, ranks))
        # Axes with the same ranks share one group (HyperCommGrid would make one each): a group costs buffers on a GPU, and a
        # polling thread under gloo.
        if key not in built:
            # group_desc appears in messages of NCCL's watchdog.
            group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=limit, group_desc=" x ".join(axes))
            assert (group is not None) == (rank in placement), "every rank of the role is in one group of each axis"
            built[key] = cast(dist.ProcessGroup, group)  # None on ranks that are left out, which return before they use it
        return built[key]

    groups = ProcessGroupCollection()
    groups.tp, groups.cp, groups.dp, groups.pp = along("tp"), along("cp"), along("dp"), along("pp")
    groups.mp = along("tp", "pp")
    groups.dp_cp = groups.intra_dp_cp = along("cp", "dp")
    groups.tp_cp, groups.tp_dp_cp = along("tp", "cp"), along("tp", "cp", "dp")
    groups.intra_dist_opt = along("tp", "cp", "dp", "pp")
    groups.expt_tp, groups.ep = along("etp"), along("ep")
    groups.expt_dp = groups.intra_expt_dp = along("edp")
    groups.tp_ep, groups.tp_ep_pp = along("etp", "ep"), along("etp", "ep", "pp")
    for absent in ("hcp", "inter_dist_opt", "pos_embd"):
        setattr(groups, absent, None)
    setattr(groups, "embd", _embedding_group(layout, placement, limit))  # None on the stages between: Megatron annotates a group
    host = _host_group(placement, timeouts)
    if host is None:
        return None
    # Scratch of sequence-parallel layers, the one global that Megatron-core still needs.
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    return ProcessGroups(layout, placement, layout.coordinates(placement.position_of(rank)), groups, host, timeouts)


def destroy_groups(groups: ProcessGroups) -> None:
    """Free the groups of a layout whose models are gone, in a process that tries many layouts. Collective over the role."""
    for group in groups._distinct():
        dist.destroy_process_group(group)
    if not groups.placement.is_whole:
        dist.destroy_process_group(groups.host)


def _host_group(placement: Placement, timeouts: TimeoutsConfig) -> dist.ProcessGroup | None:
    """Make the group of all ranks of a role with the world's limit and backends; None on other ranks."""
    if placement.is_whole:
        return world_group()
    limit = timedelta(seconds=timeouts.meeting_s)
    group = dist.new_group(list(placement.ranks), timeout=limit, group_desc="host")
    return group if isinstance(group, dist.ProcessGroup) else None


def _embedding_group(layout: ParallelLayout, placement: Placement, limit: timedelta) -> dist.ProcessGroup | None:
    # The first and last stage of a pipeline hold the copies of a tied embedding
    mine: dist.ProcessGroup | None = None
    for positions in layout.axis_groups("pp"):
        ends = placement.ranks_of(sorted({positions[0], positions[-1]}))
        group = dist.new_group(ends, timeout=limit, group_desc="embedding")  # collective over the world, members or not
        if dist.get_rank() in ends:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    return mine
