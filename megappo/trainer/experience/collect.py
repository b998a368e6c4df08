"""Requests for the rollout engine, and the experience made of its responses. Seeds depend only on the run's seed, the step and the
sample's index, so a resumed run draws the same samples as an uninterrupted one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from megappo.data.packing import ROUTES, PackedBatch, Ragged, cu_seqlens_of, route_dtype
from megappo.data.prompts import Prompt
from megappo.parallel.consensus import gathered, raise_together
from megappo.parallel.totals import names_of_ranks, place_in_world, total
from megappo.rollout.turns import TurnsRollout
from megappo.rollout.types import EnvironmentFault, KeptIds, Request, Response, RolloutEngine, joined
from megappo.trainer.experience.experience import Experience

LOST = "no_verdict/"
"""Start of the names of batch fields of one round, with a reason for which environments ended trajectories without a score."""


def sample_seed(run_seed: int, step: int, sample: int) -> int:
    """Return a 63-bit seed for one sample, the same on every rank and after a resume."""
    return _seed_of(f"{run_seed}/{step}/{sample}")


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True)
class SampleRequests(Sequence[Request]):
    """Requests of a batch, built lazily; the samples of one prompt are adjacent.
    prompt_of: prompt 0..num_prompts-1, or only its ids. seed_of: seed of sample 0..num_prompts*samples_per_prompt-1."""

    num_prompts: int
    samples_per_prompt: int
    prompt_of: Callable[[int], Prompt | Sequence[int]]
    seed_of: Callable[[int], int]

    def __len__(self) -> int:
        return self.num_prompts * self.samples_per_prompt

    def __getitem__(self, number: int) -> Request:  # type: ignore[override]  # no slices
        if not 0 <= number < len(self):
            raise IndexError(number)
        place = number // self.samples_per_prompt
        prompt = self.prompt_of(place)
        tokens, source = (prompt.tokens, prompt) if isinstance(prompt, Prompt) else (prompt, None)
        return Request(number, numpy.asarray(tokens, numpy.int32), self.seed_of(number), group=place, source=source)


def make_requests(prompts: Sequence[Sequence[int]], samples_per_prompt: int, run_seed: int, step: int) -> SampleRequests:
    """Build `samples_per_prompt` requests for each prompt of a step."""
    return SampleRequests(len(prompts), samples_per_prompt, prompts.__getitem__, partial(sample_seed, run_seed, step))


def requests_of_step(
    prompts: Sequence[Prompt], rows: Sequence[int], n: int, run_seed: int, step: int, num_before: int = 0
) -> SampleRequests:
    """Build `n` requests for each of the prompts in `rows`. num_before: samples drawn in earlier rounds of the step."""
    return SampleRequests(
        len(rows), n, lambda place: prompts[rows[place]], lambda number: sample_seed(run_seed, step, num_before + number)
    )


def evaluation_requests(prompts: Sequence[Prompt], n: int, run_seed: int, name: str) -> SampleRequests:
    """Build `n` requests for each prompt of the evaluation set `name`."""

    # Seeds leave out the step, so evaluations differ by the weights alone, and take the prompt's row, so other prompts do not
    # matter.
    def seed_of(number: int) -> int:
        place, sample = divmod(number, n)
        return _seed_of(f"eval/{run_seed}/{name}/{prompts[place].id.rpartition('#')[2]}/{sample}")

    return SampleRequests(len(prompts), n, prompts.__getitem__, seed_of)


def canary_requests(prompts: Sequence[Prompt], rows: Sequence[int], run_seed: int, step: int) -> SampleRequests:
    """Build a request for each of the prompts in `rows`, with seeds that no sample of the step has, and without their records: no
    environment plays them."""
    return SampleRequests(
        len(rows), 1, lambda place: prompts[rows[place]].tokens, lambda number: _seed_of(f"canary/{run_seed}/{step}/{number}")
    )


def prompt_of_sample(prompts: Sequence[Prompt], rows: Sequence[int], n: int, sample: int) -> Prompt:
    """Return the prompt of a sample in a batch with `n` samples for each of the prompts in `rows`."""
    return prompts[rows[sample // n]]


def share_pictures(engine: RolloutEngine, num_samples: int) -> None:
    """Give every rank the images that environments have shown in a batch of so many samples. Collective over the world if
    `rollout.environment.images` is set."""
    if isinstance(engine, TurnsRollout) and (pictures := engine.pictures) is not None:
        for theirs in gathered(pictures.end_batch(num_samples)):
            pictures.take(theirs)


def collect(
    requests: Sequence[Request], responses: Sequence[Response], *, with_top_k_ids: bool = False, num_experts: int = 0
) -> Experience:
    """Turn the responses of all ranks into experience spread over all ranks. Collective over the world.
    requests: of the whole batch, the same on every rank. responses: those drawn on this rank, by number. with_top_k_ids,
    num_experts: as in `pack_experience`. A trajectory's last sequence has the number of its request; the earlier sequences of all
    trajectories, in order, are numbered from len(requests). EnvironmentFault on all ranks if an environment failed. A field LOST +
    reason [B] bool marks the trajectories that environments of any rank ended for that reason."""
    asked, responses, previous, num_samples, any_lost = _sequences(requests, responses)
    numbers = [response.number for response in responses]
    # With partial rollouts every request has a limit. Read it there, so ranks that drew nothing have the same fields.
    is_partial = len(requests) > 0 and requests[0].max_tokens is not None
    recorded = {"with_top_k_ids": with_top_k_ids, "num_experts": num_experts}
    drawn = pack_experience(asked, responses, **recorded, is_partial=is_partial)
    if any_lost:
        drawn = drawn.with_fields({}, _lost_of([_reason_of(one) for one in responses]))
    oldest, newest = ([getattr(one, name) for one in responses] for name in ("oldest_version", "newest_version"))
    versions = torch.tensor([oldest, newest], dtype=torch.int32)
    groups = torch.tensor([request.group for request in asked], dtype=torch.int32)
    of_drawn = torch.tensor(numbers, dtype=torch.long), drawn, num_samples, (versions[0], versions[1]), groups, previous
    return Experience.of_drawn(*of_drawn)


def _sequences(
    requests: Sequence[Request], responses: Sequence[Response]
) -> tuple[list[Request], list[Response], Tensor, int, bool]:
    """Return this rank's sequences as requests and responses by number, their predecessors [M] int32, the number of all sequences,
    and whether an environment of any rank ended one without a score. Collective over the world."""
    faults = [response.fault for response in responses if response.fault is not None]
    counts = torch.zeros(len(requests) + 2, dtype=torch.long)  # the last two of the lost and of faults
    for response in responses:
        counts[response.number] = len(response.contexts)
    counts[-2] = sum(bool(_reason_of(one)) for one in responses)
    counts[-1] = len(faults)
    counts = total(counts)
    if int(counts[-1]):
        named = faults[0] if faults and faults[0].startswith("rank ") else f"rank {place_in_world()[0]}: {''.join(faults[:1])}"
        fault = EnvironmentFault(named) if faults else None
        raise_together(fault, EnvironmentFault)
    counts, any_lost = counts[:-2], bool(counts[-2])
    firsts = len(requests) + counts.cumsum(0) - counts
    found: list[tuple[Request, Response, int]] = []
    for response in responses:
        first, request = int(firsts[response.number]), requests[response.number]
        for number, one in enumerate(response.contexts, first):
            asked = replace(request, number=number, prompt=one.prompt)
            found.append((asked, Response(number, one.segments, "stop", one.kept), number - 1 if number > first else -1))
        last = request if response.prompt is None else replace(request, prompt=response.prompt)
        found.append((last, response, first + len(response.contexts) - 1 if response.contexts else -1))
    found.sort(key=lambda one: one[1].number)
    previous = torch.tensor([one[2] for one in found], dtype=torch.int32)
    return [one[0] for one in found], [one[1] for one in found], previous, len(requests) + int(counts.sum()), any_lost


def _reason_of(response: Response) -> str:
    return "" if response.played is None else response.played.no_verdict


def _lost_of(reasons: Sequence[str]) -> dict[str, Tensor]:
    """Return the fields of the reasons of all ranks, so that all ranks have the same. Collective over the world."""
    names = names_of_ranks(sorted({*reasons} - {""}))
    return {LOST + name: torch.tensor([reason == name for reason in reasons], dtype=torch.bool) for name in names}


def pack_experience(
    requests: Sequence[Request],
    responses: Sequence[Response],
    *,
    with_top_k_ids: bool = False,
    num_experts: int = 0,
    is_partial: bool = False,
) -> PackedBatch:
    """Pack prompt and response of some samples; responses[i] answers requests[i].
    Token fields: response_mask (true on sampled tokens) and rollout_logprob (the sampler's, 0 elsewhere). Sequence field: truncated
    (cut by the length limit). `with_top_k_ids` adds the ragged field kept: the ids that each sampled token was drawn from;
    `num_experts` the field `ROUTES`: of so many experts those that the sampler chose. With
    `is_partial` responses span several steps: response_mask covers this step's tokens, whole_mask [T] those of all steps, and
    unfinished [B] marks responses that a later step continues, which do not count as truncated."""
    tokens: list[NDArray[numpy.int32]] = []
    mask: list[NDArray[numpy.bool_]] = []
    logprobs: list[NDArray[numpy.float32]] = []
    lengths: list[int] = []
    for request, response in zip(requests, responses, strict=True):
        assert request.number == response.number, f"response {response.number} for request {request.number}"
        given, num_prompt = request.tokens, len(request.prompt)
        tokens += [given, response.tokens]
        mask += [numpy.zeros(len(given), numpy.bool_), response.sampled]
        earlier = [segment.logprobs for segment in request.before if segment.logprobs is not None]
        logprobs += [numpy.zeros(num_prompt, numpy.float32), *earlier, response.logprobs]
        lengths.append(len(given) + len(response.tokens))
    sampled = torch.from_numpy(joined(mask, numpy.bool_))
    fields = {"response_mask": sampled, "rollout_logprob": torch.from_numpy(joined(logprobs, numpy.float32))}
    cut = torch.tensor([response.finish == "length" for response in responses], dtype=torch.bool)
    of_sequences = {"truncated": cut}
    if is_partial:
        prompts = torch.tensor([len(request.prompt) for request in requests], dtype=torch.long)
        fields["whole_mask"] = _behind(prompts, torch.tensor(lengths, dtype=torch.long))
        goes_on = torch.tensor([request.goes_on for request in requests], dtype=torch.bool)
        of_sequences = {"truncated": cut & ~goes_on, "unfinished": cut & goes_on}
    kept = [response.kept for response in responses if response.kept is not None]
    # Also of a rank that drew nothing
    ragged = {"kept": _kept_field(kept, sampled)} if with_top_k_ids else {}
    if num_experts:
        ragged[ROUTES] = _routes_field(responses, lengths, num_experts)
    return PackedBatch(
        tokens=torch.from_numpy(joined(tokens, numpy.int32)).long(),
        cu_seqlens=cu_seqlens_of(torch.tensor(lengths, dtype=torch.long)),
        token_fields=fields,
        sequence_fields=of_sequences,
        ragged_fields=ragged,
    )


def _behind(prompts: Tensor, lengths: Tensor) -> Tensor:
    """Return [T] bool, true at tokens after the first prompts[b] of sequences of lengths[b] tokens."""
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(len(starts)) - starts >= prompts.repeat_interleave(lengths)


def _routes_field(responses: Sequence[Response], lengths: Sequence[int], num_experts: int) -> Ragged:
    dtype = route_dtype(num_experts)
    ids, counts = [torch.empty(0, dtype=dtype)], torch.zeros(sum(lengths), dtype=torch.int32)
    start = 0
    for response, length in zip(responses, lengths, strict=True):
        routes = response.routes
        assert routes is not None, f"the engine recorded no experts of response {response.number}"
        # A stop string, or steps that vLLM ran ahead, may end the response before the last rows
        rows = routes.experts[: length - routes.first]
        ids.append(torch.from_numpy(rows).flatten())
        counts[start + routes.first : start + routes.first + len(rows)] = rows.shape[1]
        start += length
    return Ragged(torch.cat(ids), counts)


def _kept_field(kept: Sequence[KeptIds], sampled: Tensor) -> Ragged:
    counts = torch.zeros(sampled.numel(), dtype=torch.int32)
    counts[sampled] = torch.from_numpy(joined([one.counts for one in kept], numpy.int32)).int()
    return Ragged(torch.from_numpy(joined([one.ids for one in kept], numpy.int32)), counts)
