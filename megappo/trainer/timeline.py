"""Timeline of a step whose roles live on ranks of their own: when each role's ranks were in which stage, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megappo.config.role_sections import is_critic
from megappo.parallel.placement import Placement
from megappo.telemetry.metrics import STAGES
from megappo.telemetry.tables import table
from megappo.telemetry.timers import StageTimers

Span = tuple[float, float]
"""Begin and end, seconds since the step's start."""

STAGES_OF_ROLE: Mapping[str, Sequence[str]] = {
    "rollout": ("generate", "push_weights"),
    "reward_model": ("score",),
    "policy": ("logprobs", "update_policy", "push_weights"),
    "reference": ("logprobs",),
    "critic": ("logprobs", "update_critic"),
}
"""Role -> stages in which its ranks work for it, a further critic's as the first one's. In the others they work for another role,
exchange, or wait."""
SHARED = ("score", "advantages", "check_replicas", "evaluate")
"""Stages in which all ranks work, whatever their roles."""


def spans_of_ranks(timers: StageTimers) -> list[dict[str, Span]]:
    """Stage -> span on every rank, by rank, since the step's start on rank 0. Collective over the world.

    Clocks of machines differ: the end of one exchange is taken for the same moment on all ranks.
    """
    dist.all_reduce(torch.zeros(1))
    met = timers.total_s
    mine = torch.full((len(STAGES) * 2 + 1,), torch.nan, dtype=torch.float64)
    mine[0] = met
    for place, stage in enumerate(STAGES):
        if stage in timers.spans:
            mine[1 + 2 * place : 3 + 2 * place] = torch.tensor(timers.spans[stage], dtype=torch.float64)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    shifted = [one[1:].add(found[0][0] - one[0]).view(-1, 2) for one in found]
    return [
        {stage: (begin, end) for stage, (begin, end) in zip(STAGES, one.tolist()) if begin == begin}  # NaN: not in this step
        for one in shifted
    ]


def timeline(spans: Sequence[Mapping[str, Span]], places: Mapping[str, Placement], step: int) -> list[str]:
    """Lines of a table: a row for each role, a column for each stage, from the first begin on a rank of the role to the last end.

    spans: of every rank (`spans_of_ranks`). places: of the roles.
    """
    order = list(STAGES_OF_ROLE)
    kinds = sorted(((order.index("critic" if is_critic(role) else role), role) for role in places), key=lambda one: one[0])
    rows = [(f"{role} {places[role]}", STAGES_OF_ROLE[order[kind]], places[role].ranks) for kind, role in kinds]
    rows.append(("all", SHARED, tuple(range(len(spans)))))
    cells = [[title, *(_cell(spans, ranks, stage) if stage in own else "" for stage in STAGES)] for title, own, ranks in rows]
    header = [f"seconds of step {step}", *STAGES]
    used = [0, *(column for column in range(1, len(header)) if any(row[column] for row in cells))]
    return table([header[column] for column in used], [[row[column] for column in used] for row in cells])


def _cell(spans: Sequence[Mapping[str, Span]], ranks: Sequence[int], stage: str) -> str:
    found = [spans[rank][stage] for rank in ranks if stage in spans[rank]]
    if not found:
        return ""
    # A rank may begin the step a moment before rank 0.
    return f"{max(0.0, min(begin for begin, _ in found)):.2f}-{max(end for _, end in found):.2f}"
