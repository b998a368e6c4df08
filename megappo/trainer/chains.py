"""Trajectories of several sequences in stage 5 (`algo/chains.py`): those of this rank laid end to end for the scans, and taken
apart again. `Owners.spread` keeps the sequences of a trajectory on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megappo.algo.aggregation import tokens_per_sequence
from megappo.algo.chains import order_of_chains
from megappo.data.packing import PackedBatch
from megappo.trainer.experience.experience import Experience
from megappo.trainer.token_scans import PerToken


@dataclass(frozen=True)
class Chains:
    """order: [B] int64, this rank's samples chain by chain. counts: [C] int64, sequences of each chain."""

    order: Tensor
    counts: Tensor

    @classmethod
    def of(cls, experience: Experience) -> Chains | None:
        """None if all trajectories of all ranks are one sequence."""
        if not experience.table.has_chains:
            return None
        numbers, previous = experience.numbers, experience.table.previous[experience.numbers].long()
        places = torch.searchsorted(numbers, previous.clamp(min=0)).clamp(max=max(len(numbers) - 1, 0))
        assert bool(((previous < 0) | (numbers[places] == previous)).all()), "sequences of a trajectory lie on several ranks"
        return cls(*order_of_chains(torch.where(previous >= 0, places, -1)))

    @property
    def _last(self) -> Tensor:
        """[C] int64, places in the order of the last sequences."""
        return self.counts.cumsum(0) - 1

    def merged(self, batch: PackedBatch) -> PackedBatch:
        """One sequence for each chain; fields of sequences are those of its last one."""
        ordered = batch.select(self.order)
        bounds = torch.cat((torch.zeros(1, dtype=torch.long), self.counts.cumsum(0)))
        last = {name: values[self._last] for name, values in ordered.sequence_fields.items()}
        return replace(ordered, cu_seqlens=ordered.cu_seqlens[bounds], sequence_fields=last)

    def scores(self, score: Tensor) -> Tensor:
        """[C] of the scores [B] of samples: a trajectory's is that of its last sequence."""
        return score[self.order][self._last]

    def per_token(self, per_token: PerToken | None, batch: PackedBatch) -> PerToken | None:
        """Rewards of tokens of chains from those of samples; sequences without any have 0."""
        if per_token is None:
            return None
        sampled = tokens_per_sequence(batch["response_mask"], batch.cu_seqlens).tolist()
        found: list[Sequence[float] | None] = []
        for chain in self.order.split(self.counts.tolist()):
            parts = [per_token[i] for i in chain.tolist()]
            given = [[0.0] * int(sampled[i]) if one is None else list(one) for i, one in zip(chain.tolist(), parts)]
            found.append(None if all(one is None for one in parts) else [x for one in given for x in one])
        return found

    def apart(self, batch: PackedBatch, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fields [T] of the merged batch in the order of `batch`."""
        places = batch.token_index(self.order)
        return {name: torch.empty_like(values).index_copy(0, places, values) for name, values in fields.items()}
