"""Experience made by hand: of a batch or of responses that every rank has, sample n on rank n % world size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megappo.data.packing import PackedBatch
from megappo.data.prompts import Prompt
from megappo.parallel.shares import Shares
from megappo.parallel.totals import place_in_world
from megappo.rewards.compose import Scored
from megappo.rollout.types import Request, Response
from megappo.trainer.experience.collect import pack_experience
from megappo.trainer.experience.experience import Experience
from megappo.trainer.experience.table import Owners
from megappo.trainer.scoring import score_responses


def dealt(batch: PackedBatch, version: int = 0) -> Experience:
    """The samples of a batch, dealt to the ranks one by one. `version`: of the weights that drew them."""
    rank, world_size = place_in_world()
    if "truncated" not in batch:
        batch = batch.with_fields(sequence_fields={"truncated": torch.zeros(batch.num_sequences, dtype=torch.bool)})
    whole = Experience.of_whole(batch)
    versions = torch.full_like(whole.table.oldest, version)
    table = replace(whole.table, oldest=versions, newest=versions)
    owners = Owners(torch.arange(batch.num_sequences) % world_size, Shares.of_ranks(range(world_size)))
    return Experience(table, owners, batch.select(owners.numbers(rank)), rank, whole.wire)


def score(
    prompts: Sequence[Prompt], responses: Sequence[Response], tokenizer: Any, scorer: Any, stop: Sequence[str] = ()
) -> Scored:
    """Scores of this rank's part of the responses; prompts[i] belongs to responses[i]."""
    requests = [Request(number, prompt.tokens, 0) for number, prompt in enumerate(prompts)]
    experience = dealt(pack_experience(requests, [replace(one, number=number) for number, one in enumerate(responses)]))
    return score_responses(experience, prompts.__getitem__, tokenizer, scorer, stop)


def part_means(scored: Scored) -> dict[str, float]:
    """Name -> mean over the samples that the part scored; parts that scored none are left out."""
    found = {name: [value for value in values if not math.isnan(value)] for name, values in scored.parts.items()}
    return {name: sum(values) / len(values) for name, values in found.items() if values}
