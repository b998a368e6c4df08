"""Generation by the policy's own engine: for platforms without vLLM, and as a cross-check of it.

Without KV cache: every new token runs the whole prefix again, so the cost grows with the square of the length. No weights are
pushed, and the log-probs are the trainer's by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat

import torch
from torch import Tensor

from megappo.data.packing import NO_ID, PackedBatch, pack
from megappo.engine.base import Engine, LanguageOutput, LogitsDtype, LossOutput
from megappo.engine.whole_batch import pass_whole_batch
from megappo.rollout.types import KeptIds, Request, Response, SamplingParams

# The engine returns one number per token and name: the ids that a token was drawn from have the names "kept 0", "kept 1", ...
_KEPT = "kept "


class MegatronRollout:
    """Rollout engine that samples with the engine of the policy. `detokenize` (ids -> text) is needed for stop strings only.

    logits_dtype: they are rounded to it, as the trainer does with `policy.logits_dtype`.
    """

    name = "megatron"

    def __init__(
        self, engine: Engine, detokenize: Callable[[Sequence[int]], str] | None = None, *, logits_dtype: LogitsDtype = "fp32"
    ) -> None:
        self._engine = engine
        self._detokenize = detokenize
        self._logits_dtype: LogitsDtype = logits_dtype
        self._version = 0

    def push_weights(self, version: int) -> dict[str, float]:
        """Set the version; the model that samples is the model that trains, so nothing moves."""
        self._version = version
        return {"bytes_sent": 0.0, "seconds": 0.0}

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Response]:
        """Collective; see `rollout.types.RolloutEngine`. Temperature 0 gives the log-probs of temperature 1."""
        if sampling.stop and self._detokenize is None:
            raise ValueError(f"rollout.stop = {list(sampling.stop)}: stop strings need a tokenizer; use stop token ids")
        sampled: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        kept: list[list[list[int]]] = [[] for _ in requests]
        sample_next = partial(_sample_next, sampling, self._logits_dtype)
        finished = [False] * len(requests)
        with self._engine.eval_mode():
            for position in range(sampling.max_tokens):  # collective: all ranks pass the same requests and stop together
                active = [i for i, done in enumerate(finished) if not done]
                if not active:
                    break
                batch = pack([[*requests[i].prompt, *sampled[i]] for i in active])
                draws = _draws([requests[i] for i in active], position)
                batch = batch.with_fields(sequence_fields={"draw": draws, "length": batch.lengths})
                result = pass_whole_batch(self._engine, batch, sample_next, reads=("draw", "length"), forward_only=True)
                ends = batch.cu_seqlens[1:].long() - 1
                drawn = {name: values[ends].tolist() for name, values in result.tokens.items()}
                columns = [values for name, values in drawn.items() if name.startswith(_KEPT)]
                rows = zip(*columns) if columns else repeat(())
                for i, token, logprob, row in zip(active, drawn["token"], drawn["logprob"], rows):
                    sampled[i].append(int(token))
                    logprobs[i].append(logprob)
                    kept[i].append([int(one) for one in row if one != NO_ID])
                    finished[i] = self._ends(sampled[i], sampling)
        return [
            Response(
                tuple(sampled[i]),
                tuple(logprobs[i]),
                "stop" if finished[i] else "length",
                self._version,
                KeptIds.of(kept[i]) if sampling.kept_width else None,
            )
            for i in range(len(requests))
        ]

    def sleep(self) -> None:
        """No memory of its own to release."""

    def close(self) -> None:
        """No resources of its own to free."""

    def _ends(self, tokens: list[int], sampling: SamplingParams) -> bool:
        if tokens[-1] in sampling.stop_token_ids:
            return True
        if not sampling.stop:
            return False
        assert self._detokenize is not None
        text = self._detokenize(tokens)
        return any(string in text for string in sampling.stop)


def _draws(requests: Sequence[Request], position: int) -> Tensor:
    """[B] uniform numbers in [0, 1), a function of each request's seed and the position only."""
    # 2^64 over the golden ratio: neighbouring positions get seeds far apart.
    seeds = [(request.seed + 0x9E3779B97F4A7C15 * position) % 2**63 for request in requests]
    draws = [torch.rand(1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.cat(draws)


def _sample_next(sampling: SamplingParams, logits_dtype: LogitsDtype, output: LanguageOutput, micro: PackedBatch) -> LossOutput:
    """Next token, its log-prob and the ids that it was drawn from (padded by NO_ID), at the last position of every sequence."""
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
    kept = _kept_ids(logprobs, token, min(sampling.kept_width, logprobs.shape[1]))
    found |= {f"{_KEPT}{place}": ids for place, ids in enumerate(kept.unbind(1))}
    return LossOutput(tokens={name: _at(values, ends, micro.num_tokens) for name, values in found.items()})


def _kept_ids(logprobs: Tensor, token: Tensor, width: int) -> Tensor:
    """[B, width] most likely ids with finite log-prob, the sampled one included, padded by NO_ID."""
    if width == 0:
        return token.new_empty(token.shape[0], 0)
    best = logprobs.topk(width, dim=-1)
    ids = best.indices.masked_fill(best.values == -torch.inf, NO_ID)
    missing = (ids != token[:, None]).all(1)  # more ids than `width` tie
    ids[:, -1] = torch.where(missing, token, ids[:, -1])
    return ids


def truncated_logprobs(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """[B, V] fp64 log-probs after top-k and top-p, -inf for tokens cut off. Ties with the k-th best token stay."""
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
