"""Validation: greedy answers to held-out prompts, scored by the rules of the training reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megappo.data.prompts import Prompt
from megappo.data.tokenizers import Tokenizer
from megappo.rewards.scorer import Scorer
from megappo.rollout.types import RolloutEngine, SamplingParams
from megappo.trainer.experience import make_requests
from megappo.trainer.scoring import score_responses


@dataclass(frozen=True)
class Evaluation:
    """Mean score, mean of every reward part, mean response length in tokens and share cut by the length limit."""

    num_prompts: int
    score: float
    parts: dict[str, float]
    length: float
    truncated: float


def evaluate(
    prompts: Sequence[Prompt], rollout: RolloutEngine, sampling: SamplingParams, tokenizer: Tokenizer, scorer: Scorer
) -> Evaluation:
    """Evaluate on held-out prompts. Collective. `sampling` gives limits and stop strings; its temperature is replaced by 0."""
    # Greedy decoding does not use the seeds.
    requests = make_requests([p.tokens for p in prompts], samples_per_prompt=1, run_seed=0, step=0)
    responses = rollout.generate(requests, replace(sampling, temperature=0.0, top_p=1.0, top_k=-1))
    scored = score_responses(prompts, responses, tokenizer, scorer, sampling.stop)
    count = len(prompts)
    return Evaluation(
        num_prompts=count,
        score=sum(scored.total) / count,
        parts=scored.part_means(),
        length=sum(len(r.tokens) for r in responses) / count,
        truncated=sum(r.finish == "length" for r in responses) / count,
    )
