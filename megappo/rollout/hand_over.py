"""Exchanges of bytes at the meetings of an asynchronous run: from the rollout half to the training half. Collective over the world,
which is the caller's default process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from megappo.parallel.consensus import exchanged
from megappo.rollout.snapshot import packed, unpacked
from megappo.rollout.types import Response

Figures = Mapping[str, float]


def give_responses(
    responses: Sequence[Response], count: int, figures: Figures, training_ranks: int, copies: Mapping[int, bytes] = {}
) -> dict[int, bytes]:
    """Send the responses to a batch of `count` requests, numbered in it, to the training ranks: an even share of the numbers each.
    figures: of this replica. copies: for first ranks of other replicas; returns theirs, by rank. Called on the first rank of a
    replica; the others give nothing."""
    shares: list[list[Response]] = [[] for _ in range(training_ranks)]
    for response in responses:  # rank r gets the numbers of [r * count // training_ranks, (r + 1) * count // training_ranks)
        shares[((response.number + 1) * training_ranks - 1) // count].append(response)
    return exchanged_by_rank({rank: packed((dict(figures), share)) for rank, share in enumerate(shares)} | dict(copies))


def take_responses() -> tuple[list[Response], list[Figures]]:
    """Return this training rank's responses, by number, and the figures of every replica."""
    parts = [unpacked(part) for _, part in sorted(exchanged_by_rank({}).items())]
    responses = [response for _, share in parts for response in share]
    return sorted(responses, key=lambda one: one.number), [figures for figures, _ in parts]


def take_snapshots(leaders: Sequence[int]) -> dict[int, bytes]:
    """Return the snapshots that this training rank stores, by replica. leaders: first rank of each replica."""
    return {leaders.index(rank): part for rank, part in exchanged_by_rank({}).items()}


def exchanged_by_rank(parts: Mapping[int, bytes]) -> dict[int, bytes]:
    """Send bytes to ranks; return what came, by rank that sent it. Ranks without a part for another send it nothing."""
    came = exchanged([parts.get(rank, b"") for rank in range(dist.get_world_size())], dist.all_to_all_single)
    return {rank: part for rank, part in enumerate(came) if part}
