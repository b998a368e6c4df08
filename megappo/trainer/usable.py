"""Steps whose responses say nothing about what to learn: all ranks leave their updates out, for a reason that is told.

Faults end a run (`rewards.base.RewardError`, `finite_outputs.NonFiniteOutput`); here everything has worked.
"""

from __future__ import annotations

import torch

from megappo.parallel.totals import total
from megappo.rewards.compose import Scored
from megappo.trainer.experience.table import SampleTable


def nothing_to_learn(table: SampleTable, scored: Scored, num_scored: int | None = None) -> str:
    """Reason why no model can be updated on a step's responses, the same on every rank; empty if one can.

    table: of all samples. scored: this rank's. num_scored: samples of all ranks that its counts are of, by default those of the
    table that end. Collective over the world.
    """
    undecided, unusable = total(torch.tensor([scored.num_undecided, scored.num_unusable])).tolist()
    if not int(table.sampled.sum()):
        return f"none of the {table.num_samples} responses has a sampled token"
    scored_in_all = int(table.ends.sum()) if num_scored is None else num_scored
    if not scored_in_all:  # what goes on has its advantages from the critic
        return ""
    if undecided + unusable >= scored_in_all:
        return (
            f"none of the {scored_in_all} responses has a reward: {undecided} undecided, {unusable} with a reference answer "
            "that a rule cannot read"
        )
    return ""
