"""Process groups of one role, built from its layout. Groups are values handed to whoever needs them, never module globals.

Two roles with different layouts may live on the same ranks: each has its own ProcessGroups. Megatron-core takes all of them
explicitly (ProcessGroupCollection); the one global it still needs is the scratch buffer of its sequence-parallel layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megappo.parallel.layout import Coordinates, ParallelLayout

@dataclass(frozen=True)
class ProcessGroups:
    """The groups that this rank belongs to in one layout."""

    layout: ParallelLayout
    coordinates: Coordinates
    collection: ProcessGroupCollection

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
        """True on the one rank of a dp replica that reports what the last stage computed (tp and cp rank 0)."""
        return self.is_last_stage and self.coordinates.tp == 0 and self.coordinates.cp == 0


def build_groups(layout: ParallelLayout) -> ProcessGroups:
    """Create every group of the layout. Collective: all ranks of the world call it in the same order.

    Names that stand for the same ranks share one group: HyperCommGrid would make one for each, and a group costs buffers on a
    GPU and a polling thread under gloo.
    """
    built: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def along(*axes: str) -> dist.ProcessGroup:
        ranks = layout.axis_groups(*axes)
        key = tuple(map(tuple, ranks))
        if key not in built:
            built[key], _ = dist.new_subgroups_by_enumeration(ranks)
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
    groups.hcp, groups.inter_dist_opt, groups.pos_embd = None, None, None
    groups.embd = _embedding_group(layout)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    return ProcessGroups(layout, layout.coordinates(dist.get_rank()), groups)


def destroy_groups(groups: ProcessGroups) -> None:
    """Free the groups of a layout whose models are gone. Collective; for a process that goes through many layouts."""
    held = {id(group): group for group in vars(groups.collection).values() if group is not None}
    for group in held.values():
        dist.destroy_process_group(group)


def _embedding_group(layout: ParallelLayout) -> Optional[dist.ProcessGroup]:
    """First and last stage of each pipeline: they hold the two copies of a tied embedding. None on the stages between."""
    mine: Optional[dist.ProcessGroup] = None
    for ranks in layout.axis_groups("pp"):
        ends = sorted({ranks[0], ranks[-1]})
        group = dist.new_group(ends)
        if dist.get_rank() in ends:
            mine = group
    return mine
