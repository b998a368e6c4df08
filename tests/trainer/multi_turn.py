"""Responses of several turns, some cut, one without a sampled token; and stage 5 on them, on one rank or on several."""

import torch

from megappo.data.packing import PackedBatch, cu_seqlens_of
from megappo.parallel.shares import Shares
from megappo.parallel.totals import place_in_world
from megappo.trainer.advantages import add_advantages
from megappo.trainer.experience.experience import Experience
from megappo.trainer.experience.table import Owners
from megappo.trainer.updates import targets_of

# Responses of one to three turns: (given, sampled) tokens of each. The third has no sampled token.
TURNS = [[(2, 3), (2, 1)], [(1, 1)], [(3, 0)], [(1, 2), (1, 2), (2, 3)], [(2, 4)], [(1, 3)], [(2, 2)]]
GROUP = [0, 1, 1, 0, 1, 0, 1]
SCORE = [1.0, -0.5, 0.25, 2.0, 0.0, 1.5, 0.25]
GREEDY = [0.5, -1.0]
GAMMA, KL = 0.9, 0.3
PER_TOKEN = [[0.25 * (t + 1) for t in range(sum(s for _, s in turns))] if i % 3 == 0 else None for i, turns in enumerate(TURNS)]
# Responses to one prompt are on different ranks, and rank 1 has none.
ON_RANKS = [0, 2, 0, 2, 2, 0, 0]


def whole_batch():
    mask = [flag for turns in TURNS for given, sampled in turns for flag in [False] * given + [True] * sampled]
    generator = torch.Generator().manual_seed(4)
    names = ("logprob", "ref_logprob", "rollout_logprob", "entropy", "value")
    fields = {name: (-1.0) ** (name != "entropy") * torch.rand(len(mask), generator=generator) for name in names}
    fields["teacher_logprob"] = -torch.rand(len(mask), generator=torch.Generator().manual_seed(8))
    mask, truncated = torch.tensor(mask), torch.tensor([i % 2 == 1 for i in range(len(TURNS))])
    bootstrap = torch.where(truncated, torch.rand(len(TURNS), generator=generator), torch.nan)
    nan = torch.full(mask.shape, torch.nan)  # nothing outside the mask may be read
    return PackedBatch(
        tokens=torch.arange(len(mask)),
        cu_seqlens=cu_seqlens_of([sum(map(sum, turns)) for turns in TURNS]),
        token_fields={"response_mask": mask, **{name: torch.where(mask, x, nan) for name, x in fields.items()}},
        sequence_fields={
            "truncated": truncated,
            "bootstrap": bootstrap,
            "group": torch.tensor(GROUP, dtype=torch.int32),
        },
    )


def shaped(asked, on_own_ranks=None, per_token=None):
    """(fields on all samples from the samples of every rank, with `turns` the critic's targets of each sample if these are turns;
    metrics). on_own_ranks: rank of each sample."""
    batch = whole_batch()
    experience = Experience.of_whole(batch)
    if on_own_ranks is not None:
        rank, world_size = place_in_world()
        owners = Owners(torch.tensor(on_own_ranks), Shares.of_ranks(range(world_size)))
        experience = Experience(experience.table, owners, batch.select(owners.numbers(rank)), rank, experience.wire)
    mine = experience.numbers.tolist()
    greedy = torch.tensor([GREEDY[GROUP[i]] for i in mine], dtype=torch.float64)
    result = add_advantages(
        experience.with_fields({}, {"greedy": greedy}),
        torch.tensor([SCORE[i] for i in mine]),
        KL,
        asked,
        None if per_token is None else [per_token[i] for i in mine],
    )
    names = [name for name in ("reward", "raw_advantage", "advantage", "returns", "value_mask") if name in result.experience.batch]
    found, targets = result.experience.everywhere(names), targets_of("critic", result.experience)
    turns = {} if targets is None else {"turns": targets.counts}
    return {**{name: found[name].float() for name in names}, **turns}, result.metrics
