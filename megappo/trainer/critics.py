"""Fields of each critic in a batch, and what several critics say together: their value of a prefix, and how far they disagree."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from megappo.algo.whitening import aggregate, disagreement
from megappo.data.packing import PackedBatch
from megappo.parallel.totals import total
from megappo.telemetry.metrics import Metric

DISAGREEMENT = "disagreement"
"""Field of a batch: deviation of the critics' values [T], 0 at tokens that were not sampled."""


BONUS = "entropy_bonus"
"""Field of the policy's loss: 1 at tokens that the entropy bonus counts, 0 at others; without it all count."""


class CriticFields(NamedTuple):
    """Names of a critic's own fields: value [T], bootstrap [B] (value after the last token), returns [T] (its targets)."""

    value: str
    bootstrap: str
    returns: str


def fields_of(role: str) -> CriticFields:
    """Fields of a critic: `value` of the role `critic`, `value.b` of `critic_b`."""
    end = role.removeprefix("critic").replace("_", ".")
    return CriticFields(f"value{end}", f"bootstrap{end}", f"returns{end}")


def critics_in(batch: PackedBatch) -> dict[str, CriticFields]:
    """Role -> fields of the critics whose values are in the batch."""
    # Sorted, so that every rank adds them up in one order, whichever critic answered first.
    ends = sorted(name.removeprefix("value") for name in batch.token_fields if name == "value" or name.startswith("value."))
    return {role: fields_of(role) for role in (f"critic{end.replace('.', '_')}" for end in ends)}


def of_critic(batch: PackedBatch, fields: CriticFields) -> PackedBatch:
    """The batch with a critic's own value [T] and bootstrap [B] as the fields value and bootstrap."""
    return batch.with_fields({"value": batch[fields.value]}, {"bootstrap": batch[fields.bootstrap]})


def of_critics(batch: PackedBatch, how: Literal["mean", "min"]) -> PackedBatch:
    """The batch with the aggregate of several critics' value and bootstrap in these fields; of one critic the batch itself."""
    critics = list(critics_in(batch).values())
    if len(critics) < 2:
        return batch
    value = aggregate([batch[one.value] for one in critics], how)
    return batch.with_fields({"value": value}, {"bootstrap": aggregate([batch[one.bootstrap] for one in critics], how)})


def with_disagreement(batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
    """(the batch with the field disagreement, its mean over the tokens with a target, of all ranks, by metric); with one critic
    the batch itself. Collective over the world."""
    critics, mask = critics_in(batch), batch["response_mask"]
    if len(critics) < 2:
        return batch, {}
    deviation = disagreement([batch[one.value] for one in critics.values()])
    deviation = torch.where(mask, deviation, 0.0)
    targets = batch["value_mask"] if "value_mask" in batch else mask
    sums = deviation[targets].sum(dtype=torch.float64), targets.sum(dtype=torch.float64)
    added, count = total(torch.stack(sums)).tolist()
    return batch.with_fields({DISAGREEMENT: deviation}), {Metric.DISAGREEMENT.value: added / max(count, 1.0)}
