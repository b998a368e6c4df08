"""Stage 3: the rewards of the sampled responses, computed once over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megappo.data.prompts import Prompt
from megappo.data.tokenizers import Tokenizer
from megappo.rewards.base import RewardInput
from megappo.rewards.compose import RewardError, Scorer
from megappo.rollout.types import Response


@dataclass(frozen=True)
class Scored:
    """Texts and scores of all samples, the same on every rank. total: [B]; parts: rule name -> [B].

    num_undecided, num_unusable: as in `rewards.compose.Scores`.
    """

    texts: list[str]
    total: list[float]
    parts: dict[str, list[float]]
    num_undecided: int
    num_unusable: int = 0


def score_responses(
    prompts: Sequence[Prompt], responses: Sequence[Response], tokenizer: Tokenizer, scorer: Scorer, stop: Sequence[str] = ()
) -> Scored:
    """Decode and score; prompts[i] belongs to responses[i]. Collective: each rank scores its share, all get all.

    stop: strings that end a response; rules see the text before them, training keeps their tokens.

    A rule that fails anywhere raises the same RewardError on every rank, so none is left waiting in a collective.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = range(rank, len(responses), world_size)
    texts = [response_text(responses[i], tokenizer, stop) for i in mine]
    samples = [_reward_input(prompts[i], responses[i], text, tokenizer, i) for i, text in zip(mine, texts)]
    try:
        scores = scorer.score(samples)
        parts = {name: values.tolist() for name, values in scores.parts.items()}
        share: tuple = ("scored", texts, scores.total.tolist(), parts, scores.num_undecided, scores.num_unusable)
    except RewardError as error:
        share = ("failed", f"rank {rank}: {error}")
    shares: list = [None] * world_size
    dist.all_gather_object(shares, share)
    failures = [item[1] for item in shares if item[0] == "failed"]
    if failures:
        raise RewardError(failures[0])
    return Scored(
        texts=_interleave([item[1] for item in shares], len(responses)),
        total=_interleave([item[2] for item in shares], len(responses)),
        parts={name: _interleave([_part(item, name) for item in shares], len(responses)) for name in _part_names(shares)},
        num_undecided=sum(item[4] for item in shares),
        num_unusable=sum(item[5] for item in shares),
    )


def _part_names(shares: Sequence[tuple]) -> list[str]:
    """Parts of any rank, in the order of the first that has them: a rule of the user may name other parts for other samples."""
    return list(dict.fromkeys(name for share in shares for name in share[3]))


def _part(share: tuple, name: str) -> list[float]:
    return share[3].get(name) or [0.0] * len(share[1])


def response_text(response: Response, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> str:
    """The response without the end-of-sequence token, up to the first of the stop strings."""
    tokens = list(response.tokens)
    if tokens and tokens[-1] in tokenizer.eos_ids:
        tokens.pop()
    text = tokenizer.decode(tokens)
    ends = [end for string in stop if (end := text.find(string)) >= 0]
    return text[: min(ends)] if ends else text


def _reward_input(prompt: Prompt, response: Response, text: str, tokenizer: Tokenizer, index: int) -> RewardInput:
    return RewardInput(
        prompt=prompt.text,
        response=text,
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
