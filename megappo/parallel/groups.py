"""Process groups of one role, built from its layout. Groups are values passed as arguments, never module globals.

Two roles with different layouts may live on the same ranks: each has its own ProcessGroups. Megatron-core takes all of them
explicitly (ProcessGroupCollection); the one global it still needs is the scratch buffer of its sequence-parallel layers.

Timeouts (`run.timeouts`): inside a pass ranks are at most a pass apart, and the groups made here have a short limit, so that a
hanging rank is noticed. Between passes ranks do work of different length (a long response, a reward, a disk). They `meet` before
the next pass, on the host and with a long limit: an exchange on the device would charge its short limit for the late rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megappo.config.run_sections import TimeoutsConfig
from megappo.parallel import meeting
from megappo.parallel.layout import Coordinates, ParallelLayout
from megappo.parallel.meeting import Limit, Point
from megappo.platform.device import limit_of, set_limit, world_group

_NO_VALUE = -(1 << 62)  # below every digest and its negative


class AgreedPass(NamedTuple):
    """Size of a pass. micro_batches: of every replica. sequences: of all replicas together."""

    micro_batches: int
    sequences: int


@dataclass(frozen=True)
class ProcessGroups:
    """Groups of this rank in one layout."""

    layout: ParallelLayout
    coordinates: Coordinates
    collection: ProcessGroupCollection
    timeouts: TimeoutsConfig = TimeoutsConfig()

    def meet(self, before: str) -> None:
        """Wait, on the host, until every rank is here. Collective over the world. before: the next work, for the message.

        Errors as `meeting.meet`, after `meeting_s`.
        """
        meet(before, self.timeouts.meeting_s)

    def agree(self, work: str, number: int, lengths: Tensor, micro_batches: int) -> AgreedPass:
        """Check that every rank is about to run this pass, and agree on its size. Collective over the world, on the host.

        work, number: name of the pass, and how many the role has made. lengths: [B] of this replica's sequences. micro_batches:
        that they need. Errors as `meeting.meet`; ScheduleDiverged too if ranks of a replica have other sequences. Ranks are at most
        a pass apart here, so the limit is that of exchanges inside a pass.
        """
        seconds = limit_of(self.tp)
        key = "pass_s" if seconds == self.timeouts.pass_s else "start_s"
        dp, share = self.layout.dp, self.coordinates.dp
        digest = zlib.crc32(lengths.numpy().tobytes())
        # Of every replica: digests of its ranks (equal if the largest and the negative of the smallest are), and its sequences.
        slots = [_NO_VALUE] * (3 * dp)
        slots[share::dp] = digest, -digest, lengths.numel()
        point = Point(work, number, share, digest)
        largest, *found = meeting.meet(point, Limit(f"run.timeouts.{key}", seconds), [micro_batches, *slots])
        if any(high != -low for high, low in zip(found[:dp], found[dp : 2 * dp])):
            meeting.raise_diverged(point)
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
    """See `ProcessGroups.meet`."""
    meeting.meet(Point(before), Limit("run.timeouts.meeting_s", limit_s))


def settle(roles: Iterable[ProcessGroups], timeouts: TimeoutsConfig) -> None:
    """Set the timeout of exchanges on the device and within roles to `pass_s`, once every kind of pass has run."""
    for groups in roles:
        groups.limit(timeouts.pass_s)
    set_limit(world_group(), timeouts.pass_s, device_only=True)


def build_groups(layout: ParallelLayout, timeouts: TimeoutsConfig = TimeoutsConfig()) -> ProcessGroups:
    """Create every group of the layout. Collective: all ranks of the world call it in the same order.

    Their timeout is `start_s` until `settle`.
    """
    limit = timedelta(seconds=timeouts.start_s)
    built: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def along(*axes: str) -> dist.ProcessGroup:
        ranks = layout.axis_groups(*axes)
        key = tuple(map(tuple, ranks))
        # Axes with the same ranks share one group (HyperCommGrid would make one each): a group costs buffers on a GPU, and a
        # polling thread under gloo.
        if key not in built:
            # group_desc appears in messages of NCCL's watchdog.
            group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=limit, group_desc=" x ".join(axes))
            assert isinstance(group, dist.ProcessGroup), "every rank is in one group of each axis"
            built[key] = group
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
    setattr(groups, "embd", _embedding_group(layout, limit))  # None on the stages between: Megatron-core annotates a group
    # Scratch of sequence-parallel layers, the one global that Megatron-core still needs.
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    return ProcessGroups(layout, layout.coordinates(dist.get_rank()), groups, timeouts)


def destroy_groups(groups: ProcessGroups) -> None:
    """Free the groups of a layout whose models are gone. Collective; for a process that tries many layouts."""
    for group in groups._distinct():
        dist.destroy_process_group(group)


def _embedding_group(layout: ParallelLayout, limit: timedelta) -> dist.ProcessGroup | None:
    """Group of the first and last stage of a pipeline, which hold the copies of a tied embedding; None on stages between."""
    mine: dist.ProcessGroup | None = None
    for ranks in layout.axis_groups("pp"):
        ends = sorted({ranks[0], ranks[-1]})
        group = dist.new_group(ends, timeout=limit, group_desc="embedding")  # collective over the world, members or not
        if dist.get_rank() in ends:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    return mine
