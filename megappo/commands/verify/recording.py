"""Synthetic recorded rollouts: the output of stage 2, drawn from a seed and so the same on every rank.

They hold the cases on which parity breaks: several turns with tokens that the policy did not sample, responses cut by the length
limit, responses of one token, and lengths that no parallel size divides. Fields as in `trainer/experience/collect.py`, and the
score."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from megappo.config.schema import SamplingConfig
from megappo.data.images import IMAGE_BASE, ImageStore
from megappo.data.packing import NO_ID, PackedBatch, Ragged, pack

# Most given and most sampled tokens in one turn.
_LONGEST_GIVEN, _LONGEST_SAMPLED, _MOST_TURNS = 7, 12, 3
# Ids that a token was drawn from. More would be most of a small vocabulary.
_MOST_KEPT = 8
_GROUP = 4  # samples of one group

LONGEST_RESPONSE = _LONGEST_SAMPLED * _MOST_TURNS
"""Most tokens of a response, for `rollout.max_response_tokens`."""
LONGEST_SEQUENCE = LONGEST_RESPONSE + _LONGEST_GIVEN * _MOST_TURNS


class Turn(NamedTuple):
    """Number of tokens that were given (prompt, or the answer of a tool), and of those then sampled."""

    given: int
    sampled: int


def record_rollouts(
    num_rollouts: int, *, sequences: int, vocab_size: int, seed: int = 0, kept: int = 0, images: ImageStore | None = None
) -> list[PackedBatch]:
    """Draw `num_rollouts` batches of `sequences` samples. Of four, one has a one-token response, one has several turns, one was
    cut.

    kept: most ids that a token was drawn from; if > 0 the batch has the ragged field `kept`. images: of which of four samples one
    shows none, two show one, and one shows two. Token fields: response_mask,
    rollout_logprob. Sequence fields: truncated, version, score, group (four samples each, not neighbours), greedy (score of a
    greedy response to the prompt of the group)."""
    generator = torch.Generator().manual_seed(seed)
    rollouts = [_record(sequences, vocab_size, version, generator, images) for version in range(num_rollouts)]
    return rollouts if not kept else [_with_top_k_ids(batch, kept, vocab_size, generator) for batch in rollouts]


class RecordedTexts:
    """Texts of 2 to 20 tokens for `algorithm.ptx` (`trainer.ptx.Texts`). Text i is drawn from i alone."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def lengths(self, indices: Sequence[int]) -> Tensor:
        return torch.tensor([2 + 7 * i % 19 for i in indices], dtype=torch.long)

    def packed(self, indices: Sequence[int]) -> PackedBatch:
        drawn = (torch.Generator().manual_seed(1 + i) for i in indices)
        lengths = self.lengths(indices).tolist()
        return pack([_integers(0, self._vocab_size, size, generator) for size, generator in zip(lengths, drawn)])


def num_top_k_ids(sampling: SamplingConfig) -> int:
    """`kept` of `record_rollouts` for a run with this sampling."""
    return min(sampling.top_k, _MOST_KEPT) if sampling.truncates and sampling.replay_top_k_ids else 0


def _record(sequences: int, vocab_size: int, version: int, generator: Generator, images: ImageStore | None) -> PackedBatch:
    plan = [_turns(index, generator) for index in range(sequences)]
    texts = [_integers(0, vocab_size, sum(map(sum, turns)), generator) for turns in plan]
    masks = [[sampled for turn in turns for sampled in [False] * turn.given + [True] * turn.sampled] for turns in plan]
    # Behind the first token, which is given, as the images are.
    shown = [_shown(index, images) for index in range(sequences)]
    batch = pack([[text[0], *features, *text[1:]] for text, features in zip(texts, shown)])
    mask = torch.tensor([one for mask, features in zip(masks, shown) for one in [False] * len(features) + mask])
    # 0.5 to 1.5 times the log-prob of an even distribution: bounds on the ratio to the policy cut some tokens and keep others.
    logprob = -log(vocab_size) * (0.5 + torch.rand(batch.num_tokens, generator=generator))
    return batch.with_fields(
        {"response_mask": mask, "rollout_logprob": torch.where(mask, logprob, 0.0)},
        {
            "truncated": torch.arange(sequences) % 4 == 2,
            "version": torch.full((sequences,), version, dtype=torch.long),
            "score": torch.randn(sequences, generator=generator),
            **_groups(sequences),
        },
    )


def _shown(index: int, images: ImageStore | None) -> list[int]:
    """Tokens of the images of a sample; none of the first of four."""
    numbers = [] if images is None or index % 4 == 0 else [index, index + 1][: 2 if index % 4 == 2 else 1]
    return [IMAGE_BASE + n % len(images) for n in numbers for _ in range(images.num_tokens(n % len(images)))] if images else []


def _groups(sequences: int) -> dict[str, Tensor]:
    """Groups whose samples are not neighbours, and a greedy score of each group on its samples."""
    group = torch.arange(sequences) % max(1, sequences // _GROUP)
    return {"group": group, "greedy": torch.cos(group.float())}


def _with_top_k_ids(batch: PackedBatch, most: int, vocab_size: int, generator: Generator) -> PackedBatch:
    """Add `kept`: the sampled token and up to most - 1 other ids; none if the token was not sampled."""
    ids = torch.randint(0, vocab_size, (batch.num_tokens, most), generator=generator, dtype=torch.int32)
    ids[:, 0] = batch.tokens
    counts = torch.randint(1, most + 1, (batch.num_tokens, 1), generator=generator)
    unsampled = ~batch["response_mask"][:, None] | (torch.arange(most) >= counts)
    return batch.with_fields(ragged_fields={"kept": Ragged.of_table(ids.masked_fill(unsampled, NO_ID))})


def _turns(index: int, generator: Generator) -> Sequence[Turn]:
    if index % 4 == 0:
        return [Turn(_integers(1, _LONGEST_GIVEN + 1, 1, generator)[0], 1)]
    count = _integers(2, _MOST_TURNS + 1, 1, generator)[0] if index % 4 == 1 else 1
    given = _integers(1, _LONGEST_GIVEN + 1, count, generator)
    return [Turn(*lengths) for lengths in zip(given, _integers(2, _LONGEST_SAMPLED + 1, count, generator))]


def _integers(low: int, high: int, count: int, generator: Generator) -> list[int]:
    """`count` random numbers of low..high-1."""
    return torch.randint(low, high, (count,), generator=generator).tolist()
