"""Batch fields of each critic, the joint value of several critics, and their disagreement."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from megappo.algo.whitening import aggregate, disagreement
from megappo.data.packing import PackedBatch
from megappo.parallel.totals import total
from megappo.telemetry.metrics import Metric

DISAGREEMENT = "disagreement"
"""Batch field: standard deviation of the critics' values, [T], 0 at tokens that were not sampled."""


BONUS = "entropy_bonus"
"""Field of the policy's loss: 1 at tokens with an entropy bonus, 0 at others; without the field all tokens have it."""


class CriticFields(NamedTuple):
    """Names of one critic's fields: value [T], bootstrap [B] (value after the last token), returns [T] (targets)."""

    value: str
    bootstrap: str
    returns: str


def fields_of(role: str) -> CriticFields:
    """Return the field names of a critic: `value` for the role `critic`, `value.b` for `critic_b`."""
    end = role.removeprefix("critic").replace("_", ".")
    return CriticFields(f"value{end}", f"bootstrap{end}", f"returns{end}")


def critics_in(batch: PackedBatch) -> dict[str, CriticFields]:
    """Return role -> field names of the critics with values in the batch."""
    # Sorted, so that every rank adds them up in one order, whichever critic answered first.
    ends = sorted(name.removeprefix("value") for name in batch.token_fields if name == "value" or name.startswith("value."))
    return {role: fields_of(role) for role in (f"critic{end.replace('.', '_')}" for end in ends)}


def of_critic(batch: PackedBatch, fields: CriticFields) -> PackedBatch:
    """Return the batch with one critic's value [T] and bootstrap [B] as the fields value and bootstrap."""
    return batch.with_fields({"value": batch[fields.value]}, {"bootstrap": batch[fields.bootstrap]})


def of_critics(batch: PackedBatch, how: Literal["mean", "min"]) -> PackedBatch:
    """Return the batch with the mean or minimum of the critics' value and bootstrap as these fields; unchanged with fewer than
    two."""
    critics = list(critics_in(batch).values())
    if len(critics) < 2:
        return batch
    value = aggregate([batch[one.value] for one in critics], how)
    return batch.with_fields({"value": value}, {"bootstrap": aggregate([batch[one.bootstrap] for one in critics], how)})


def with_disagreement(batch: PackedBatch) -> tuple[PackedBatch, dict[str, float]]:
    """Add the field disagreement and return the batch with the metric of its mean over the target tokens of all ranks; with fewer
    than two critics, the batch unchanged and no metric. Collective over the world."""
    critics, mask = critics_in(batch), batch["response_mask"]
    if len(critics) < 2:
        return batch, {}
    deviation = disagreement([batch[one.value] for one in critics.values()])
    deviation = torch.where(mask, deviation, 0.0)
    targets = batch["value_mask"] if "value_mask" in batch else mask
    sums = deviation[targets].sum(dtype=torch.float64), targets.sum(dtype=torch.float64)
    added, count = total(torch.stack(sums).cpu()).tolist()
    return batch.with_fields({DISAGREEMENT: deviation}), {Metric.DISAGREEMENT.value: added / max(count, 1.0)}
