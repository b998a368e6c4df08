"""The language-modelling loss on a second data set (`algorithm.ptx`): its texts join the mini-batches of the policy, so one pass
has the gradient of both losses in every engine and layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megappo.data.packing import PackedBatch, Ragged, joined
from megappo.parallel.shares import Shares
from megappo.trainer.experience.table import balanced
from megappo.trainer.prepare.data import TextData
from megappo.trainer.roles import PTX_WEIGHT


class Texts(Protocol):
    """Sequences of 2 or more tokens, such as `data.texts.TextSet`."""

    def lengths(self, indices: Sequence[int]) -> Tensor: ...

    def packed(self, indices: Sequence[int]) -> PackedBatch: ...


class DrawnTexts(NamedTuple):
    """Texts of a step. numbers: texts of each update of the policy, in order; the same on every rank."""

    texts: Texts
    numbers: Sequence[Sequence[int]]


def draw_texts(data: TextData, num_updates: int) -> DrawnTexts:
    """Draw the texts of a step and advance the cursor, also for updates that `target_kl` may skip."""
    return DrawnTexts(data.texts, [data.loader.next_step() for _ in range(num_updates)])


def with_texts(
    share: PackedBatch, texts: Texts, numbers: Sequence[int], shares: Shares, rank: int, denominator: float
) -> PackedBatch:
    """Join a rank's share of a mini-batch with its share of these texts, balanced by tokens. rank: of the world. Not collective.
    The field PTX_WEIGHT makes the loss, a sum divided by `denominator`, the mean over all text tokens that have a prefix."""
    lengths, index = texts.lengths(numbers), shares.index_of(rank)
    own = (balanced(lengths, shares.count) == index).nonzero().flatten().tolist()
    added = texts.packed([numbers[i] for i in own]).to(share.device)
    if "weight" not in share:  # of a rank that holds no fields
        return joined([share, added])
    has_prefix = torch.ones(added.num_tokens, device=share.device).index_fill_(0, added.cu_seqlens[:-1].long(), 0.0)
    weight = has_prefix * (denominator / (int(lengths.sum()) - len(numbers)))
    share = share.with_fields({PTX_WEIGHT: torch.zeros(share.num_tokens, device=share.device)})
    return joined([share, _without_fields_of_ppo(added, share).with_fields({PTX_WEIGHT: weight})])


def _without_fields_of_ppo(added: PackedBatch, share: PackedBatch) -> PackedBatch:
    """Return the texts with zeros, and no ids, in the fields of the share, so they count in no other loss."""
    num_tokens, num_sequences = added.num_tokens, added.num_sequences
    return added.with_fields(
        {name: x.new_zeros((num_tokens, *x.shape[1:])) for name, x in share.token_fields.items()},
        {name: x.new_zeros((num_sequences, *x.shape[1:])) for name, x in share.sequence_fields.items()},
        {name: Ragged(x.ids[:0], x.counts.new_zeros(num_tokens)) for name, x in share.ragged_fields.items()},
    )
