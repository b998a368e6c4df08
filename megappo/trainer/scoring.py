"""Stage 3: the rewards of the sampled responses, computed once over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megappo.data.prompts import Prompt
from megappo.data.tokenizers import Tokenizer
from megappo.rewards.base import RewardError, RewardInput
from megappo.rewards.compose import Scored
from megappo.rewards.scorer import Scorer
from megappo.rollout.types import Response


def score_responses(
    prompts: Sequence[Prompt],
    responses: Sequence[Response],
    tokenizer: Tokenizer,
    scorer: Scorer,
    stop: Sequence[str] = (),
    model_parts: Mapping[str, Sequence[float]] | None = None,
) -> Scored:
    """Decode and score; prompts[i] belongs to responses[i]. Collective: each rank scores its share, all get all.

    stop: strings that end a response; rules see the text before them, training keeps their tokens. model_parts: name -> [B] values
    of parts that all ranks have computed together.

    A part that fails anywhere raises the same RewardError on every rank, so none is left waiting in a collective.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = range(rank, len(responses), world_size)
    samples = [_reward_input(prompts[i], responses[i], tokenizer, stop, i) for i in mine]
    share: tuple[str, Any]
    try:
        scorer.submit(samples)
        share = ("scored", scorer.finish())
    except RewardError as error:
        share = ("failed", f"rank {rank}: {error}")
    shares: list[Any] = [None] * world_size
    dist.all_gather_object(shares, share)
    if failures := [found for state, found in shares if state == "failed"]:
        raise RewardError(failures[0])
    return scorer.composition.compose(_interleave([found for _, found in shares], len(responses)), model_parts)


def response_text(response: Response, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> str:
    """The response without the end-of-sequence token, up to the first of the stop strings."""
    tokens = list(response.tokens)
    if tokens and tokens[-1] in tokenizer.eos_ids:
        tokens.pop()
    text = tokenizer.decode(tokens)
    ends = [end for string in stop if (end := text.find(string)) >= 0]
    return text[: min(ends)] if ends else text


def _reward_input(prompt: Prompt, response: Response, tokenizer: Tokenizer, stop: Sequence[str], index: int) -> RewardInput:
    return RewardInput(
        prompt=prompt.text,
        response=response_text(response, tokenizer, stop),
        answer=prompt.answer,
        truncated=response.finish == "length",
        num_tokens=len(response.tokens),
        record=prompt.record,
        sample_id=f"{prompt.id} (sample {index})",
        full_response=tokenizer.decode_all(response.tokens),
        tokens=tuple(response.tokens),
    )


def _interleave(shares: list[list], count: int) -> list:
    """Undo the split i -> rank i % world_size."""
    return [shares[i % len(shares)][i // len(shares)] for i in range(count)]
