"""Generation by the policy's own engine: for platforms without vLLM, and as a cross-check of it. It has no KV cache: every new
token runs its whole prefix again. No weights are pushed; the log-probs are the trainer's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from megappo.config.run_sections import TimeoutsConfig
from megappo.data.packing import NO_ID, PackedBatch, cu_seqlens_of
from megappo.engine.base import Engine
from megappo.engine.losses import LanguageOutput, LogitsDtype, LossOutput
from megappo.engine.whole_batch import pass_whole_batch
from megappo.parallel.meeting import Limit, Point, meet
from megappo.rollout.types import KeptIds, Replica, Request, Response, SamplingParams, Segment

# The engine returns one number per token and name: the ids that a token was drawn from have the names "kept 0", "kept 1", ...
_KEPT = "kept "


class MegatronRollout:
    """Rollout engine that samples with the policy's engine, whose ranks form one replica; one step draws one token for every
    request. detokenize: ids -> text, needed for stop strings only. logits_dtype: logits are rounded to it, as by
    `policy.logits_dtype`."""

    name = "megatron"

    def __init__(
        self,
        engine: Engine,
        detokenize: Callable[[Sequence[int]], str] | None = None,
        *,
        logits_dtype: LogitsDtype = "fp32",
        timeouts: TimeoutsConfig = TimeoutsConfig(),
    ) -> None:
        self.replica = Replica(0, 1, engine.host_group, None)
        self._meeting = Limit("run.timeouts.meeting_s", timeouts.meeting_s)
        self._engine = engine
        self._detokenize = detokenize
        self._logits_dtype: LogitsDtype = logits_dtype
        self._version = 0
        self._sampling: SamplingParams | None = None
        self._growing: list[_Growing] = []

    def meet(self, before: str) -> None:
        meet(Point(before), self._meeting, self._engine.host_group)

    def push_weights(self, version: int) -> dict[str, float]:
        """Set the version. Nothing moves: the model that trains is the one that samples."""
        self._version = version
        return {"bytes_sent": 0.0, "seconds": 0.0}

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        if self._growing:
            raise RuntimeError(f"the policy's engine holds {len(self._growing)} requests of a generation that failed")
        with self._engine.eval_mode():
            yield
        assert not self._growing, "requests were left unanswered"

    @property
    def num_unfinished(self) -> int:
        return len(self._growing)

    @property
    def num_running(self) -> int:
        return self.num_unfinished

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Add requests, all with one `sampling` at a time. Temperature 0 gives the log-probs of temperature 1."""
        if sampling.stop and self._detokenize is None:
            raise ValueError(f"rollout.stop = {list(sampling.stop)}: stop strings need a tokenizer; use stop token ids")
        assert not self._growing or sampling == self._sampling, "the running requests are sampled in another way"
        self._sampling = sampling
        self._growing += [_Growing(request, sampling) for request in requests]

    def poll(self) -> list[Response]:
        """Draw one token for every request. Collective over the policy's ranks."""
        growing, sampling = self._growing, self._sampling
        if not growing:
            return []
        assert sampling is not None
        for one, *drawn in zip(growing, *self._draw(growing, sampling)):
            one.add(*drawn)
        self._growing, responses = [], []
        for one in growing:
            is_stopped = self._ends(one, sampling)
            if not is_stopped and one.num_sampled < one.limit:
                self._growing.append(one)
            elif self.replica.answers(one.number):
                responses.append(one.response("stop" if is_stopped else "length", self._version))
        return responses

    def sleep(self) -> None:
        """Do nothing: the memory is the policy's."""

    def close(self) -> None:
        """Do nothing: the resources are the policy's."""

    def _draw(self, growing: Sequence[_Growing], sampling: SamplingParams) -> tuple[NDArray, NDArray, NDArray]:
        """Draw for every request the next token [B], its log-prob [B] and the ids it was drawn from [B, K]. Collective."""
        batch = PackedBatch(
            torch.from_numpy(numpy.concatenate([one.tokens for one in growing])).long(),
            cu_seqlens_of([len(one.tokens) for one in growing]),
        )
        batch = batch.with_fields(sequence_fields={"draw": _draws(growing), "length": batch.lengths})
        sample_next = partial(_sample_next, sampling, self._logits_dtype)
        result = pass_whole_batch(self._engine, batch, sample_next, reads=("draw", "length"), forward_only=True)
        ends = batch.cu_seqlens[1:].long() - 1
        drawn = {name: values[ends].cpu().numpy() for name, values in result.tokens.items()}
        columns = [values for name, values in drawn.items() if name.startswith(_KEPT)]
        kept = numpy.stack(columns, 1) if columns else numpy.empty((len(growing), 0))
        return drawn["token"], drawn["logprob"], kept

    def _ends(self, one: _Growing, sampling: SamplingParams) -> bool:
        if one.sampled[-1] in sampling.stop_token_ids:
            return True
        if not sampling.stop:
            return False
        assert self._detokenize is not None
        text = self._detokenize(one.sampled.tolist())
        return any(string in text for string in sampling.stop)


