"""Samples of a step without a score. They leave the experience at the end of the rollout side, so no stage of the training side
can learn from them: neither losses nor baselines of groups, whitening, KL or means. Only trajectories and counts remember them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megappo.algo.chains import last_of_chains
from megappo.parallel.totals import names_of_ranks, total
from megappo.rewards.base import UNUSABLE
from megappo.rewards.compose import Scored
from megappo.trainer.advantages import GREEDY
from megappo.trainer.experience.experience import Experience
from megappo.trainer.experience.table import Owners, SampleTable

BASELINE, GROUP, REDRAWN = "baseline", "group", "redrawn"
"""Reasons beside those of the parts (`rewards.base.NoVerdict`): the greedy response that the estimator remax compares with has no
score; fewer than two responses of the prompt have one, so there is nothing to compare; the step was drawn again."""


class VerdictRules(NamedTuple):
    """Keys `reward.max_without_verdict` and `reward.above_max`. compares_groups: the estimator needs two responses of a prompt."""

    max_share: float = 1.0
    above: Literal["stop", "redraw"] = "stop"
    compares_groups: bool = False


@dataclass(frozen=True)
class LeftOut:
    """Samples of a step that are not trained on. experience, scored: of all samples of the step. numbers: [M] int64, ascending,
    those that are trained on. reasons: number of any other sample -> why; all equal on every rank."""

    experience: Experience
    scored: Scored
    numbers: Tensor
    reasons: Mapping[int, str]

    @property
    def counts(self) -> Counter[str]:
        ends = self.experience.table.ends
        return Counter(reason for number, reason in self.reasons.items() if ends[number])

    @property
    def share(self) -> float:
        return self.counts.total() / int(self.experience.table.ends.sum())

    def exceeds(self, max_share: float) -> bool:
        """Tell if the reward failed on more than this share of them. Answers that cannot be read are no such failure: they are
        named before the run starts, and a small step may have nothing else."""
        failed = self.counts.total() - self.counts[UNUSABLE]
        return failed > max_share * int(self.experience.table.ends.sum())

    def describe(self) -> str:
        """Return `3 of 8 responses have no score: 2 undecided, 1 unreachable`."""
        of = int(self.experience.table.ends.sum())
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.counts.items()))
        return f"{self.counts.total()} of {of} responses have no score: {reasons}"

    def rest(self) -> tuple[Experience, Scored]:
        """Return what is trained on, renumbered in its order; if nothing is left, all samples with scores of 0, for no update."""
        whole, kept = self.experience, self.numbers
        if not len(kept):
            total = [0.0 if reason else score for score, reason in zip(self.scored.total, self.scored.no_verdict)]
            return whole, replace(self.scored, total=total or self.scored.total)
        places = torch.isin(whole.numbers, kept).nonzero().flatten()
        owners = Owners(whole.owners.share[kept], whole.owners.shares)
        experience = replace(whole, table=_rows(whole.table, kept), owners=owners, batch=whole.batch.select(places))
        return experience, self.scored.select(places.tolist())


def _rows(table: SampleTable, kept: Tensor) -> SampleTable:
    rows = table.rows(kept)
    # A trajectory of several sequences goes, or stays, whole: the sequence before one that stays has a new number.
    before = torch.searchsorted(kept, rows.previous.long().clamp(min=0))
    return replace(rows, previous=torch.where(rows.previous >= 0, before, -1).int())


def left_out_of(experience: Experience, scored: Scored, *, compares_groups: bool) -> LeftOut | None:
    """Find the samples without a score; None if all have one, which costs an exchange of one number. Collective over the world."""
    mine = scored.no_verdict or [""] * len(scored.total)
    if GREEDY in experience.batch:
        lost = experience.batch[GREEDY].isnan().tolist()
        mine = [reason or (BASELINE if is_lost else "") for reason, is_lost in zip(mine, lost, strict=True)]
    if not int(total(torch.tensor(sum(map(bool, mine))))):
        return None
    names = ["", *names_of_ranks(sorted({*mine} - {""})), GROUP]
    reason = experience.column(torch.tensor([names.index(one) for one in mine], dtype=torch.float64)).long()
    table = experience.table
    if table.has_chains:
        reason = reason[last_of_chains(table.previous)]
    if compares_groups:
        group = table.group.long()
        size = torch.bincount(group[reason == 0], minlength=int(group.max()) + 1)
        reason[(reason == 0) & (size[group] < 2)] = len(names) - 1
    left = reason.nonzero().flatten().tolist()
    return LeftOut(experience, scored, (reason == 0).nonzero().flatten(), {number: names[reason[number]] for number in left})
