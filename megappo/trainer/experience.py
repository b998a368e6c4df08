"""Requests for the rollout engine, and the experience of its responses.

Seeds depend only on the run's seed, the step and the index of the sample, so a resumed run draws the same samples as an
uninterrupted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy
import torch
from torch import Tensor

from megappo.data.packing import NO_ID, PackedBatch, cu_seqlens_of
from megappo.data.prompts import Prompt
from megappo.experience.experience import Experience
from megappo.parallel.totals import place_in_world
from megappo.rollout.types import KeptIds, Request, Response


def sample_seed(run_seed: int, step: int, sample: int) -> int:
    """A 63-bit seed for one sample, the same on every rank and after a resume."""
    return _seed_of(f"{run_seed}/{step}/{sample}")


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True)
class SampleRequests(Sequence[Request]):
    """Requests of a batch, made when they are looked at: those of the samples of one prompt next to each other.

    tokens_of: ids of prompt 0..num_prompts-1. seed_of: seed of sample 0..num_prompts*samples_per_prompt-1.
    """

    num_prompts: int
    samples_per_prompt: int
    tokens_of: Callable[[int], Sequence[int]]
    seed_of: Callable[[int], int]

    def __len__(self) -> int:
        return self.num_prompts * self.samples_per_prompt

    def __getitem__(self, number: int) -> Request:  # type: ignore[override]  # no slices
        if not 0 <= number < len(self):
            raise IndexError(number)
        return Request(tuple(self.tokens_of(number // self.samples_per_prompt)), self.seed_of(number))


def make_requests(prompts: Sequence[Sequence[int]], samples_per_prompt: int, run_seed: int, step: int) -> SampleRequests:
    """`samples_per_prompt` requests for each prompt of a step."""
    return SampleRequests(len(prompts), samples_per_prompt, prompts.__getitem__, partial(sample_seed, run_seed, step))


def requests_of_step(prompts: Sequence[Prompt], rows: Sequence[int], n: int, run_seed: int, step: int) -> SampleRequests:
    """`n` requests for each of the prompts in these rows."""
    return SampleRequests(len(rows), n, lambda place: prompts[rows[place]].tokens, partial(sample_seed, run_seed, step))


def evaluation_requests(prompts: Sequence[Prompt], n: int, run_seed: int, name: str) -> SampleRequests:
    """`n` requests for each prompt of the evaluation set `name`.

    A seed depends on the run's seed, the set, the prompt's row in its source and the number of the sample: neither on the step, so
    that evaluations differ by the weights alone, nor on which other prompts there are.
    """

    def seed_of(number: int) -> int:
        place, sample = divmod(number, n)
        return _seed_of(f"eval/{run_seed}/{name}/{prompts[place].id.rpartition('#')[2]}/{sample}")

    return SampleRequests(len(prompts), n, lambda place: prompts[place].tokens, seed_of)


def own_part(responses: Sequence[Response]) -> tuple[Sequence[int], list[Response]]:
    """(numbers, responses) that this rank answers for, of responses that every rank has."""
    rank, world_size = place_in_world()
    numbers = range(rank, len(responses), world_size)
    return numbers, [responses[number] for number in numbers]


def collect(
    requests: Sequence[Request], numbers: Sequence[int], responses: Sequence[Response], *, with_kept: bool = False
) -> Experience:
    """Experience of all ranks' responses, spread over all ranks. Collective over the world.

    requests: of the whole batch, the same on every rank. numbers: samples of this rank's `responses`, in any order; each sample is
    one rank's. with_kept: responses have the ids that tokens were drawn from.
    """
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    mine = torch.tensor([numbers[i] for i in order], dtype=torch.long)
    ordered = [responses[i] for i in order]
    drawn = pack_experience([requests[number] for number in mine.tolist()], ordered, with_kept=with_kept)
    versions = torch.tensor([response.version for response in ordered], dtype=torch.int32)
    return Experience.of_drawn(mine, drawn, len(requests), (versions, versions))


def pack_experience(requests: Sequence[Request], responses: Sequence[Response], *, with_kept: bool = False) -> PackedBatch:
    """Pack prompt and response of some samples.

    Token fields: response_mask (true on sampled tokens), rollout_logprob (the sampler's, 0 elsewhere), and if `with_kept` kept ([T,
    K] int32, the ids that the token was drawn from, then NO_ID, and NO_ID in prompts; K: most ids of any token). Sequence fields:
    truncated (cut by the length limit).
    """
    prompts = [numpy.asarray(request.prompt, dtype=numpy.int64) for request in requests]
    sampled = [numpy.asarray(response.tokens, dtype=numpy.int64) for response in responses]
    logprobs = [numpy.asarray(response.logprobs, dtype=numpy.float32) for response in responses]
    parts = [part for pair in zip(prompts, sampled, strict=True) for part in pair]
    lengths = torch.tensor([part.size for part in parts], dtype=torch.long)
    tokens = torch.from_numpy(numpy.concatenate([*parts, numpy.empty(0, dtype=numpy.int64)]))
    # Parts go prompt, response, prompt, response.
    mask = (torch.arange(len(parts)) % 2 == 1).repeat_interleave(lengths, output_size=tokens.numel())
    rollout_logprob = torch.zeros(tokens.numel(), dtype=torch.float32)
    rollout_logprob[mask] = torch.from_numpy(numpy.concatenate([*logprobs, numpy.empty(0, dtype=numpy.float32)]))
    fields = {"response_mask": mask, "rollout_logprob": rollout_logprob}
    if with_kept:  # also of a rank that drew nothing
        fields["kept"] = _kept_field([response.kept for response in responses if response.kept is not None], mask)
    return PackedBatch(
        tokens=tokens,
        cu_seqlens=cu_seqlens_of(lengths.view(-1, 2).sum(1)),
        token_fields=fields,
        sequence_fields={"truncated": torch.tensor([r.finish == "length" for r in responses], dtype=torch.bool)},
    )


def _kept_field(kept: Sequence[KeptIds], sampled: Tensor) -> Tensor:
    """Kept ids [T, K] int32 from those of all sampled tokens, in their order."""
    counts = torch.zeros(sampled.numel(), dtype=torch.long)
    counts[sampled] = torch.from_numpy(numpy.concatenate([numpy.empty(0, dtype=numpy.int32), *(one.counts for one in kept)])).long()
    places = torch.arange(int(counts.max()) if counts.numel() else 0) < counts[:, None]
    field = torch.full(places.shape, NO_ID, dtype=torch.int32)
    field[places] = torch.from_numpy(numpy.concatenate([numpy.empty(0, dtype=numpy.int32), *(one.ids for one in kept)]))
    return field