class _Growing:
    """A request and the tokens drawn for it so far."""

    def __init__(self, request: Request, sampling: SamplingParams) -> None:
        self.number, self.seed = request.number, request.seed
        given, self.limit = request.tokens, request.limit(sampling)
        self.num_sampled, self._start = 0, len(given)
        self._tokens = numpy.empty(self._start + self.limit, numpy.int32)
        self._tokens[: self._start] = given
        self._logprobs = numpy.empty(self.limit, numpy.float32)
        self._kept = numpy.empty((self.limit, sampling.top_k_width), numpy.int32)

    @property
    def tokens(self) -> NDArray[numpy.int32]:
        return self._tokens[: self._start + self.num_sampled]

    @property
    def sampled(self) -> NDArray[numpy.int32]:
        return self.tokens[self._start :]

    def add(self, token: float, logprob: float, kept: NDArray) -> None:
        """Add a token. kept: [K] ids that it was drawn from, padded by NO_ID."""
        self._tokens[self._start + self.num_sampled] = token
        self._logprobs[self.num_sampled] = logprob
        # Fewer than `top_k_width` if the vocabulary is smaller.
        self._kept[self.num_sampled, : len(kept)], self._kept[self.num_sampled, len(kept) :] = kept, NO_ID
        self.num_sampled += 1

    def response(self, finish: Literal["stop", "length"], version: int) -> Response:
        kept = self._kept[: self.num_sampled]
        segment = Segment(self.sampled.copy(), self._logprobs[: self.num_sampled].copy(), version)
        return Response(self.number, (segment,), finish, KeptIds.where(kept, kept != NO_ID) if kept.shape[1] else None)


def _draws(growing: Sequence[_Growing]) -> Tensor:
    """Return [B] fp64 uniforms in [0, 1) that depend only on each request's seed and the token's position in the response."""
    # 2^64 over the golden ratio: neighbouring places get seeds far apart.
    seeds = [(one.seed + 0x9E3779B97F4A7C15 * one.num_sampled) % 2**63 for one in growing]
    draws = [torch.rand(1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.cat(draws)


def _sample_next(sampling: SamplingParams, logits_dtype: LogitsDtype, output: LanguageOutput, micro: PackedBatch) -> LossOutput:
    """Sample at the last position of every sequence: next token, log-prob, and ids it was drawn from (padded by NO_ID)."""
    # The engine may have padded sequences; the result of a sequence of padding alone (length 0) is dropped.
    ends = micro.cu_seqlens[:-1].long() + (micro["length"] - 1).clamp(min=0)
    logits = output.logits(ends, logits_dtype).double()  # these rows only: the whole vocabulary is gathered
    if sampling.temperature > 0:
        logprobs = truncated_logprobs(logits / sampling.temperature, sampling.top_p, sampling.top_k)
        cumulative = logprobs.exp().cumsum(-1)
        # Rounding can leave the last sum below 1; scaled by it, no draw falls behind the last token of probability > 0.
        target = micro["draw"].to(cumulative.device)[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, target, right=True).clamp(max=logits.shape[1] - 1)[:, 0]
    else:
        logprobs = torch.log_softmax(logits, -1)
        token = logits.argmax(-1)
    found = {"token": token, "logprob": logprobs.gather(1, token[:, None])[:, 0]}
    kept = _top_k_ids(logprobs, token, min(sampling.top_k_width, logprobs.shape[1]))
    found |= {f"{_KEPT}{place}": ids for place, ids in enumerate(kept.unbind(1))}
    return LossOutput(tokens={name: _at(values, ends, micro.num_tokens) for name, values in found.items()})


def _top_k_ids(logprobs: Tensor, token: Tensor, width: int) -> Tensor:
    """Return the [B, width] most likely ids with finite log-prob, the sampled one included, padded by NO_ID."""
    if width == 0:
        return token.new_empty(token.shape[0], 0)
    best = logprobs.topk(width, dim=-1)
    ids = best.indices.masked_fill(best.values == -torch.inf, NO_ID)
    missing = (ids != token[:, None]).all(1)  # more ids than `width` tie
    ids[:, -1] = torch.where(missing, token, ids[:, -1])
    return ids


def truncated_logprobs(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Return [B, V] fp64 log-probs after top-k and top-p, -inf for tokens cut off. Ties with the k-th best token stay."""
    if top_k > 0:
        worst = logits.topk(min(top_k, logits.shape[1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < worst, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # probability of all better tokens: 0 for the best
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= top_p)
        logits = logits.masked_fill(outside, -torch.inf)
    return torch.log_softmax(logits, -1)


def _at(values: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Scatter [B] values to their packed positions of a [T] fp64 tensor."""
    # Results travel in fp32, which is exact for token ids below 2^24.
    placed = values.new_zeros(num_tokens, dtype=torch.float64)
    placed[positions] = values.double()
    return placed
