"""Greedy responses to the prompts of a step, one each: the baseline of the estimator remax (Li et al. 2024, arXiv:2310.10505).

They are drawn in stage 2 and scored in stage 3 beside the sampled ones, and not trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megappo.data.prompts import Prompt
from megappo.data.tokenizers import Tokenizer
from megappo.rewards.scorer import Scorer
from megappo.rollout.generation import generate
from megappo.rollout.types import Request, RolloutEngine, SamplingParams
from megappo.trainer.experience.collect import SampleRequests, collect
from megappo.trainer.experience.experience import Experience
from megappo.trainer.scoring import score_responses


def draw_greedy(rollout: RolloutEngine, requests: Sequence[Request], sampling: SamplingParams) -> Experience:
    """Experience of one greedy response to each prompt of `requests`, numbered as their groups. Collective over the world.

    sampling: of the step, for the length limit and the stops.
    """
    assert isinstance(requests, SampleRequests), "responses that go on have no greedy one"
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, record_kept=False)
    once = replace(requests, samples_per_prompt=1, seed_of=lambda prompt: prompt)  # nothing is drawn: any seed will do
    return collect(once, generate(rollout, once, greedy))


def score_greedy(
    greedy: Experience,
    experience: Experience,
    prompt_of: Callable[[int], Prompt],
    tokenizer: Tokenizer,
    scorer: Scorer,
    stop: tuple[str, ...],
) -> Tensor:
    """[B] fp64: for each sample of this rank the score of the greedy response to its prompt. Collective over the world; errors as
    `score_responses`.

    greedy: of `draw_greedy`. experience: the samples. prompt_of: prompt of a group.
    """
    scored = score_responses(greedy, prompt_of, tokenizer, scorer, stop)
    scores = greedy.column(torch.tensor(scored.total, dtype=torch.float64))
    return scores[experience.table.group[experience.numbers].long()]
