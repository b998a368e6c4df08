"""Process groups of one role, built from its layout. Groups are values handed to whoever needs them, never module globals.

Two roles with different layouts may live on the same ranks: each has its own ProcessGroups. Megatron-core takes all of them
explicitly (ProcessGroupCollection); the one global it still needs is the scratch buffer of its sequence-parallel layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection

from megappo.parallel.layout import Coordinates, ParallelLayout

# Both grids in Megatron's default order, fastest axis first. The experts cut the ranks of a stage a second time.
_DENSE = ("tp", "cp", "dp", "pp")
_EXPERT = ("etp", "ep", "edp", "pp")


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
    """Create every group of the layout. Collective: all ranks of the world call it in the same order."""
    dense = HyperCommGrid(shape=[layout.tp, layout.cp, layout.dp, layout.pp], dim_names=list(_DENSE))
    expert = HyperCommGrid(shape=[layout.etp, layout.ep, layout.edp, layout.pp], dim_names=list(_EXPERT))
    groups = ProcessGroupCollection()
    groups.tp, groups.cp, groups.dp, groups.pp = (dense.create_pg(axis) for axis in _DENSE)
    groups.mp = dense.create_pg(["tp", "pp"])
    groups.dp_cp = groups.intra_dp_cp = dense.create_pg(["cp", "dp"])
    groups.tp_cp = dense.create_pg(["tp", "cp"])
    groups.tp_dp_cp = dense.create_pg(["tp", "cp", "dp"])
    groups.intra_dist_opt = dense.create_pg(list(_DENSE))
    groups.expt_tp, groups.ep = expert.create_pg("etp"), expert.create_pg("ep")
    groups.expt_dp = groups.intra_expt_dp = expert.create_pg("edp")
    groups.tp_ep, groups.tp_ep_pp = expert.create_pg(["etp", "ep"]), expert.create_pg(["etp", "ep", "pp"])
    groups.hcp, groups.inter_dist_opt, groups.pos_embd = None, None, None
    groups.embd = _embedding_group(layout)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    return ProcessGroups(layout, layout.coordinates(dist.get_rank()), groups)


def _embedding_group(layout: ParallelLayout) -> Optional[dist.ProcessGroup]:
    """First and last stage of each pipeline: they hold the two copies of a tied embedding. None on the stages between."""
    mine: Optional[dist.ProcessGroup] = None
    for ranks in layout.axis_groups("pp"):
        ends = sorted({ranks[0], ranks[-1]})
        group = dist.new_group(ends)
        if dist.get_rank() in ends:
            mine = group
    return mine
