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

# Order of Megatron's default rank grid, fastest first. cp and ep have size 1 in this layout.
_AXES = ("tp", "cp", "ep", "dp", "pp")


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
    def is_first_stage(self) -> bool:
        return self.coordinates.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pp == self.layout.pp - 1

    @property
    def is_reporter(self) -> bool:
        """True on the one rank of a dp replica that reports what the last stage computed (tp rank 0)."""
        return self.is_last_stage and self.coordinates.tp == 0


def build_groups(layout: ParallelLayout) -> ProcessGroups:
    """Create every group of the layout. Collective: all ranks of the world call it in the same order."""
    grid = HyperCommGrid(shape=[layout.tp, 1, 1, layout.dp, layout.pp], dim_names=list(_AXES))
    groups = ProcessGroupCollection()
    groups.tp, groups.cp, groups.ep = grid.create_pg("tp"), grid.create_pg("cp"), grid.create_pg("ep")
    groups.dp, groups.pp = grid.create_pg("dp"), grid.create_pg("pp")
    groups.mp = grid.create_pg(["tp", "pp"])
    groups.dp_cp = groups.intra_dp_cp = grid.create_pg(["cp", "dp"])
    groups.tp_cp = grid.create_pg(["tp", "cp"])
    groups.tp_dp_cp = grid.create_pg(["tp", "cp", "dp"])
    groups.tp_ep, groups.tp_ep_pp = grid.create_pg(["tp", "ep"]), grid.create_pg(["tp", "ep", "pp"])
    groups.intra_dist_opt = grid.create_pg(["tp", "cp", "ep", "dp", "pp"])
    # Without experts the expert axes are those of the dense part.
    groups.expt_tp, groups.expt_dp, groups.intra_expt_dp = groups.tp, groups.dp, groups.dp
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
