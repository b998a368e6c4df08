"""Requests for the rollout engine, and the packed batch of its responses.

Seeds depend only on the run's seed, the step and the index of the sample, so a resumed run draws the same samples as an
uninterrupted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from megappo.data.packing import NO_ID, PackedBatch, cu_seqlens_of
from megappo.data.prompts import Prompt
from megappo.rollout.types import KeptIds, Request, Response


def sample_seed(run_seed: int, step: int, sample: int) -> int:
    """A 63-bit seed for one sample, the same on every rank and after a resume."""
    return _seed_of(f"{run_seed}/{step}/{sample}")


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def make_requests(prompts: Sequence[Sequence[int]], samples_per_prompt: int, run_seed: int, step: int) -> list[Request]:
    """`samples_per_prompt` requests for each prompt, the samples of one prompt next to each other."""
    return [
        Request(number, prompt, sample_seed(run_seed, step, number))
        for number, prompt in enumerate(prompt for prompt in _ids(prompts) for _ in range(samples_per_prompt))
    ]


def evaluation_requests(prompts: Sequence[Prompt], n: int, run_seed: int, name: str) -> list[Request]:
    """`n` requests for each prompt of the evaluation set `name`, next to each other.

    A seed depends on the run's seed, the set, the prompt's row in its source and the number of the sample: neither on the step, so
    that evaluations differ by the weights alone, nor on which other prompts there are.
    """
    ids = _ids([prompt.tokens for prompt in prompts])
    return [
        Request(index * n + sample, ids[index], _seed_of(f"eval/{run_seed}/{name}/{prompt.id.rpartition('#')[2]}/{sample}"))
        for index, prompt in enumerate(prompts)
        for sample in range(n)
    ]


def _ids(prompts: Sequence[Sequence[int]]) -> list[NDArray[numpy.int32]]:
    return [numpy.asarray(prompt, numpy.int32) for prompt in prompts]


def pack_experience(requests: Sequence[Request], responses: Sequence[Response]) -> PackedBatch:
    """Pack prompt and response of every sample; responses[i] answers requests[i].

    Token fields: response_mask (true on sampled tokens), rollout_logprob (the sampler's, 0 elsewhere), and if responses have it
    kept ([T, K] int32, the ids that the token was drawn from, then NO_ID, and NO_ID at tokens that were not sampled; K: most ids of
    any token). Sequence fields: truncated (cut by the length limit), version (of the oldest weights that drew a part of it).
    """
    tokens: list[NDArray[numpy.int32]] = []
    mask: list[NDArray[numpy.bool_]] = []
    logprobs: list[NDArray[numpy.float32]] = []
    for request, response in zip(requests, responses, strict=True):
        assert request.number == response.number, f"response {response.number} for request {request.number}"
        prompt = numpy.asarray(request.prompt, numpy.int32)
        tokens += [prompt, response.tokens]
        mask += [numpy.zeros(len(prompt), numpy.bool_), response.sampled]
        logprobs += [numpy.zeros(len(prompt), numpy.float32), response.logprobs]
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(tokens[::2], tokens[1::2])]
    sampled = torch.from_numpy(numpy.concatenate(mask))
    fields = {"response_mask": sampled, "rollout_logprob": torch.from_numpy(numpy.concatenate(logprobs))}
    kept = [response.kept for response in responses if response.kept is not None]
    if kept:
        fields["kept"] = _kept_field(kept, sampled)
    return PackedBatch(
        tokens=torch.from_numpy(numpy.concatenate(tokens)).long(),
        cu_seqlens=cu_seqlens_of(torch.tensor(lengths, dtype=torch.long)),
        token_fields=fields,
        sequence_fields={
            "truncated": torch.tensor([r.finish == "length" for r in responses]),
            "version": torch.tensor([r.oldest_version for r in responses], dtype=torch.long),
        },
    )


def _kept_field(kept: Sequence[KeptIds], sampled: Tensor) -> Tensor:
    """Kept ids [T, K] int32 from those of all sampled tokens, in their order."""
    counts = torch.zeros(sampled.numel(), dtype=torch.long)
    counts[sampled] = torch.from_numpy(numpy.concatenate([one.counts for one in kept])).long()
    places = torch.arange(int(counts.max()) if counts.numel() else 0) < counts[:, None]
    field = torch.full(places.shape, NO_ID, dtype=torch.int32)
    field[places] = torch.from_numpy(numpy.concatenate([one.ids for one in kept]))
    return field
